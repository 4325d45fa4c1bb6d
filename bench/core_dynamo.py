"""Dynamo's side of `make bench`: its own Rust core through its Python API. Runs in a virtual environment of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import core_streams as streams
from core_side import Timed, resident_bytes, serve, stopwatch
from dynamo._core import RadixTree, SelectionService, compute_block_hash_for_seq


def stored(chain: streams.Chain) -> bytes:
    """A store event in the form that `apply_event` takes."""
    blocks = [{"block_hash": h, "tokens_hash": t} for h, t in zip(chain.prefix, chain.local, strict=True)]
    return json.dumps({"event_id": 0, "dp_rank": 0, "data": {"stored": {"parent_hash": chain.parent, "blocks": blocks}}}).encode()


def removed(chain: streams.Chain) -> bytes:
    """A remove event."""
    return json.dumps({"event_id": 0, "dp_rank": 0, "data": {"removed": {"block_hashes": chain.prefix}}}).encode()


def calls(ops: Iterator[streams.Op]) -> list[tuple[str, tuple[Any, ...]]]:
    """Ops as methods with their arguments, events serialised beforehand."""
    made: list[tuple[str, tuple[Any, ...]]] = []
    for op in ops:
        match op:
            case streams.Match():
                made.append(("find_matches", (op.chain.local,)))
            case streams.Store():
                made.append(("apply_event", (op.rank, stored(op.chain))))
            case streams.Remove():
                made.append(("apply_event", (op.rank, removed(op.chain))))
    return made


def settle(tree: RadixTree) -> None:
    """Events may be applied on another thread: a query waits for those before it."""
    tree.find_matches([1])


def trace(path: str, requests: int) -> Timed:
    """Seconds an op over a whole trace, from an empty tree."""
    made = calls(streams.trace_ops(Path(path), requests))

    def run() -> float:
        tree = RadixTree()
        bound = [(getattr(tree, method), args) for method, args in made]
        start = time.process_time()
        for call, args in bound:
            call(*args)
        settle(tree)
        return (time.process_time() - start) / len(made)

    return run


def fill(tree: RadixTree, rank: int, chain: streams.Chain) -> None:
    """Store a chain in steps."""
    parent = chain.parent
    for start in range(0, len(chain.prefix), streams.STEP_BLOCKS):
        stop = start + streams.STEP_BLOCKS
        tree.apply_event(rank, stored(streams.Chain(chain.prefix[start:stop], chain.local[start:stop], parent)))
        parent = chain.prefix[min(stop, len(chain.prefix)) - 1]


def match(ranks: int, blocks: int) -> Timed:
    """Seconds a match of a chain that every rank holds a quarter of, and one in eight all of."""
    tree, chain = RadixTree(), streams.random_chain("match", blocks)
    for rank in range(ranks):
        fill(tree, rank, streams.random_chain(f"own {rank}", 4096))
        depth = blocks if rank % 8 == 0 else blocks // 4
        fill(tree, rank, streams.Chain(chain.prefix[:depth], chain.local[:depth]))
    scores = tree.find_matches(chain.local).scores
    assert max(scores.values()) == blocks
    assert len(scores) == ranks
    return stopwatch(lambda: tree.find_matches(chain.local).scores, 100_000 // blocks)


def store_remove(ranks: int, events: int) -> Timed:
    """Seconds a block to store events of 64 blocks and to remove them again, from and to a filled tree."""
    tree = RadixTree()
    for rank in range(ranks):
        fill(tree, rank, streams.random_chain(f"own {rank}", 16_384))
    chains = [streams.random_chain(f"event {n}", 64) for n in range(events)]
    made = [(n % ranks, stored(chain), removed(chain)) for n, chain in enumerate(chains)]

    def work() -> None:
        for rank, store, _ in made:
            tree.apply_event(rank, store)
        for rank, _, remove in made:
            tree.apply_event(rank, remove)
        settle(tree)

    timed = stopwatch(work)
    return lambda: timed() / (events * 64 * 2)


def hash_chain(tokens: int) -> Timed:
    """Seconds to hash a prompt's blocks."""
    prompt = streams.random_tokens("prompt", tokens)
    return stopwatch(lambda: compute_block_hash_for_seq(prompt, streams.BLOCK_SIZE), 200_000 // tokens)


def choice(ranks: int, tokens: int) -> Timed:
    """Seconds of a whole choice on an empty index (events reach this service only over ZeroMQ), which favours it."""
    loop = asyncio.new_event_loop()
    service = SelectionService(indexer_threads=1)
    request = {"token_ids": streams.random_tokens("prompt", tokens)}

    async def register(workers: int) -> None:
        size = ranks // workers
        for worker in range(workers):
            endpoints = {rank: f"tcp://127.0.0.1:{20_000 + worker * size + rank}" for rank in range(size)}
            record = {"worker_id": worker, "model_name": "default", "endpoint": f"http://127.0.0.1:{9_000 + worker}"}
            record |= {"block_size": streams.BLOCK_SIZE, "kv_events_endpoints": endpoints, "max_num_batched_tokens": 8192}
            record |= {"data_parallel_start_rank": 0, "data_parallel_size": size, "total_kv_blocks": streams.RANK_BLOCKS}
            await service.upsert_worker(record)

    loop.run_until_complete(register(2))

    async def select(repeats: int) -> float:
        start = time.process_time()
        for _ in range(repeats):
            await service.select(request)
        return (time.process_time() - start) / repeats

    return lambda: loop.run_until_complete(select(max(4, 100_000 // tokens)))


def memory(ranks: int, holders: int, blocks: int) -> Timed:
    """Resident bytes a block, the mean on the way from half of the blocks to all: both sides grow in steps."""
    keep: list[object] = []

    def run() -> float:
        tree, samples = RadixTree(), []
        keep.append(tree)
        fill(tree, 0, streams.random_chain("warm", 64))
        settle(tree)
        before, events = resident_bytes(), blocks // 64
        for number in range(events):
            event = stored(streams.random_chain(f"memory {number}", 64))
            for copy in range(holders):
                tree.apply_event((number + copy * (ranks // holders)) % ranks, event)
            settle(tree)
            if number + 1 >= events // 2 and (number + 1) % (events // 16) == 0:
                samples.append((resident_bytes() - before) / (64 * (number + 1)))
        return sum(samples) / len(samples)

    return run


def import_core() -> Timed:
    """Seconds that a fresh interpreter takes to import the core."""
    script = "import time; t = time.perf_counter(); import dynamo._core; print(time.perf_counter() - t)"

    def run() -> float:
        return float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)

    return run


if __name__ == "__main__":
    serve(
        {
            "trace": trace,
            "match": match,
            "store_remove": store_remove,
            "hash_chain": hash_chain,
            "choice": choice,
            "memory": memory,
            "import": import_core,
        }
    )
