"""The pure and the compiled core do the same: a random walk over both, compared at every step."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rankway import blocks, choice, index

compiled = pytest.importorskip("rankway._core", reason="the compiled core isn't built: pip install -e . with a C compiler")

SLOTS = st.one_of(st.integers(0, 9), st.integers(0, 300), st.integers(0, 2**20 - 1))
"""Few slots meet often; some need other chunks of a row."""

HASHES = st.integers(0, 2**64 - 1)
TROUBLE = st.one_of(
    st.integers(-(2**70), 2**70),
    st.none(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=20),
    st.lists(st.one_of(st.integers(-5, 2**65), st.floats(), st.none(), st.text(max_size=2)), max_size=4),
)
"""Arguments of every wrong kind, and a few right ones."""


def kinds() -> st.SearchStrategy[str]:
    """Names of the kinds in which numbers can be given."""
    return st.sampled_from(["list", "tuple", "array", "packed", "bytearray", "memoryview", "unaligned", "iterator"])


def as_kind(kind: str, values: list[int], width: int = 8) -> Any:
    """Numbers of 4 or 8 bytes as one of the kinds."""
    numbers = array("Q" if width == 8 else "I", values)
    packed = numbers.tobytes()
    return {
        "list": values,
        "tuple": tuple(values),
        "array": numbers,
        "packed": packed,
        "bytearray": bytearray(packed),
        "memoryview": memoryview(numbers),
        "unaligned": memoryview(b"x" + packed)[1:],
        "iterator": dict.fromkeys(values).keys() if len(set(values)) == len(values) else values,
    }[kind]


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    """What a call returns, or the class of what it raises."""
    try:
        return call(*args)
    except (TypeError, ValueError, OverflowError) as error:
        return type(error)


class Twins(RuleBasedStateMachine):
    """Both indexes and both active sets through the same calls."""

    @initialize(pool=st.lists(HASHES, min_size=40, max_size=200, unique=True))
    def begin(self, pool: list[int]) -> None:
        self.pool = [0, 1, 2**64 - 1, *pool]
        self.indexes = (index.PureIndex(), compiled.Index())
        self.actives = (index.PureActiveBlocks(), compiled.ActiveBlocks())
        self.slots: set[int] = set()

    def run(self, start: int, length: int) -> list[int]:
        return [self.pool[(start + i) % len(self.pool)] for i in range(length)]

    def same(self, pair: tuple[Any, Any], method: str, *args: Any) -> None:
        pure, fast = (outcome(getattr(twin, method), *args) for twin in pair)
        assert pure == fast, (method, args)

    @rule(
        method=st.sampled_from(["store", "store", "remove"]),
        slot=SLOTS,
        start=st.integers(0, 200),
        length=st.integers(0, 90),
        kind=kinds(),
    )
    def change_index(self, method: str, slot: int, start: int, length: int, kind: str) -> None:
        self.slots.add(slot)
        self.same(self.indexes, method, slot, as_kind(kind, self.run(start, length)))

    @rule(first=st.integers(0, 2**20 - 200), count=st.integers(2, 200), step=st.integers(1, 40), start=st.integers(0, 200))
    def store_widely(self, first: int, count: int, step: int, start: int) -> None:
        for slot in range(first, min(first + count * step, 2**20), step):
            self.same(self.indexes, "store", slot, self.run(start, 5))
        self.slots.add(first)

    @rule(
        method=st.sampled_from(["acquire", "acquire", "release", "overlap"]),
        slot=SLOTS,
        start=st.integers(0, 200),
        length=st.integers(0, 60),
    )
    def change_active(self, method: str, slot: int, start: int, length: int) -> None:
        self.slots.add(slot)
        self.same(self.actives, method, slot, self.run(start, length))
        self.same(self.actives, "active", slot)

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots))) if self.slots else 0
        self.same(self.indexes, "clear", slot)
        self.same(self.actives, "clear", slot)

    @rule(start=st.integers(0, 200), length=st.integers(0, 90), kind=kinds(), room=st.integers(0, 400))
    def match(self, start: int, length: int, kind: str, room: int) -> None:
        hashes = as_kind(kind, self.run(start, length))
        self.same(self.indexes, "match", hashes)
        pure, fast = array("I", bytes(4 * room)), array("I", b"\xff" * (4 * room))
        self.indexes[0].match_into(hashes, pure)
        self.indexes[1].match_into(hashes, fast)
        assert pure == fast

    @rule(
        start=st.integers(0, 200),
        length=st.integers(0, 60),
        seed=st.integers(-1, 2**66),
        temperature=st.sampled_from([0.0, 0.0, 0.1, 1.0, 50.0]),
        overlap_weight=st.sampled_from([1.0, 0.0, 0.3, 7.5]),
        extra_tokens=st.integers(0, 15),
        data=st.data(),
    )
    def choose(
        self,
        start: int,
        length: int,
        seed: int,
        temperature: float,
        overlap_weight: float,
        extra_tokens: int,
        data: st.DataObject,
    ) -> None:
        loads = data.draw(load_tables())
        hashes = self.run(start, length)
        weights = choice.Weights(overlap_weight, temperature)
        picks = [
            pick(self.indexes[i], self.actives[i], hashes, 16 * length + extra_tokens, 16, loads, weights, seed)
            for i, pick in enumerate((choice.choose, compiled.choose))
        ]
        assert picks[0] == picks[1]
        assert type(picks[0]) is type(picks[1])

    @rule(
        slot=st.one_of(SLOTS, TROUBLE),
        hashes=TROUBLE,
        method=st.sampled_from(["store", "remove", "match", "contains", "clear", "size"]),
    )
    def trouble(self, slot: Any, hashes: Any, method: str) -> None:
        args = {"match": (hashes,), "clear": (slot,), "size": (slot,)}.get(method, (slot, hashes))
        if isinstance(slot, int) and 0 <= slot < 2**20:
            self.slots.add(slot)
        self.same(self.indexes, method, *args)

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "slots"):
            return
        slots = sorted(self.slots)[:12]
        for slot in slots:
            self.same(self.indexes, "size", slot)
            self.same(self.indexes, "digest", slot)
        held = [[sorted(blocks.unpack_hashes(packed)) for packed in twin.blocks_of(slots)] for twin in self.indexes]
        assert held[0] == held[1]
        held = [[sorted(blocks.unpack_hashes(twin.blocks(slot))) for slot in slots[:1]] for twin in self.indexes]
        assert held[0] == held[1]

    def teardown(self) -> None:
        if hasattr(self, "indexes"):
            assert len(self.indexes[0]) == len(self.indexes[1])


@st.composite
def load_tables(draw: st.DrawFn) -> choice.LoadTable:
    """Load tables of few slots, many of them equal so that ties happen."""
    loads = choice.LoadTable()
    loads.grow(draw(st.integers(0, 12)))
    for slot in range(len(loads)):
        loads.eligible[slot] = draw(st.sampled_from([1, 1, 1, 0]))
        loads.known[slot] = draw(st.sampled_from([1, 1, 0]))
        loads.prefill_tokens[slot] = draw(st.sampled_from([0, 0, 100, 10**9]))
        loads.decode_blocks[slot] = draw(st.sampled_from([0, 0, 3, 10**6]))
        loads.recent[slot] = draw(st.one_of(st.just(0.0), st.floats(0, 1e6)))
    return loads


def test_twins_agree_on_every_walk() -> None:
    """Whatever is called in whatever order, good arguments or bad, both cores answer alike."""
    run_state_machine_as_test(
        Twins, settings=settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    )


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=150),
    block_size=st.integers(1, 40),
    root=HASHES,
    kind=kinds(),
    keys=st.one_of(st.none(), st.lists(st.binary(max_size=50), max_size=150)),
)
def test_chains_agree(tokens: list[int], block_size: int, root: int, kind: str, keys: list[bytes] | None) -> None:
    """Both cores hash every prompt alike, whatever its kind, block size and extra keys."""
    given_tokens = as_kind(kind, tokens, width=4)
    expected = outcome(blocks.hash_chain, given_tokens, block_size, root, keys)
    assert outcome(compiled.hash_chain, given_tokens, block_size, root, keys) == expected


@settings(max_examples=200, deadline=None)
@example(tokens=b"", block_size=1, root=0.0, keys=None)
@given(tokens=TROUBLE, block_size=st.one_of(st.integers(-2, 40), TROUBLE), root=st.one_of(HASHES, TROUBLE), keys=TROUBLE)
def test_chains_refuse_alike(tokens: Any, block_size: Any, root: Any, keys: Any) -> None:
    """Both cores refuse bad arguments of the chain with the same class of error."""
    if isinstance(keys, (str, bytes)):
        keys = [keys] * 40
    expected = outcome(blocks.hash_chain, tokens, block_size, root, keys)
    got = outcome(compiled.hash_chain, tokens, block_size, root, keys)
    assert got == expected or {got, expected} <= {TypeError, ValueError, OverflowError}


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 999), max_size=120),
    root=HASHES,
    held=st.lists(st.integers(0, 7), max_size=6),
    loads=load_tables(),
)
def test_choices_from_tokens_agree(tokens: list[int], root: int, held: list[int], loads: choice.LoadTable) -> None:
    """The choice straight from tokens is the choice from their hashes, in both cores."""
    indexes, actives = (index.PureIndex(), compiled.Index()), (index.PureActiveBlocks(), compiled.ActiveBlocks())
    hashes = blocks.hash_chain(tokens, 16, root)
    for twin in indexes:
        for depth, slot in enumerate(held):
            twin.store(slot, hashes[: 8 * depth])
    weights = choice.Weights()
    expected = choice.choose(indexes[0], actives[0], hashes, len(tokens), 16, loads, weights, 3)
    assert choice.choose_for_tokens(indexes[0], actives[0], tokens, 16, root, loads, weights, 3) == (expected, hashes)
    assert compiled.choose_for_tokens(indexes[1], actives[1], tokens, 16, root, loads, weights, 3) == (expected, hashes)


EDGE_SLOTS = st.sampled_from([0, 1, 2, 3, 4, 5, 61, 62, 63, 64, 65, 130])
"""On both sides of where a set stops fitting into a word, and of a row's first chunk."""

EDGE_CALLS = st.lists(
    st.tuples(st.sampled_from(["store", "store", "store", "remove", "clear"]), EDGE_SLOTS, st.integers(0, 3), st.integers(1, 4)),
    max_size=60,
)


@settings(deadline=None)
@given(EDGE_CALLS, st.data())
def test_sets_of_every_form_agree(calls: list[tuple[str, int, int, int]], data: st.DataObject) -> None:
    """A block's holders move between few, a mask and a row as slots come and go; matches and the sizes stay the same."""
    twins = (index.PureIndex(), compiled.Index())
    for twin in twins:
        for slot in range(131):  # slots get their inside numbers in the order in which they come
            twin.store(slot, [slot + 1000])
    for method, slot, start, length in calls:
        hashes = list(range(start, start + length))
        for twin in twins:
            twin.clear(slot) if method == "clear" else getattr(twin, method)(slot, hashes)
        pure, fast = twins
        wanted = data.draw(st.permutations(range(7))) if data.draw(st.booleans()) else list(range(7))
        assert pure.match(wanted) == fast.match(wanted)
        assert len(pure) == len(fast)
        assert sorted(blocks.unpack_hashes(pure.blocks(slot))) == sorted(blocks.unpack_hashes(fast.blocks(slot)))
        assert pure.digest(slot) == fast.digest(slot)
