"""Rankway's side of `make bench`."""

from __future__ import annotations

import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import core_streams as streams
from core_side import Timed, resident_bytes, serve, stopwatch

from rankway import _core
from rankway.choice import LoadTable, Weights


def shaped(numbers: list[int], form: str, code: str = "Q") -> Any:
    """Numbers as the caller has them: `lists` of ints, or packed `buffers`."""
    return numbers if form == "lists" else array(code, numbers).tobytes()


def calls(ops: Iterator[streams.Op], form: str) -> list[tuple[str, tuple[Any, ...]]]:
    """Ops as methods with their arguments, so that the timed loop does nothing else."""
    made: list[tuple[str, tuple[Any, ...]]] = []
    for op in ops:
        hashes = shaped(op.chain.prefix, form)
        match op:
            case streams.Match():
                made.append(("match", (hashes,)))
            case streams.Store():
                made.append(("store", (op.rank, hashes)))
            case streams.Remove():
                made.append(("remove", (op.rank, hashes)))
    return made


def trace(path: str, requests: int, form: str) -> Timed:
    """Seconds an op over a whole trace, from an empty index."""
    made = calls(streams.trace_ops(Path(path), requests), form)

    def run() -> float:
        index = _core.Index()
        bound = [(getattr(index, method), args) for method, args in made]
        start = time.process_time()
        for call, args in bound:
            call(*args)
        return (time.process_time() - start) / len(made)

    return run


def match(ranks: int, blocks: int, form: str) -> Timed:
    """Seconds a match of a chain that every rank holds a quarter of, and one in eight all of."""
    index, chain = _core.Index(), streams.random_chain("match", blocks)
    for rank in range(ranks):
        index.store(rank, streams.random_chain(f"own {rank}", 4096).prefix)
        index.store(rank, chain.prefix[: blocks if rank % 8 == 0 else blocks // 4])
    hashes = shaped(chain.prefix, form)
    if form == "lists":
        return stopwatch(lambda: index.match(hashes), 200_000 // blocks)
    overlaps = array("I", bytes(4 * ranks))
    return stopwatch(lambda: index.match_into(hashes, overlaps), 400_000 // blocks)


def store_remove(ranks: int, events: int, form: str) -> Timed:
    """Seconds a block to store events of 64 blocks and to remove them again, from and to a filled index."""
    index = _core.Index()
    for rank in range(ranks):
        index.store(rank, streams.random_chain(f"own {rank}", 16_384).prefix)
    made = [(n % ranks, shaped(streams.random_chain(f"event {n}", 64).prefix, form)) for n in range(events)]

    def work() -> None:
        for rank, hashes in made:
            index.store(rank, hashes)
        for rank, hashes in made:
            index.remove(rank, hashes)

    timed = stopwatch(work)
    return lambda: timed() / (events * 64 * 2)


def hash_chain(tokens: int, form: str) -> Timed:
    """Seconds to hash a prompt."""
    prompt = shaped(streams.random_tokens("prompt", tokens), form, "I")
    return stopwatch(lambda: _core.hash_chain(prompt, streams.BLOCK_SIZE, 7), 400_000 // tokens)


def choice(ranks: int, tokens: int, form: str) -> Timed:
    """Seconds of a whole choice; every rank holds a quarter of the prompt, one in eight all of it."""
    index, active, loads, weights = _core.Index(), _core.ActiveBlocks(), LoadTable(), Weights()
    loads.grow(ranks)
    numbers = streams.random_tokens("prompt", tokens)
    prompt = shaped(numbers, form, "I")
    hashes = _core.hash_chain(numbers, streams.BLOCK_SIZE, 7)
    for rank in range(ranks):
        loads.eligible[rank] = loads.known[rank] = 1
        loads.decode_blocks[rank] = 100 * rank
        index.store(rank, streams.random_chain(f"own {rank}", 4096).prefix)
        index.store(rank, hashes[: len(hashes) // 8 // (1 if rank % 8 == 0 else 4) * 8])
        active.acquire(rank, streams.random_chain(f"active {rank}", 256).prefix)
    picked, _ = _core.choose_for_tokens(index, active, prompt, streams.BLOCK_SIZE, 7, loads, weights, 1)
    assert picked is not None
    assert picked.slot == 0
    return stopwatch(
        lambda: _core.choose_for_tokens(index, active, prompt, streams.BLOCK_SIZE, 7, loads, weights, 1), 400_000 // tokens
    )


def memory(ranks: int, holders: int, blocks: int) -> Timed:
    """Resident bytes a block, the mean on the way from half of the blocks to all: both sides grow in steps."""
    keep: list[object] = []

    def run() -> float:
        index, samples = _core.Index(), []
        keep.append(index)
        index.store(0, streams.random_chain("warm", 64).prefix)
        before, events = resident_bytes(), blocks // 64
        for number in range(events):
            hashes = array("Q", streams.random_chain(f"memory {number}", 64).prefix)
            for copy in range(holders):
                index.store((number + copy * (ranks // holders)) % ranks, hashes)
            if number + 1 >= events // 2 and (number + 1) % (events // 16) == 0:
                samples.append((resident_bytes() - before) / (64 * (number + 1)))
        return sum(samples) / len(samples)

    return run


def import_core() -> Timed:
    """Seconds that a fresh interpreter takes to import the core."""
    script = "import time; t = time.perf_counter(); import rankway._core; print(time.perf_counter() - t)"

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
