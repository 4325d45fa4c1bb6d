"""The rules by which one rank's index stays true."""

from __future__ import annotations

from typing import Any

import pytest
from harness.messages import RankSource
from hypothesis import given
from hypothesis import strategies as st

from rankway.blocks import unpack_hashes
from rankway.indexer.events import KvBatch, RankLoad
from rankway.indexer.rank import Cause, Limits, Rank, Snapshot, SnapshotWrong
from rankway.indexer.slots import RankKey
from rankway.native import open_index

KEY = RankKey("w", 7, 3)
LIMITS = Limits(reorder_s=1.0, reorder_batches=4, tail_s=2.0, waiting_batches=6, waiting_bytes=10_000)


@pytest.fixture
def source() -> RankSource:
    return RankSource(KEY)


@pytest.fixture
def rank(source: RankSource) -> Rank:
    """A rank that is known, as of seq 0."""
    rank = new_rank()
    repair(rank, source, 0.0)
    return rank


def new_rank(limits: Limits = LIMITS) -> Rank:
    return Rank(KEY, slot=5, index=open_index(), dp_group="g", limits=limits)


def repair(rank: Rank, source: RankSource, now: float) -> list[int]:
    rank.on_repair_started(now)
    return [batch.seq for batch in rank.on_snapshot(source.snapshot(), now)]


def held(rank: Rank) -> set[int]:
    return set(unpack_hashes(rank.index.blocks(rank.slot)))


def test_a_new_rank_is_unknown_and_starts_with_a_repair(source: RankSource) -> None:
    """A rank that has just joined is unknown until the snapshot that its cause "start" asks for."""
    source.change(("stored", [1, 2, 3]))
    rank = new_rank()
    assert not rank.known
    assert rank.repair_cause is Cause.START
    repair(rank, source, 0.0)
    assert rank.known
    assert held(rank) == {1, 2, 3}
    assert rank.repairs == {Cause.START: 1}


def test_batches_in_order_are_applied_at_once(rank: Rank, source: RankSource) -> None:
    """seq = last + 1 is applied, event by event in order."""
    assert rank.on_batch(source.batch(("stored", [1, 2, 3]), ("removed", [2]), ("stored", [2, 4])), 1.0)
    assert rank.on_batch(source.batch(("cleared", []), ("stored", [9])), 1.0)
    assert held(rank) == {9}
    assert rank.last_seq == 2


def test_a_repeated_batch_is_dropped(rank: Rank, source: RankSource) -> None:
    """seq <= last is dropped and counted: a late batch can't bring a removed block back."""
    stored = source.batch(("stored", [1]))
    removed = source.batch(("removed", [1]))
    for batch in (stored, removed, stored, removed, stored):
        rank.on_batch(batch, 1.0)
    assert held(rank) == set()
    assert rank.duplicates == 3


def test_an_unknown_hash_in_a_removal_does_not_stop_the_rest(rank: Rank, source: RankSource) -> None:
    """Removing a block that the rank doesn't hold changes nothing else."""
    rank.on_batch(source.batch(("stored", [1, 2])), 1.0)
    rank.on_batch(source.batch(("removed", [77, 1])), 1.0)
    assert held(rank) == {2}


def test_small_reorderings_are_absorbed(rank: Rank, source: RankSource) -> None:
    """A later batch waits for the missing one, which then applies both in order."""
    first, second, third = source.batch(("stored", [1])), source.batch(("removed", [1])), source.batch(("stored", [3]))
    assert not rank.on_batch(third, 1.0)
    assert not rank.on_batch(second, 1.1)
    assert [batch.seq for batch in rank.on_batch(first, 1.2)] == [1, 2, 3]
    rank.on_tick(10.0)
    assert rank.known
    assert held(rank) == {3}


def test_a_gap_is_repaired_after_the_reorder_window(rank: Rank, source: RankSource) -> None:
    """A hole in the seqs makes the rank unknown once the window has passed, not before."""
    source.batch(("stored", [1]))
    rank.on_batch(source.batch(("stored", [2])), 1.0)
    assert rank.waits
    rank.on_tick(1.9)
    assert rank.known
    rank.on_tick(2.0)
    assert not rank.known
    assert rank.repair_cause is Cause.GAP
    repair(rank, source, 2.1)
    assert held(rank) == {1, 2}
    assert rank.repairs[Cause.GAP] == 1


def test_many_batches_behind_a_gap_start_the_repair_at_once(rank: Rank, source: RankSource) -> None:
    """More batches than the reorder limit behind a hole don't wait for the window."""
    source.batch(("stored", [1]))
    for block in range(LIMITS.reorder_batches + 1):
        rank.on_batch(source.batch(("stored", [100 + block])), 1.0)
    assert rank.repair_cause is Cause.GAP


def test_batches_beyond_the_snapshot_are_applied_after_it(source: RankSource) -> None:
    """What arrives during a repair waits; what the snapshot contains is dropped, what goes beyond it is applied in order."""
    rank = new_rank()
    rank.on_repair_started(0.0)
    contained = source.batch(("stored", [1]))
    snapshot = source.snapshot()
    beyond = [source.batch(("removed", [1])), source.batch(("stored", [5]))]
    for batch in (beyond[1], contained, beyond[0]):
        assert not rank.on_batch(batch, 0.5)
    assert [batch.seq for batch in rank.on_snapshot(snapshot, 1.0)] == [2, 3]
    assert held(rank) == {5}


def test_an_overflow_during_a_repair_repairs_again(source: RankSource) -> None:
    """When more waits than there is room for, and the snapshot doesn't cover what was dropped, the rank is repaired again."""
    rank = new_rank()
    rank.on_repair_started(0.0)
    snapshot = source.snapshot()
    for block in range(LIMITS.waiting_batches + 2):
        rank.on_batch(source.batch(("stored", [block])), 0.5)
    assert rank.dropped_batches == 2
    assert not rank.on_snapshot(snapshot, 1.0)
    assert rank.repair_cause is Cause.OVERFLOW
    repair(rank, source, 1.1)
    assert held(rank) == set(source.held)
    assert rank.repairs == {Cause.START: 1, Cause.OVERFLOW: 1}


def test_an_overflow_that_the_snapshot_covers_needs_no_second_repair(source: RankSource) -> None:
    """What was dropped for lack of room doesn't matter if the snapshot contains it."""
    rank = new_rank()
    rank.on_repair_started(0.0)
    for block in range(LIMITS.waiting_batches + 2):
        rank.on_batch(source.batch(("stored", [block])), 0.5)
    rank.on_snapshot(source.snapshot(), 1.0)
    assert rank.known
    assert held(rank) == set(source.held)


def test_a_digest_that_differs_at_equal_seqs_is_repaired(rank: Rank, source: RankSource) -> None:
    """A load with the rank's own seq and another digest, or another count, starts a repair."""
    rank.on_batch(source.batch(("stored", [1, 2])), 1.0)
    assert rank.on_load(source.load(), 1.0)
    assert rank.known
    rank.on_load(source.load(kv_digest=5), 1.0)
    assert rank.repair_cause is Cause.DIGEST
    repair(rank, source, 1.5)
    rank.on_load(source.load(kv_block_count=3), 1.6)
    assert rank.repairs[Cause.DIGEST] == 1
    assert rank.repair_cause is Cause.DIGEST


def test_the_digest_is_checked_when_the_batches_catch_up(rank: Rank, source: RankSource) -> None:
    """A load ahead of the batches is compared once its seq has been applied."""
    batch = source.batch(("stored", [1]))
    rank.on_load(source.load(kv_digest=5), 1.0)
    assert rank.known
    rank.on_batch(batch, 1.1)
    assert rank.repair_cause is Cause.DIGEST


def test_a_lost_last_message_is_repaired(rank: Rank, source: RankSource) -> None:
    """A load that stays ahead of the batches for the grace period starts a repair "tail"."""
    source.batch(("stored", [1]))
    rank.on_load(source.load(), 1.0)
    rank.on_tick(2.9)
    assert rank.known
    rank.on_load(source.load(), 2.95)
    rank.on_tick(3.0)
    assert rank.repair_cause is Cause.TAIL
    repair(rank, source, 3.1)
    assert held(rank) == {1}
    assert not rank.waits


def test_loads_that_run_a_little_ahead_all_the_time_are_no_lost_tail(rank: Rank, source: RankSource) -> None:
    """The grace period starts anew whenever the seq that a load had promised has come."""
    now = 1.0
    for block in range(20):
        batch = source.batch(("stored", [block]))
        rank.on_load(source.load(), now)
        rank.on_tick(now + 0.4)
        rank.on_batch(batch, now + 0.5)
        now += 0.5
    assert rank.known
    assert not rank.waits


def test_an_older_load_is_dropped(rank: Rank, source: RankSource) -> None:
    """A load whose load_seq is not above the last one's is no news."""
    old, new = source.load(running=1), source.load(running=2)
    assert rank.on_load(new, 1.0)
    assert not rank.on_load(old, 1.1)
    assert rank.last_load is not None
    assert rank.last_load.running == 2
    assert rank.duplicates == 1


def test_a_snapshot_that_contradicts_itself_leaves_the_rank_unknown(source: RankSource) -> None:
    """Blocks that don't make the snapshot's digest or count are not believed; the next repair's cause says so."""
    source.change(("stored", [1, 2]))
    good = source.snapshot()
    rank = new_rank()
    for wrong in (
        Snapshot(good.seq, good.digest ^ 1, good.block_count, good.chunks),
        Snapshot(good.seq, good.digest, 3, good.chunks),
    ):
        rank.on_repair_started(0.0)
        with pytest.raises(SnapshotWrong):
            rank.on_snapshot(wrong, 0.0)
        assert not rank.known
        assert rank.repair_cause is Cause.SNAPSHOT_FAILED
    repair(rank, source, 1.0)
    assert rank.repairs == {Cause.START: 1, Cause.SNAPSHOT_FAILED: 2}


def test_a_seq_that_the_worker_never_reached_is_forgotten(rank: Rank, source: RankSource) -> None:
    """A batch far ahead that no worker sent costs one repair, not repairs for ever."""
    other = RankSource(KEY)
    other.seq = 10**9
    rank.on_batch(other.batch(("stored", [13])), 1.0)
    rank.on_tick(5.0)
    repair(rank, source, 6.0)
    assert rank.known
    assert not rank.waits
    assert rank.dropped_batches == 1
    rank.on_batch(source.batch(("stored", [1])), 7.0)
    assert held(rank) == {1}


def test_the_workers_word_counts_more_than_what_was_applied(rank: Rank, source: RankSource) -> None:
    """A snapshot with a lower seq than the last one applied is taken: what was applied can't have come from the worker."""
    other = RankSource(KEY)
    for block in range(3):
        rank.on_batch(other.batch(("stored", [block])), 1.0)
    source.change(("stored", [42]))
    rank.on_load(source.load(), 1.0)
    rank.on_batch(other.batch(("stored", [9])), 2.0)
    rank._repair(Cause.DIGEST)
    repair(rank, source, 3.0)
    assert rank.last_seq == 1
    assert held(rank) == {42}


def test_a_rank_that_leaves_holds_nothing(rank: Rank, source: RankSource) -> None:
    """Leaving drops the blocks, the load and what waits."""
    rank.on_batch(source.batch(("stored", [1, 2])), 1.0)
    rank.on_load(source.load(), 1.0)
    rank.leave()
    assert len(rank.index) == 0
    assert rank.last_load is None
    assert not rank.known


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), st.lists(st.integers(0, 12), min_size=1, max_size=5)),
        st.tuples(st.just("removed"), st.lists(st.integers(0, 12), min_size=1, max_size=5)),
        st.tuples(st.just("cleared"), st.just([])),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def storms(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """What the worker does and what the bus makes of it, step by step."""
    step = st.one_of(
        st.tuples(st.just("change"), EVENTS),
        st.tuples(st.just("load"), st.none()),
        st.tuples(st.just("deliver"), st.integers(0, 10**6)),
        st.tuples(st.just("drop"), st.integers(0, 10**6)),
        st.tuples(st.just("repeat"), st.integers(0, 10**6)),
        st.tuples(st.just("tick"), st.floats(0.0, 1.0)),
        st.tuples(st.just("ask"), st.none()),
        st.tuples(st.just("answer"), st.booleans()),
    )
    return draw(st.lists(step, max_size=80))


class Bus:
    """The rank, its worker, and messages between them in any order; repairs ask and answer at separate moments."""

    def __init__(self) -> None:
        self.source = RankSource(KEY)
        self.rank = new_rank(Limits(reorder_s=0.5, reorder_batches=2, tail_s=0.7, waiting_batches=4, waiting_bytes=2_000))
        self.under_way: list[KvBatch | RankLoad] = []
        self.asked = False
        self.answer: Snapshot | None = None
        self.now = 0.0
        self.replica: set[int] | None = None

    def deliver(self, message: KvBatch | RankLoad) -> None:
        if isinstance(message, KvBatch):
            self.rank.on_batch(message, self.now)
        else:
            self.rank.on_load(message, self.now)

    def ask(self) -> None:
        if not self.rank.known and not self.asked:
            self.rank.on_repair_started(self.now)
            self.asked, self.answer = True, self.source.snapshot()

    def reply(self, *, fails: bool) -> None:
        if self.asked and self.answer is not None:
            self.asked = False
            if fails:
                self.rank.on_snapshot_failed()
            else:
                self.rank.on_snapshot(self.answer, self.now)

    def step(self, what: str, argument: Any) -> None:
        if what == "change":
            self.under_way.append(self.source.batch(*argument))
        elif what == "load":
            self.under_way.append(self.source.load())
        elif what == "tick":
            self.now += argument
            self.rank.on_tick(self.now)
        elif what == "ask":
            self.ask()
        elif what == "answer":
            self.reply(fails=argument)
        elif self.under_way:
            position = argument % len(self.under_way)
            message = self.under_way[position]
            if what != "repeat":
                del self.under_way[position]
            if what != "drop":
                self.deliver(message)

    def calm(self) -> None:
        """No more faults: loads come, time passes, repairs are answered."""
        for _ in range(6):
            self.deliver(self.source.load())
            self.now += 1.0
            self.rank.on_tick(self.now)
            self.reply(fails=False)
            self.ask()
            self.reply(fails=False)


@given(storms())
def test_any_storm_ends_in_what_the_engine_holds(steps: list[tuple[str, Any]]) -> None:
    """Whatever is dropped, repeated, delayed or reordered, and however repairs fail: after calm the index is the engine's set."""
    bus = Bus()
    for what, argument in steps:
        bus.step(what, argument)
    bus.calm()
    assert bus.rank.known
    assert held(bus.rank) == set(bus.source.held)
    assert bus.rank.last_seq == bus.source.seq
    # What was still under way comes in the end, and brings nothing back.
    for message in bus.under_way:
        bus.deliver(message)
    bus.calm()
    assert held(bus.rank) == set(bus.source.held)


@given(storms())
def test_a_known_rank_is_a_state_that_the_engine_was_in(steps: list[tuple[str, Any]]) -> None:
    """At every moment a known rank holds exactly what the engine held as of the rank's seq."""
    bus = Bus()
    states = {0: set[int]()}
    for what, argument in steps:
        bus.step(what, argument)
        states[bus.source.seq] = set(bus.source.held)
        if bus.rank.known:
            assert held(bus.rank) == states[bus.rank.last_seq]
