"""The router's replica: whatever happens at the indexer, and whenever a view begins, it ends equal."""

from __future__ import annotations

import math
from typing import Any

from harness.messages import RankSource
from hypothesis import given
from hypothesis import strategies as st

from rankway.blocks import pack_hashes, unpack_hashes
from rankway.indexer.client import RankBlocks, RankGone, RankKnown, Update, ViewBegin, ViewLost, ViewReady, unpacked, update_of
from rankway.indexer.events import RankLoad
from rankway.indexer.feed import Feed, Follower, FollowerLimits
from rankway.indexer.rank import Limits
from rankway.indexer.slots import RankKey
from rankway.indexer.tracker import Member, Tracker
from rankway.native import open_index
from rankway.ranks import DpRange
from rankway.router.replica import Observer, Replica, ReplicaRank
from rankway.router.targets import Holder, Targets
from rankway.v1 import indexer_pb2

KEY = RankKey("w", 1, 4)
OTHER = RankKey("w", 1, 5)


class Recorder(Observer):
    def __init__(self) -> None:
        self.known: list[tuple[RankKey, bool]] = []
        self.loads: list[int] = []

    def known_changed(self, rank: ReplicaRank) -> None:
        self.known.append((rank.key, rank.known))

    def loaded(self, rank: ReplicaRank, load: RankLoad) -> None:
        self.loads.append(load.load_seq)


def blocks(key: RankKey, seq: int, hashes: list[int], *, first: bool = True, last: bool = True) -> RankBlocks:
    return RankBlocks(key, "g", seq, first, last, pack_hashes(hashes))


def replica_with(*updates: Update) -> tuple[Replica, Recorder]:
    recorder = Recorder()
    replica = Replica(open_index(), Targets(), recorder)
    apply(replica, *updates)
    return replica, recorder


def apply(replica: Replica, *updates: Update) -> None:
    for update in updates:
        assert replica.apply(update, 1.0) == ""


def known(replica: Replica, key: RankKey) -> bool:
    return key in replica.ranks and replica.ranks[key].known


def held(replica: Replica, key: RankKey) -> set[int]:
    return set(unpack_hashes(replica.index.blocks(replica.ranks[key].slot)))


def test_the_age_of_the_index_is_the_time_since_it_was_followed() -> None:
    """0 from a complete view until the view is lost; infinite before the first one; a view that only begins changes nothing."""
    replica, _ = replica_with(ViewBegin("i"), blocks(KEY, 1, [1]))
    assert replica.age_s(5.0) == math.inf
    apply(replica, ViewReady())
    assert replica.age_s(5.0) == 0.0
    replica.apply(ViewLost(), 7.0)
    replica.apply(ViewBegin("j"), 8.0)
    assert replica.age_s(9.5) == 2.5
    assert held(replica, KEY) == {1}
    replica.apply(ViewReady(), 10.0)
    assert replica.age_s(11.0) == 0.0


def test_a_rank_is_known_when_its_last_chunk_has_come() -> None:
    """Chunks are staged; the rank's blocks are replaced in one step."""
    replica, recorder = replica_with(ViewBegin("i"), blocks(KEY, 3, [1, 2], last=False))
    assert not known(replica, KEY)
    assert held(replica, KEY) == set()
    apply(replica, blocks(KEY, 3, [5], first=False), ViewReady())
    assert known(replica, KEY)
    assert held(replica, KEY) == {1, 2, 5}
    assert recorder.known == [(KEY, True)]
    assert replica.complete


def test_the_old_view_serves_until_the_new_one_is_there() -> None:
    """A new view replaces rank by rank; ranks that it doesn't name are dropped when it is complete, not before."""
    replica, recorder = replica_with(ViewBegin("i"), blocks(KEY, 1, [1]), blocks(OTHER, 1, [2]), ViewReady())
    apply(replica, ViewBegin("j"), blocks(KEY, 4, [7, 8], last=False))
    assert held(replica, KEY) == {1}
    assert known(replica, KEY)
    apply(replica, blocks(KEY, 4, [9], first=False))
    assert held(replica, KEY) == {7, 8, 9}
    assert held(replica, OTHER) == {2}
    apply(replica, ViewReady())
    assert OTHER not in replica.ranks
    assert recorder.known[-1] == (OTHER, False)
    assert len(replica.index) == 3


def test_a_view_that_breaks_off_leaves_no_trace() -> None:
    """Chunks of a view that never completed are forgotten when the next one begins."""
    replica, _ = replica_with(ViewBegin("i"), blocks(KEY, 1, [1]), ViewReady())
    apply(replica, ViewBegin("i"), blocks(KEY, 2, [66], last=False))
    apply(replica, ViewBegin("j"), blocks(KEY, 3, [3]), ViewReady())
    assert held(replica, KEY) == {3}


def test_batches_apply_in_order_and_a_hole_asks_for_a_new_view() -> None:
    """seq = last + 1 is applied; anything else on a rank means that the view is not right."""
    source = RankSource(KEY)
    replica, _ = replica_with(ViewBegin("i"), blocks(KEY, 0, []), ViewReady())
    apply(replica, source.batch(("stored", [1, 2]), ("removed", [1])))
    assert held(replica, KEY) == {2}
    source.batch(("stored", [3]))
    assert "seq 3" in replica.apply(source.batch(("stored", [4])), 1.0)
    assert held(replica, KEY) == {2}
    assert replica.mismatches == 1


def test_a_digest_that_differs_asks_for_a_new_view() -> None:
    """At equal seqs the load's digest and count must be the replica's own; at other seqs they say nothing."""
    source = RankSource(KEY)
    replica, _ = replica_with(ViewBegin("i"), blocks(KEY, 0, []), ViewReady(), source.batch(("stored", [1])), source.load())
    assert "digest" in replica.apply(source.load(kv_digest=1), 1.0)
    assert "digest" in replica.apply(source.load(kv_block_count=9), 1.0)
    apply(replica, source.load(kv_digest=1, kv_seq=7))


def test_loads_are_kept_with_their_time_and_older_ones_dropped() -> None:
    """After a change of indexers a load may come that is older than the last one: it is no news."""
    source = RankSource(KEY)
    old, new = source.load(running=1), source.load(running=2)
    replica, recorder = replica_with(ViewBegin("i"), RankKnown(KEY, "g", False), ViewReady())
    replica.apply(new, 5.0)
    replica.apply(old, 6.0)
    assert replica.ranks[KEY].load == new
    assert replica.ranks[KEY].load_at == 5.0
    assert recorder.loads == [2]


def test_a_rank_that_goes_gives_back_its_slot() -> None:
    """RankGone clears the blocks and drops the slot; one that the fleet holds too stays its."""
    targets = Targets()
    replica = Replica(open_index(), targets)
    apply(replica, ViewBegin("i"), blocks(KEY, 1, [1]), blocks(OTHER, 1, [1]), ViewReady())
    slot = targets.hold(KEY.target, 1, Holder.FLEET)
    assert slot == replica.ranks[KEY].slot
    apply(replica, RankGone(KEY), RankGone(OTHER), RankGone(OTHER))
    assert len(replica.index) == 0
    assert not known(replica, KEY)
    assert KEY not in replica.ranks
    assert targets.find(KEY.target, 1) == slot
    assert targets.find(OTHER.target, 1) is None


class World:
    """Workers, an indexer's pure parts, and one replica whose stream may break and begin at any moment."""

    def __init__(self) -> None:
        self.tracker = Tracker(open_index(), Limits(reorder_s=0.5, reorder_batches=2, tail_s=0.5))
        self.feed = Feed("i", self.tracker.ranks, FollowerLimits())
        self.tracker.observers.append(self.feed)
        self.replica = Replica(open_index(), Targets())
        self.sources: dict[RankKey, RankSource] = {}
        self.epochs = {"w1": 0, "w2": 0}
        self.follower: Follower | None = None
        self.now = 0.0

    def step(self, what: str, worker: str, number: int, hashes: list[int]) -> None:
        here = [key for key in self.tracker.ranks if key.worker_id == worker]
        source = self.sources[here[number % len(here)]] if here else None
        if what == "restart":
            self.join(worker)
        elif what == "leave":
            self.tracker.remove_member(worker, self.epochs[worker])
        elif what == "break":
            self.disconnect()
        elif what == "connect":
            self.follower = self.follower or self.feed.open("f", "")
        elif what == "read":
            self.read(number % 3)
        elif source is not None:
            self.on_source(what, source, hashes)

    def on_source(self, what: str, source: RankSource, hashes: list[int]) -> None:
        if what == "store":
            self.tracker.on_batch(source.batch(("stored", hashes)), self.now)
        elif what == "remove":
            self.tracker.on_batch(source.batch(("removed", hashes)), self.now)
        elif what == "lose":
            source.batch(("stored", hashes))
        elif what == "load":
            self.tracker.on_load(source.load(), self.now)
        elif what == "repair":
            self.repair()

    def join(self, worker: str) -> None:
        self.epochs[worker] += 1
        start = 0 if worker == "w1" else 2
        member = Member(worker, self.epochs[worker], "h:1", "g", DpRange(start, 2), "m", (), 16)
        self.sources.update({key: RankSource(key) for key in member.ranks()})
        self.tracker.put_member(member)

    def repair(self) -> None:
        self.now += 1.0
        self.tracker.on_tick(self.now)
        for key, rank in self.tracker.ranks.items():
            if not rank.known:
                rank.on_repair_started(self.now)
                self.tracker.on_snapshot(rank, self.sources[key].snapshot(), self.now)

    def disconnect(self) -> None:
        if self.follower is not None:
            self.feed.close(self.follower)
            self.follower = None

    def read(self, messages: int) -> None:
        while self.follower is not None and messages and (message := self.follower.poll()) is not None:
            for response in unpacked(indexer_pb2.FollowResponse.FromString(message)):
                assert self.replica.apply(update_of(response), self.now) == ""
            messages -= 1

    def calm(self) -> None:
        for source in self.sources.values():
            self.tracker.on_load(source.load(), self.now)
        self.repair()
        self.follower = self.follower or self.feed.open("f", "")
        self.read(10**6)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["store", "store", "remove", "lose", "load", "repair", "restart", "leave", "break", "connect", "read", "read"]
        ),
        st.sampled_from(["w1", "w2"]),
        st.integers(0, 7),
        st.lists(st.integers(0, 9), min_size=1, max_size=4),
    ),
    max_size=60,
)


@given(STEPS)
def test_the_replica_ends_equal_to_the_index(steps: list[tuple[Any, ...]]) -> None:
    """Whenever streams begin, break and are read, no update is refused, and in the end both hold the same, rank by rank."""
    world = World()
    for step in steps:
        world.step(*step)
    world.calm()
    assert world.replica.ranks.keys() == world.tracker.ranks.keys()
    for key, rank in world.tracker.ranks.items():
        assert known(world.replica, key)
        assert held(world.replica, key) == set(unpack_hashes(rank.index.blocks(rank.slot))) == set(world.sources[key].held)
    assert len(world.replica.index) == len(world.tracker.index)
