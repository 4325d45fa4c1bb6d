"""Who holds which block: a set of block hashes per slot, and the counted set of the blocks that requests use now.

A slot is a small number that stands for one target's instance; its owner hands slots out and reuses them after `clear`.
The classes here are the readable form and the oracle of the compiled ones; `open_index` picks what this machine has.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableSequence
from operator import index as whole_number
from typing import Protocol

from rankway.blocks import Hashes, mix, pack_hashes, unpack_hashes


class Index(Protocol):
    """A set of block hashes per slot. Slots are 0 … 2^20-1 and need no announcement. All hashes may be numbers or packed."""

    def store(self, slot: int, hashes: Hashes) -> int:
        """Add blocks; returns how many were new to the slot."""

    def remove(self, slot: int, hashes: Hashes) -> int:
        """Take blocks away; returns how many the slot held. Unknown ones don't stop the rest."""

    def clear(self, slot: int) -> int:
        """Forget the slot; returns how many blocks it held."""

    def match(self, hashes: Hashes) -> dict[int, int]:
        """For each slot that holds the first block: the length of the run of leading blocks that it holds without a hole."""

    def match_into(self, hashes: Hashes, overlaps: MutableSequence[int]) -> None:
        """`match` into a buffer of uint32 (an `array('I')`) indexed by slot; slots beyond its end are left out, others get 0."""

    def size(self, slot: int) -> int:
        """Blocks that the slot holds."""

    def digest(self, slot: int) -> int:
        """XOR of `blocks.mix` over the slot's blocks; 0 for an empty slot."""

    def blocks(self, slot: int) -> bytes:
        """The slot's blocks, packed, in no order. The compiled index reads all that it has for it."""

    def blocks_of(self, slots: Iterable[int]) -> list[bytes]:
        """`blocks` of several slots, all read in one pass. ValueError: a slot that holds blocks is there twice."""

    def contains(self, slot: int, block_hash: int) -> bool:
        """Whether the slot holds the block."""

    def memory_bytes(self) -> int:
        """Bytes that the index takes (an estimate for the pure one)."""

    def __len__(self) -> int:
        """Distinct blocks over all slots. After a `clear` the compiled index first finishes its sweep: not for a hot path."""


class ActiveBlocks(Protocol):
    """The blocks that requests in flight use, counted per slot: blocks shared by requests count once.

    What is acquired together is a chain from the root on, so each slot's active set is closed under prefixes.
    """

    def acquire(self, slot: int, hashes: Hashes) -> int:
        """One more user of each block; returns how many became active."""

    def release(self, slot: int, hashes: Hashes) -> int:
        """One user less of each block; returns how many are no longer active. Blocks that aren't active are passed over."""

    def active(self, slot: int) -> int:
        """Distinct active blocks of the slot."""

    def overlap(self, slot: int, hashes: Hashes) -> int:
        """Leading blocks that are active on the slot."""

    def clear(self, slot: int) -> int:
        """Forget the slot; returns how many blocks were active."""


class PureIndex:
    """`Index` as a dict of sets."""

    def __init__(self) -> None:
        self._holders: dict[int, set[int]] = {}
        self._blocks: dict[int, set[int]] = {}
        self._digests: dict[int, int] = {}

    def store(self, slot: int, hashes: Hashes) -> int:
        numbers = as_numbers(hashes)
        held = self._blocks.setdefault(_check_slot(slot), set())
        before = len(held)
        digest = self._digests.get(slot, 0)
        for h in numbers:
            if h not in held:
                held.add(h)
                digest ^= mix(h)
                self._holders.setdefault(h, set()).add(slot)
        self._digests[slot] = digest
        return len(held) - before

    def remove(self, slot: int, hashes: Hashes) -> int:
        numbers = as_numbers(hashes)
        held = self._blocks.get(_check_slot(slot))
        if not held:
            return 0
        before = len(held)
        digest = self._digests[slot]
        for h in numbers:
            if h in held:
                held.remove(h)
                digest ^= mix(h)
                self._drop_holder(slot, h)
        self._digests[slot] = digest
        return before - len(held)

    def clear(self, slot: int) -> int:
        held = self._blocks.pop(_check_slot(slot), set())
        self._digests.pop(slot, None)
        for h in held:
            self._drop_holder(slot, h)
        return len(held)

    def match(self, hashes: Hashes) -> dict[int, int]:
        numbers = as_numbers(hashes)
        overlaps: dict[int, int] = {}
        if not len(numbers):
            return overlaps
        running = set(self._holders.get(numbers[0], ()))
        depth = 0
        for h in numbers:
            still = running & self._holders.get(h, set())
            for slot in running - still:
                overlaps[slot] = depth
            running = still
            if not running:
                return overlaps
            depth += 1
        return overlaps | dict.fromkeys(running, depth)

    def match_into(self, hashes: Hashes, overlaps: MutableSequence[int]) -> None:
        found = self.match(hashes)
        for slot in range(len(overlaps)):
            overlaps[slot] = found.get(slot, 0)

    def size(self, slot: int) -> int:
        return len(self._blocks.get(_check_slot(slot), ()))

    def digest(self, slot: int) -> int:
        return self._digests.get(_check_slot(slot), 0)

    def blocks(self, slot: int) -> bytes:
        return pack_hashes(list(self._blocks.get(_check_slot(slot), ())))

    def blocks_of(self, slots: Iterable[int]) -> list[bytes]:
        slots = [_check_slot(slot) for slot in slots]
        seen: set[int] = set()
        for slot in slots:
            if slot in seen:
                raise ValueError(f"slots: {slot} is there twice")
            if self.size(slot):
                seen.add(slot)
        return [self.blocks(slot) for slot in slots]

    def contains(self, slot: int, block_hash: int) -> bool:
        return whole_number(block_hash) in self._blocks.get(_check_slot(slot), ())

    def memory_bytes(self) -> int:
        # A set entry in each direction, a dict entry and an int object: measured on CPython 3.11, rounded up.
        return 300 * len(self._holders) + 80 * sum(map(len, self._blocks.values()))

    def __len__(self) -> int:
        return len(self._holders)

    def _drop_holder(self, slot: int, h: int) -> None:
        holders = self._holders[h]
        holders.remove(slot)
        if not holders:
            del self._holders[h]


class PureActiveBlocks:
    """`ActiveBlocks` as a dict of counts per slot."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[int, int]] = {}

    def acquire(self, slot: int, hashes: Hashes) -> int:
        numbers = as_numbers(hashes)
        counts = self._counts.setdefault(_check_slot(slot), {})
        before = len(counts)
        for h in numbers:
            counts[h] = counts.get(h, 0) + 1
        return len(counts) - before

    def release(self, slot: int, hashes: Hashes) -> int:
        numbers = as_numbers(hashes)
        counts = self._counts.get(_check_slot(slot))
        if not counts:
            return 0
        before = len(counts)
        for h in numbers:
            users = counts.get(h, 0)
            if users > 1:
                counts[h] = users - 1
            elif users == 1:
                del counts[h]
        return before - len(counts)

    def active(self, slot: int) -> int:
        return len(self._counts.get(_check_slot(slot), ()))

    def overlap(self, slot: int, hashes: Hashes) -> int:
        numbers = as_numbers(hashes)
        counts = self._counts.get(_check_slot(slot), {})
        run = 0
        for h in numbers:
            if h not in counts:
                break
            run += 1
        return run

    def clear(self, slot: int) -> int:
        return len(self._counts.pop(_check_slot(slot), ()))


MAX_SLOTS = 2**20


def _check_slot(slot: int) -> int:
    slot = whole_number(slot)
    if not 0 <= slot < MAX_SLOTS:
        raise ValueError(f"slot={slot}: must be 0 … {MAX_SLOTS - 1}")
    return slot


def as_numbers(hashes: Hashes) -> array[int] | list[int]:
    """Block hashes as a sequence of numbers 0 … 2^64-1. Raises ValueError for anything else."""
    if isinstance(hashes, (bytes, bytearray, memoryview)):
        return unpack_hashes(hashes)
    if isinstance(hashes, array) and hashes.typecode == "Q":
        return hashes
    return unpack_hashes(pack_hashes(hashes))
