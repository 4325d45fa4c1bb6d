"""The inputs of `make bench`, the same for both sides: made from seeds and traces, by the standard library alone.

Chains: lists of blocks, each with the hash that names its prefix (what Rankway and engines speak of) and the hash of its own
tokens (what Dynamo's radix tree walks by).
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK_SIZE = 16
TRACE_UNIT_BLOCKS = 512 // BLOCK_SIZE
"""The traces name units of 512 tokens."""
RANKS_OF_TRACE = 16
RANK_BLOCKS = 65_536
STEP_BLOCKS = 8192 // BLOCK_SIZE
"""Blocks of one store event at most: a step of 8,192 tokens, as chunked prefill does by default."""

MASK64 = 2**64 - 1


def splitmix(z: int) -> int:
    """64 bits, well mixed."""
    z = (z + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks of one prompt, or of a stretch of it."""

    prefix: list[int]
    """Names each block and everything before it."""
    local: list[int]
    """Names each block's own tokens."""
    parent: int | None = None
    """The prefix hash before the first block; None: the root."""


def random_chain(seed: str, blocks: int) -> Chain:
    """A chain of its own."""
    bits = random.Random(seed)
    return Chain([bits.getrandbits(64) for _ in range(blocks)], [bits.getrandbits(64) for _ in range(blocks)])


def random_tokens(seed: str, count: int) -> list[int]:
    """Token ids of a vocabulary of 151,936."""
    return random.Random(seed).choices(range(151_936), k=count)


@dataclass(frozen=True, slots=True)
class Match:
    """A request comes: who holds the start of its prompt?"""

    chain: Chain


@dataclass(frozen=True, slots=True)
class Store:
    """A rank has cached blocks that follow `chain.parent`."""

    rank: int
    chain: Chain


@dataclass(frozen=True, slots=True)
class Remove:
    """A rank has evicted blocks."""

    rank: int
    chain: Chain


Op = Match | Store | Remove


class SimulatedRank:
    """An LRU cache of blocks, in units of the trace: what it stores and evicts."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.units: OrderedDict[int, Chain] = OrderedDict()
        self.blocks = 0

    def held(self, keys: list[int]) -> int:
        """Leading units that it holds."""
        return next((i for i, key in enumerate(keys) if key not in self.units), len(keys))

    def serve(self, keys: list[int], units: list[Chain]) -> Iterator[Op]:
        """The events of one request."""
        held = self.held(keys)
        for key, unit in zip(keys[held:], units[held:], strict=True):
            self.blocks += len(unit.prefix)
            self.units[key] = unit
        for key in reversed(keys):  # as engines free blocks: the tail of a prompt goes first
            self.units.move_to_end(key)
        evicted = []
        while self.blocks > RANK_BLOCKS:
            _, unit = self.units.popitem(last=False)
            self.blocks -= len(unit.prefix)
            evicted.append(unit)
        if evicted:
            yield Remove(self.rank, joined(evicted))
        for start in range(held, len(units), STEP_BLOCKS // TRACE_UNIT_BLOCKS):
            step = units[start : start + STEP_BLOCKS // TRACE_UNIT_BLOCKS]
            yield Store(self.rank, joined(step))


def joined(units: list[Chain]) -> Chain:
    """One stretch of several."""
    return Chain([h for u in units for h in u.prefix], [h for u in units for h in u.local], units[0].parent if units else None)


def trace_ops(path: Path, requests: int) -> Iterator[Op]:
    """What `requests` requests of a Mooncake trace do to 16 ranks when each goes to the rank that holds most of it."""
    ranks = [SimulatedRank(rank) for rank in range(RANKS_OF_TRACE)]
    seen: dict[int, Chain] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number == requests:
                return
            keys, units = units_of(json.loads(line), seen)
            if not units:
                continue
            yield Match(joined(units))
            held = [rank.held(keys) for rank in ranks]
            best = max(held)
            candidates = [rank for rank, overlap in zip(ranks, held, strict=True) if overlap == best]
            yield from min(candidates, key=lambda rank: (rank.blocks, rank.rank)).serve(keys, units)


def units_of(request: dict[str, object], seen: dict[int, Chain]) -> tuple[list[int], list[Chain]]:
    """A trace line's prompt in units: full blocks only. `seen` keeps the units of shared prefixes shared."""
    ids, blocks = request["hash_ids"], int(str(request["input_length"])) // BLOCK_SIZE
    assert isinstance(ids, list)
    keys, units, before, key = [], [], None, 0
    for number, hash_id in enumerate(ids):
        size = min(TRACE_UNIT_BLOCKS, blocks - number * TRACE_UNIT_BLOCKS)
        if size <= 0:
            break
        key = splitmix(key ^ splitmix(hash_id * 64 + size))
        unit = seen.get(key)
        if unit is None:
            local = [splitmix(hash_id * 64 + i) for i in range(size)]
            prefix = [splitmix(key ^ i) for i in range(size)]
            unit = seen[key] = Chain(prefix, local, before)
        before = unit.prefix[-1]
        keys.append(key)
        units.append(unit)
    return keys, units
