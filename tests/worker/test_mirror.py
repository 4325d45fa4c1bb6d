"""The mirror: engine hashes to canonical ones, counted; only first arrivals and last departures are told."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankway.blocks import hash_chain, mix, root_hash, unpack_hashes
from rankway.worker.engine import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent
from rankway.worker.mirror import Change, Cleared, Mirror, Removed, Stored

SIZE = 4


def canonical(tokens: Sequence[int], lora: str = "", salt: str = "") -> list[int]:
    """The canonical chain of a prompt, by the oracle."""
    return list(unpack_hashes(hash_chain(tokens, SIZE, root_hash("m", lora, salt))))


def stored(names: Sequence[Any], tokens: Sequence[int], parent: Any = None, **fields: Any) -> BlockStored:
    return BlockStored(names, parent, tokens, fields.pop("block_size", SIZE), **fields)


def replay(changes: Sequence[Change], held: set[int]) -> set[int]:
    """What a follower of the changes holds; every change must be news to it."""
    for change in changes:
        if isinstance(change, Stored):
            assert not held & set(change.blocks)
            held |= set(change.blocks)
        elif isinstance(change, Removed):
            assert set(change.blocks) <= held
            held -= set(change.blocks)
        else:
            assert held
            held = set()
    return held


def test_blocks_are_told_by_their_canonical_hash() -> None:
    """A stored event becomes the canonical chain of its tokens, wherever in the prompt it begins."""
    mirror = Mirror("m", SIZE)
    first, second = mirror.apply([stored(["a", "b"], range(8)), stored(["c"], range(8, 12), parent="b")])
    chain = canonical(range(12))
    assert first == Stored(None, unpack_hashes(b"") + type(mirror.snapshot())("Q", chain[:2]))
    assert second == Stored(chain[1], type(mirror.snapshot())("Q", chain[2:]))
    assert list(mirror.snapshot()) == chain
    assert mirror.digest == mix(chain[0]) ^ mix(chain[1]) ^ mix(chain[2])


def test_copies_are_counted() -> None:
    """A second copy isn't told, and the block leaves with its last copy."""
    mirror = Mirror("m", SIZE)
    assert len(mirror.apply([stored(["a"], range(4))])) == 1
    assert mirror.apply([stored(["a"], range(4))]) == []
    assert mirror.apply([BlockRemoved(["a"])]) == []
    (removed,) = mirror.apply([BlockRemoved(["a"])])
    assert list(removed.blocks) == canonical(range(4))  # type: ignore[union-attr]
    assert (len(mirror), mirror.digest) == (0, 0)


def test_two_engine_hashes_of_one_block_are_one_block() -> None:
    """Copies under different engine hashes count together."""
    mirror = Mirror("m", SIZE)
    mirror.apply([stored(["a"], range(4)), stored([b"A"], range(4))])
    assert mirror.apply([BlockRemoved(["a"])]) == []
    assert len(mirror.apply([BlockRemoved([b"A"])])) == 1


def test_a_run_that_is_partly_held_is_told_in_its_new_parts() -> None:
    """Blocks that the rank holds already split what is told, each part with its own parent."""
    mirror = Mirror("m", SIZE)
    chain = canonical(range(16))
    mirror.apply([stored(["b"], range(4, 8), parent=None)])  # another prompt, another block
    mirror.apply([stored(["a", "x"], range(8))])
    changes = mirror.apply([stored(["a", "x", "c", "d"], range(16))])
    assert [(change.parent, list(change.blocks)) for change in changes] == [(chain[1], chain[2:])]  # type: ignore[union-attr]


def test_blocks_of_an_unknown_parent_are_skipped_and_counted() -> None:
    """Nobody can reach an orphan or its children; their removals are no news."""
    mirror = Mirror("m", SIZE)
    assert mirror.apply([stored(["b", "c"], range(8), parent="a"), stored(["d"], range(4), parent="c")]) == []
    assert mirror.counts.orphans == 3
    assert mirror.apply([BlockRemoved(["b", "c", "d"])]) == []
    assert mirror.counts.unknown_removals == 0
    assert mirror.apply([BlockRemoved(["b"])]) == []
    assert mirror.counts.unknown_removals == 1


def test_orphan_copies_count_once_the_block_is_known() -> None:
    """A block that is known by one copy stays until its orphan copies are gone too."""
    mirror = Mirror("m", SIZE)
    mirror.apply([stored(["b"], range(4, 8), parent="a")])
    mirror.apply([stored(["a", "b"], range(8))])
    mirror.apply([BlockRemoved(["b"])])
    assert canonical(range(8))[1] in mirror
    mirror.apply([BlockRemoved(["a"])])
    mirror.apply([stored(["b"], range(4, 8), parent="a")])  # its parent is gone, but itself it is known
    mirror.apply([BlockRemoved(["b"])])
    assert canonical(range(8))[1] in mirror
    mirror.apply([BlockRemoved(["b"])])
    assert len(mirror) == 0


def test_adapter_and_salt_are_in_the_root_and_nowhere_else() -> None:
    """Untagged extra keys: the adapter's name and the salt enter the chain's root, once."""
    for lora, salt in (("l", ""), ("", "s"), ("l", "s"), ("l", "l")):
        keys: list[Any] = [[key for key in (lora, salt) if key], [lora] if lora else None]
        mirror = Mirror("m", SIZE)
        mirror.apply([stored(["a", "b"], range(8), lora_name=lora or None, extra_keys=keys)])
        mirror.apply([stored(["c"], range(8, 12), parent="b", lora_name=lora or None, extra_keys=[[lora]] if lora else None)])
        assert list(mirror.snapshot()) == canonical(range(12), lora, salt)


def test_multimodal_keys_enter_the_hash_of_their_own_block() -> None:
    """Two images, or one at two offsets, are different blocks; the same one, as tuple or as list, is the same block."""

    def block(*keys: object) -> int:
        mirror = Mirror("m", SIZE)
        mirror.apply([stored(["a", "b"], range(8), extra_keys=[None, keys or None])])
        first, second = mirror.snapshot()
        assert first == canonical(range(8))[0]
        return second

    assert block() == canonical(range(8))[1]
    different = [block(), block(("img", 0)), block(("img", 4)), block(("other", 0)), block(b"embeds"), block("img")]
    assert len(set(different)) == len(different)
    assert block(("img", 0)) == block(["img", 0])


def test_malformed_events_are_counted_and_dropped() -> None:
    """A wrong block size, a wrong number of tokens or ids that are none leave the mirror as it was."""
    mirror = Mirror("m", SIZE)
    assert mirror.apply([stored(["a"], range(8), block_size=8)]) == []
    assert mirror.apply([stored(["a", "b"], range(4))]) == []
    assert mirror.apply([stored(["a"], [-1, 0, 0, 0])]) == []
    assert mirror.apply([stored(["a", "b"], range(8), extra_keys=[None])]) == []
    assert (mirror.counts.block_size_mismatches, mirror.counts.malformed) == (1, 5)
    assert len(mirror) == 0


def test_a_clear_is_told_once() -> None:
    """A clear of an empty mirror is no news."""
    mirror = Mirror("m", SIZE)
    mirror.apply([stored(["a"], range(4))])
    assert mirror.apply([AllBlocksCleared(), AllBlocksCleared()]) == [Cleared()]
    assert mirror.clear() == []
    assert mirror.apply([BlockRemoved(["a"])]) == []


class _Engine:
    """An engine that stores, copies and evicts as it likes, under one or two names for a block."""

    def __init__(self, rng: random.Random, aliases: int) -> None:
        self._rng = rng
        self._aliases = aliases
        self.copies: Counter[bytes] = Counter()
        """Engine hash (an alias's number, then the tokens of block and prompt before it) -> physical copies."""

    def act(self) -> EngineEvent:
        choice = self._rng.random()
        if choice < 0.02:
            self.copies.clear()
            return AllBlocksCleared()
        if choice < 0.45 and self.copies:
            return BlockRemoved([self._evict() for _ in range(self._rng.randint(1, min(3, len(self.copies))))])
        return self._store()

    def prefixes(self) -> set[bytes]:
        return {name[1:] for name in self.copies}

    def _store(self) -> BlockStored:
        parent = self._rng.choice([None, *self.copies])
        tokens = [self._rng.randint(0, 1) for _ in range(SIZE * self._rng.randint(1, 3))]
        names = []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            prefix = (parent or b"0")[1:] + bytes(tokens[:end])
            names.append(bytes([self._rng.randrange(self._aliases)]) + prefix)
        self.copies.update(names)
        return stored(names, tokens, parent=parent)

    def _evict(self) -> bytes:
        name = self._rng.choice(list(self.copies))
        self.copies[name] -= 1
        if not self.copies[name]:
            del self.copies[name]
        return name


@given(seed=st.integers(0, 2**32), events=st.integers(1, 120), aliases=st.integers(1, 2))
def test_the_mirror_is_the_union_of_the_copies(seed: int, events: int, aliases: int) -> None:
    """After any stream of an engine: mirror == the distinct blocks it holds copies of == what a follower of the changes holds."""
    engine = _Engine(random.Random(seed), aliases)
    mirror = Mirror("m", SIZE)
    follower: set[int] = set()
    for _ in range(events):
        follower = replay(mirror.apply([engine.act()]), follower)
        expected = {canonical(prefix)[-1] for prefix in map(list, engine.prefixes())}
        assert set(mirror.snapshot()) == expected == follower
        assert len(mirror) == len(expected)
    digest = 0
    for block in mirror.snapshot():
        digest ^= mix(block)
    assert mirror.digest == digest
    assert mirror.copies() == engine.copies
    assert mirror.counts.unknown_removals == 0


def test_a_long_event_is_no_recursion_and_no_list() -> None:
    """A prompt of 10,000 blocks is one change."""
    mirror = Mirror("m", 1)
    (change,) = mirror.apply([BlockStored(range(10_000), None, range(10_000), 1)])
    assert isinstance(change, Stored)
    assert len(change.blocks) == 10_000


def test_a_mirror_needs_a_sane_block_size() -> None:
    """Hashing with a block size below 1 is refused, never a silent empty chain."""
    mirror = Mirror("m", 0)
    assert mirror.apply([BlockStored(["a"], None, [], 0)]) == []
    assert mirror.counts.malformed == 1


@pytest.mark.parametrize("keys", [[("a",)], [["a"]], [("a", None)]])
def test_extra_keys_may_be_tuples_or_lists(keys: Any) -> None:
    """Keys come as tuples from the engine's process and as lists from msgpack."""
    mirror = Mirror("m", SIZE)
    assert len(mirror.apply([stored(["x"], range(4), extra_keys=keys)])) == 1
