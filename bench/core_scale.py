"""The core on its own: one process, one processor, up to 10 million blocks over 1,024 ranks; how each cost grows.

    python bench/core_scale.py [--json FILE] [--blocks 10000000] [--ranks 1024] [--seconds 10]

Times are processor time of this process, so that neighbours on the machine don't count. The index is filled in events of 64
blocks: of ten, one is of a system prompt that many ranks hold, one of a conversation
that two ranks hold, eight are one rank's alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core_side import resident_bytes

from rankway import _core
from rankway.choice import LoadTable, Weights

BLOCK_SIZE = 16
EVENT_BLOCKS = 64
EVENT_BYTES = 8 * EVENT_BLOCKS
SYSTEM_PROMPTS = 64
WEIGHTS = Weights()


@dataclass
class Cluster:
    """An index filled like a cluster's, with the prompts that hit it."""

    ranks: int
    index: Any = field(default_factory=_core.Index)
    active: Any = field(default_factory=_core.ActiveBlocks)
    loads: LoadTable = field(default_factory=LoadTable)
    events: list[tuple[int, bytes]] = field(default_factory=list)
    """Events of one rank's own blocks: (rank, hashes)."""
    longest: float = 0.0
    """Seconds of the longest single store."""

    def __post_init__(self) -> None:
        self.rng = random.Random(1)
        self.loads.grow(self.ranks)
        for rank in range(self.ranks):
            self.loads.eligible[rank] = self.loads.known[rank] = 1
            self.loads.decode_blocks[rank] = self.rng.randrange(2_000)
            self.loads.prefill_tokens[rank] = self.rng.randrange(8_192)

    def store(self, rank: int, hashes: bytes) -> None:
        start = time.process_time()
        self.index.store(rank, hashes)
        self.longest = max(self.longest, time.process_time() - start)

    def fill(self, blocks: int) -> None:
        """Store events until the index has that many distinct blocks."""
        while len(self.index) < blocks:
            for _ in range(10):
                self.fill_ten()

    def fill_ten(self) -> None:
        rng = self.rng
        shared = os.urandom(EVENT_BYTES)
        for rank in rng.sample(range(self.ranks), max(1, min(self.ranks, rng.choice((4, 16, 64))))):
            self.store(rank, shared)
        both = os.urandom(EVENT_BYTES)
        for rank in rng.sample(range(self.ranks), min(2, self.ranks)):
            self.store(rank, both)
        for _ in range(8):
            event = (rng.randrange(self.ranks), os.urandom(EVENT_BYTES))
            self.store(*event)
            if len(self.events) < 100_000:
                self.events.append(event)

    def prompts(self, count: int, tokens: int) -> list[bytes]:
        """Prompts whose first quarter many ranks hold and whose whole one rank holds; some of them are active there."""
        made = []
        for number in range(count):
            prompt = os.urandom(4 * tokens)
            hashes = _core.hash_chain(prompt, BLOCK_SIZE, 7)
            quarter = len(hashes) // 32 * 8
            for rank in self.rng.sample(range(self.ranks), min(self.ranks, 32)):
                self.index.store(rank, hashes[:quarter])
            home = self.rng.randrange(self.ranks)
            self.index.store(home, hashes)
            if number % 2:
                self.active.acquire(home, hashes)
            made.append(prompt)
        return made

    def choose(self, prompt: bytes, seed: int) -> Any:
        return _core.choose_for_tokens(self.index, self.active, prompt, BLOCK_SIZE, 7, self.loads, WEIGHTS, seed)


def least(call: Callable[..., object], arguments: Sequence[tuple[Any, ...]], runs: int = 5) -> float:
    """Seconds a call, the least of a few runs over all arguments."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        for some in arguments:
            call(*some)
        times.append(time.process_time() - start)
    return min(times) / len(arguments)


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "longest": 1.0}
    return {name: round(1e6 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 1) for name, q in at.items()}


def under_events(cluster: Cluster, prompts: list[bytes], seconds: float, blocks_per_s: int) -> dict[str, Any]:
    """Choices, one after another, while events are applied at a rate: half stores, half removals of what was stored.

    A choice that lost the processor to another process runs on cold caches afterwards: those are told apart.
    """
    pending: list[tuple[int, bytes]] = []
    fresh = [(cluster.rng.randrange(cluster.ranks), os.urandom(EVENT_BYTES)) for _ in range(4_000)]
    undisturbed: list[float] = []
    disturbed: list[float] = []
    events: list[float] = []

    def apply(call: Callable[[int, bytes], int], event: tuple[int, bytes]) -> None:
        start = time.process_time()
        call(*event)
        events.append(time.process_time() - start)

    begin = time.process_time()
    while (now := time.process_time()) - begin < seconds:
        while len(events) * EVENT_BLOCKS < (now - begin) * blocks_per_s:
            pending.append(fresh[len(events) % len(fresh)])
            apply(cluster.index.store, pending[-1])
            if len(pending) > 2_000:
                apply(cluster.index.remove, pending.pop(0))
        number = len(undisturbed) + len(disturbed)
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        start = time.process_time()
        cluster.choose(prompts[number % len(prompts)], number)
        taken = time.process_time() - start
        alone = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == switches
        (undisturbed if alone else disturbed).append(taken)
    return {
        "blocks_per_s": round(len(events) * EVENT_BLOCKS / seconds),
        "choices": len(undisturbed),
        "choice_us": quantiles(undisturbed),
        "choices_disturbed": len(disturbed),
        "choice_disturbed_us": quantiles(disturbed) if disturbed else {},
        "event_us": quantiles(events),
    }


def at_scale(ranks: int, blocks: int, seconds: float) -> dict[str, Any]:
    """The promise for one process: memory a block and the choice's tail while events are applied, and the longest operations."""
    before = resident_bytes()
    cluster = Cluster(ranks)
    cluster.fill(blocks)
    kept = len(cluster.events) * (EVENT_BYTES + 33 + 72)
    found: dict[str, Any] = {"ranks": ranks, "blocks": len(cluster.index)}
    found["resident_bytes_a_block"] = round((resident_bytes() - before - kept) / len(cluster.index), 1)
    found["memory_bytes_a_block"] = round(cluster.index.memory_bytes() / len(cluster.index), 1)
    found["longest_store_us"] = round(1e6 * cluster.longest, 1)
    prompts = cluster.prompts(400, 16_384)
    found["under_events"] = under_events(cluster, prompts, seconds, 200_000)
    start = time.process_time()
    held = cluster.index.clear(0)
    found["clear"] = {"blocks": held, "us": round(1e6 * (time.process_time() - start), 1)}
    found["under_events_and_sweep"] = under_events(cluster, prompts, seconds, 200_000)
    start = time.process_time()
    cluster.index.blocks_of(range(64))
    found["blocks_of_64_slots_ms"] = round(1e3 * (time.process_time() - start), 1)
    return found


def by_blocks(most: int) -> list[dict[str, float]]:
    """Cost a block as the index grows, 64 ranks."""
    cluster, points = Cluster(64), []
    rng = random.Random(2)
    for blocks in (size for size in (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000) if size <= most):
        cluster.fill(blocks)
        events = rng.sample(cluster.events, min(2_000, len(cluster.events)))
        new = [(rank, os.urandom(EVENT_BYTES)) for rank, _ in events]
        index = cluster.index
        point = {"blocks": float(len(index)), "bytes": index.memory_bytes() / len(index)}
        matches = [(hashes,) for _, hashes in events]
        pairs = [(least(index.store, new, 1), least(index.remove, new, 1)) for _ in range(3)]
        times = {
            "match_ns": least(index.match, matches),
            "store_ns": min(p[0] for p in pairs),
            "remove_ns": min(p[1] for p in pairs),
        }
        points.append(point | {name: 1e9 * seconds / EVENT_BLOCKS for name, seconds in times.items()})
    return points


def by_ranks() -> list[dict[str, float]]:
    """A choice of 16,384 tokens as the cluster grows, 4,096 blocks a rank, at most 4 million."""
    points = []
    for ranks in (1, 4, 16, 64, 256, 1_024, 4_096):
        cluster = Cluster(ranks)
        cluster.fill(min(4_096 * ranks, 4_000_000))
        prompts = [(prompt, 1) for prompt in cluster.prompts(50, 16_384)]
        seconds = least(cluster.choose, prompts)
        points.append({"ranks": float(ranks), "choice_us": 1e6 * seconds})
    return points


def by_tokens(ranks: int = 64) -> list[dict[str, float]]:
    """The parts of a choice as prompts grow, 64 ranks, a million blocks."""
    cluster, points = Cluster(ranks), []
    cluster.fill(1_000_000)
    for tokens in (256, 1_024, 4_096, 16_384, 65_536, 131_072):
        prompts = cluster.prompts(max(4, 400_000 // tokens), tokens)
        overlaps = array("I", bytes(4 * ranks))
        chains = [(prompt, BLOCK_SIZE, 7) for prompt in prompts]
        matches = [(_core.hash_chain(*chain), overlaps) for chain in chains]
        times = {
            "hash_us": least(_core.hash_chain, chains),
            "match_us": least(cluster.index.match_into, matches),
            "choice_us": least(cluster.choose, [(prompt, 1) for prompt in prompts]),
        }
        points.append({"tokens": float(tokens)} | {name: 1e6 * seconds for name, seconds in times.items()})
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, default=os.environ.get("JSON"), help="where the figures go (default: $JSON, else stdout)"
    )
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=1_024)
    parser.add_argument("--seconds", type=float, default=10.0, help="of choices under events")
    parser.add_argument("--cpu", type=int, default=0)
    parser.add_argument("--part", choices=["all", "at_scale", "growth"], default="all")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.cpu})
    figures: dict[str, Any] = {}
    if args.part != "growth":
        figures["at_scale"] = at_scale(args.ranks, args.blocks, args.seconds)
    if args.part != "at_scale":
        figures |= {"by_blocks": by_blocks(args.blocks), "by_ranks": by_ranks(), "by_tokens": by_tokens()}
    text = json.dumps(figures, indent=1)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
