"""Who is believed, and what a lease's begin and end do to the index."""

from __future__ import annotations

from harness.messages import RankSource

from rankway.indexer.events import KvBatch
from rankway.indexer.rank import Limits, Rank, Snapshot
from rankway.indexer.slots import RankKey, SlotTable
from rankway.indexer.tracker import Member, Observer, Tracker
from rankway.native import open_index
from rankway.ranks import DpRange


class Recorder(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def joined(self, rank: Rank) -> None:
        self.seen.append(("joined", rank.key.dp_rank))

    def unknown(self, rank: Rank) -> None:
        self.seen.append(("unknown", rank.key.dp_rank))

    def repaired(self, rank: Rank, snapshot: Snapshot) -> None:
        self.seen.append(("repaired", rank.key.dp_rank))

    def applied(self, rank: Rank, batch: KvBatch) -> None:
        self.seen.append(("applied", batch.seq))

    def gone(self, rank: Rank) -> None:
        self.seen.append(("gone", rank.key.dp_rank))


def member(worker_id: str = "w", epoch: int = 1, start: int = 0, size: int = 1, endpoint: str = "h:1") -> Member:
    return Member(worker_id, epoch, endpoint, "g", DpRange(start, size), "m", (), 16)


def build() -> tuple[Tracker, Recorder]:
    tracker, recorder = Tracker(open_index(), Limits()), Recorder()
    tracker.observers.append(recorder)
    return tracker, recorder


def known(tracker: Tracker, source: RankSource) -> Rank:
    rank = tracker.ranks[source.key]
    rank.on_repair_started(0.0)
    assert tracker.on_snapshot(rank, source.snapshot(), 0.0)
    return rank


def test_a_lease_brings_unknown_ranks_and_its_end_takes_them() -> None:
    """Each global rank of the window joins, wants a repair, and leaves with its blocks and its slot."""
    tracker, recorder = build()
    tracker.put_member(member(start=4, size=2))
    assert recorder.seen == [("joined", 4), ("unknown", 4), ("joined", 5), ("unknown", 5)]
    source = RankSource(RankKey("w", 1, 4))
    source.change(("stored", [1, 2]))
    known(tracker, source)
    tracker.remove_member("w", 1)
    assert recorder.seen[-2:] == [("gone", 4), ("gone", 5)]
    assert not tracker.ranks
    assert not tracker.members
    assert len(tracker.index) == 0
    assert len(tracker.slots) == 0


def test_the_registrys_list_replaces_all() -> None:
    """Whoever isn't in it has left, who is new joins, who stays keeps blocks and state."""
    tracker, recorder = build()
    tracker.replace_members([member("w1"), member("w2", start=1)])
    source = RankSource(RankKey("w2", 1, 1))
    source.change(("stored", [5]))
    known(tracker, source)
    recorder.seen.clear()
    tracker.replace_members([member("w2", start=1), member("w3", start=2)])
    assert recorder.seen == [("gone", 0), ("joined", 2), ("unknown", 2)]
    assert tracker.ranks[source.key].known


def test_a_newer_epoch_replaces_and_an_older_one_says_nothing() -> None:
    """Late records and late ends of an older life change nothing; so does the same record again."""
    tracker, recorder = build()
    tracker.put_member(member(epoch=2))
    recorder.seen.clear()
    tracker.put_member(member(epoch=1))
    tracker.put_member(member(epoch=2, endpoint="h:2"))
    tracker.remove_member("w", 1)
    assert recorder.seen == []
    assert tracker.members["w"].endpoint == "h:2"
    tracker.put_member(member(epoch=3))
    assert recorder.seen == [("gone", 0), ("joined", 0), ("unknown", 0)]


def test_an_end_that_names_a_newer_life_counts_for_the_older_one() -> None:
    """The end of epoch 5 means that epoch 3 is over too, even if its own end was missed."""
    tracker, _ = build()
    tracker.put_member(member(epoch=3))
    tracker.remove_member("w", 5)
    assert not tracker.ranks


def test_messages_of_workers_without_a_lease_are_counted_and_not_believed() -> None:
    """Unknown workers, ranks outside the window and other epochs change nothing."""
    tracker, _ = build()
    tracker.put_member(member(epoch=2))
    for key in (RankKey("w", 1, 0), RankKey("w", 3, 0), RankKey("w", 2, 1), RankKey("v", 2, 0)):
        source = RankSource(key)
        tracker.on_batch(source.batch(("stored", [1])), 1.0)
        tracker.on_load(source.load(), 1.0)
    assert tracker.unknown_worker_messages == 8
    assert len(tracker.index) == 0


def test_what_waited_for_a_repair_is_told_after_it() -> None:
    """Observers hear of the snapshot and then of the batches beyond it; those that it contains are not told."""
    tracker, recorder = build()
    tracker.put_member(member())
    source = RankSource(RankKey("w", 1, 0))
    tracker.on_batch(source.batch(("stored", [1])), 1.0)
    snapshot = source.snapshot()
    tracker.on_batch(source.batch(("stored", [2])), 1.0)
    tracker.on_batch(source.batch(("removed", [1])), 1.0)
    recorder.seen.clear()
    assert tracker.on_snapshot(tracker.ranks[source.key], snapshot, 2.0)
    assert recorder.seen == [("repaired", 0), ("applied", 2), ("applied", 3)]


def test_a_removal_on_one_rank_leaves_the_other_ranks_copy() -> None:
    """Ranks hold their blocks each for itself."""
    tracker, _ = build()
    tracker.put_member(member(size=2))
    first, second = RankSource(RankKey("w", 1, 0)), RankSource(RankKey("w", 1, 1))
    for source in (first, second):
        known(tracker, source)
        tracker.on_batch(source.batch(("stored", [1, 2])), 1.0)
    tracker.on_batch(first.batch(("removed", [1, 2])), 1.0)
    assert tracker.index.match([1, 2]) == {tracker.ranks[second.key].slot: 2}


def test_ticks_reach_only_ranks_that_wait() -> None:
    """A rank is on the list of those that wait exactly as long as it does."""
    tracker, recorder = build()
    tracker.put_member(member(size=2))
    source = RankSource(RankKey("w", 1, 0))
    known(tracker, source)
    missing = source.batch(("stored", [1]))
    tracker.on_batch(source.batch(("stored", [2])), 1.0)
    assert tracker._waits == {source.key}
    tracker.on_batch(missing, 1.01)
    assert not tracker._waits
    source.batch(("stored", [3]))
    tracker.on_batch(source.batch(("stored", [4])), 2.0)
    tracker.on_tick(3.0)
    assert recorder.seen[-1] == ("unknown", 0)
    assert not tracker._waits


def test_slots_are_reused_lowest_first() -> None:
    """What is indexed by slot stays as small as the most ranks there were at once."""
    slots = SlotTable()
    keys = [RankKey("w", epoch, 0) for epoch in range(5)]
    assert [slots.take(key) for key in keys] == [0, 1, 2, 3, 4]
    slots.give_back(keys[3])
    slots.give_back(keys[1])
    assert slots.key(1) is None
    assert slots.take(RankKey("v", 1, 0)) == 1
    assert slots.key(1) == RankKey("v", 1, 0)
    assert slots.key(99) is None
