"""What followers are sent."""

from __future__ import annotations

import pytest
from harness.messages import RankSource

from rankway.blocks import unpack_hashes
from rankway.errors import Overloaded, Unavailable
from rankway.indexer.feed import CHUNK_BYTES, PACK_BYTES, Feed, FollowerLimits
from rankway.indexer.rank import Limits
from rankway.indexer.tracker import Member, Tracker
from rankway.native import open_index
from rankway.ranks import DpRange
from rankway.v1 import indexer_pb2


def member(worker_id: str = "w", epoch: int = 1, start: int = 0, size: int = 1, dp_group: str = "g") -> Member:
    return Member(worker_id, epoch, "127.0.0.1:1", dp_group, DpRange(start, size), "m", (), 16)


def build(limits: FollowerLimits | None = None) -> tuple[Tracker, Feed]:
    tracker = Tracker(open_index(), Limits())
    feed = Feed("indexer", tracker.ranks, limits or FollowerLimits())
    tracker.observers.append(feed)
    return tracker, feed


def join(tracker: Tracker, worker: Member) -> dict[int, RankSource]:
    """A worker whose ranks are known and empty."""
    tracker.put_member(worker)
    sources = {key.dp_rank: RankSource(key) for key in worker.ranks()}
    for source in sources.values():
        rank = tracker.ranks[source.key]
        rank.on_repair_started(0.0)
        tracker.on_snapshot(rank, source.snapshot(), 0.0)
    return sources


def drain(follower: object) -> list[indexer_pb2.FollowResponse]:
    """Everything that can be written now, several taken apart."""
    responses = []
    while (message := follower.poll()) is not None:  # type: ignore[attr-defined]
        responses += parts(message)
    return responses


def parts(message: bytes | None) -> list[indexer_pb2.FollowResponse]:
    """A message's responses, several taken apart."""
    assert message is not None
    parsed = indexer_pb2.FollowResponse.FromString(message)
    return list(parsed.several.responses) if parsed.HasField("several") else [parsed]


def kinds(responses: list[indexer_pb2.FollowResponse]) -> list[str | None]:
    return [response.WhichOneof("event") for response in responses]


def test_a_stream_is_begin_snapshot_ready_changes() -> None:
    """A follower hears begin, each rank's blocks and load, ready, then what happens, positions counting from 1."""
    tracker, feed = build()
    (source,) = join(tracker, member()).values()
    tracker.on_batch(source.batch(("stored", [1, 2])), 1.0)
    tracker.on_load(source.load(running=4), 1.0)
    follower = feed.open("f", "")
    first = drain(follower)
    assert kinds(first) == ["begin", "blocks", "load", "ready"]
    assert (first[1].blocks.seq, first[1].blocks.first, first[1].blocks.last) == (1, True, True)
    tracker.on_batch(source.batch(("removed", [2])), 1.0)
    tracker.remove_member("w", 1)
    then = drain(follower)
    assert kinds(then) == ["batch", "gone"]
    assert [response.position for response in first + then] == [1, 2, 3, 4, 5, 6]


def test_changes_of_a_rank_that_is_not_sent_yet_are_in_its_snapshot() -> None:
    """A batch that is applied between `open` and the rank's turn is told once: by the snapshot."""
    tracker, feed = build()
    sources = join(tracker, member(size=2))
    follower = feed.open("f", "")
    begin = indexer_pb2.FollowResponse.FromString(follower.poll() or b"")
    assert begin.HasField("begin")
    tracker.on_batch(sources[0].batch(("stored", [1])), 1.0)
    rest = drain(follower)
    assert kinds(rest) == ["blocks", "blocks", "ready"]
    assert [response.blocks.seq for response in rest[:2]] == [1, 0]


def test_many_ranks_are_read_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are snapshotted as many at a time as the limit of blocks allows, each whole, and known or not as it is then."""
    monkeypatch.setattr("rankway.indexer.feed.SNAPSHOT_BLOCKS", 5)
    tracker, feed = build()
    sources = join(tracker, member(size=6))
    for dp_rank, source in sources.items():
        tracker.on_batch(source.batch(("stored", range(10 * dp_rank, 10 * dp_rank + 3))), 1.0)
    broken = tracker.ranks[sources[1].key]
    broken.known = False
    follower = feed.open("f", "")
    first = [follower.poll() for _ in range(2)]
    assert len(follower.sent) == 2
    tracker.on_batch(sources[0].batch(("stored", [99])), 2.0)
    tracker.on_batch(sources[5].batch(("stored", [98])), 2.0)
    told = [part for message in first for part in parts(message)] + drain(follower)
    assert kinds(told) == ["begin", "blocks", "state", "batch", "blocks", "blocks", "blocks", "blocks", "ready"]
    blocks = {t.blocks.dp_rank: sorted(unpack_hashes(t.blocks.block_hashes)) for t in told if t.HasField("blocks")}
    expected = {dp_rank: list(range(10 * dp_rank, 10 * dp_rank + 3)) for dp_rank in (0, 2, 3, 4, 5)}
    expected[5].append(98)
    assert blocks == expected


def test_a_large_rank_comes_in_chunks() -> None:
    """Blocks beyond a chunk's size come in several messages, the first and the last marked; an empty rank has one."""
    tracker, feed = build()
    sources = join(tracker, member(size=2))
    count = 2 * CHUNK_BYTES // 8 + 1
    tracker.on_batch(sources[0].batch(("stored", range(count))), 1.0)
    chunks = [response.blocks for response in drain(feed.open("f", "")) if response.HasField("blocks")]
    assert [(chunk.dp_rank, chunk.first, chunk.last, len(chunk.block_hashes)) for chunk in chunks] == [
        (0, True, False, CHUNK_BYTES),
        (0, False, False, CHUNK_BYTES),
        (0, False, True, 8),
        (1, True, True, 0),
    ]


def test_what_waits_goes_together() -> None:
    """Messages that wait share one gRPC message up to the pack size, with a position each; nothing waits to fill it."""
    tracker, feed = build()
    (source,) = join(tracker, member()).values()
    follower = feed.open("f", "")
    drain(follower)
    for block in range(3000):
        tracker.on_batch(source.batch(("stored", [block])), 1.0)
    messages = []
    while (message := follower.poll()) is not None:
        messages.append(message)
    assert max(map(len, messages)) <= PACK_BYTES * 1.2
    assert len(messages) < 5
    positions = [r.position for m in messages for r in indexer_pb2.FollowResponse.FromString(m).several.responses]
    assert positions == list(range(4, 3004))


def test_a_repaired_rank_is_sent_anew() -> None:
    """A repair tells followers that the rank is unknown, then what the snapshot says, then the batches beyond it."""
    tracker, feed = build()
    (source,) = join(tracker, member()).values()
    follower = feed.open("f", "")
    drain(follower)
    rank = tracker.ranks[source.key]
    source.batch(("stored", [1]))
    tracker.on_batch(source.batch(("stored", [2])), 1.0)
    tracker.on_tick(9.0)
    rank.on_repair_started(9.0)
    snapshot = source.snapshot()
    tracker.on_batch(source.batch(("stored", [3])), 9.5)
    tracker.on_snapshot(rank, snapshot, 10.0)
    told = drain(follower)
    assert kinds(told) == ["state", "blocks", "batch"]
    assert not told[0].state.known
    assert (told[1].blocks.seq, sorted(unpack_hashes(told[1].blocks.block_hashes))) == (2, [1, 2])
    assert told[2].batch.seq == 3


def test_a_group_s_follower_hears_of_that_group() -> None:
    """Ranks of other DP groups are not sent, neither in the snapshot nor later."""
    tracker, feed = build()
    join(tracker, member("w1", dp_group="a"))
    follower = feed.open("f", "b")
    join(tracker, member("w2", dp_group="b"))
    join(tracker, member("w3", dp_group="a"))
    assert {response.state.worker_id for response in drain(follower) if response.HasField("state")} == {"w2"}


@pytest.mark.parametrize("limits", [FollowerLimits(messages=10), FollowerLimits(bytes=200)])
def test_a_slow_follower_is_cut_off(limits: FollowerLimits) -> None:
    """Beyond the limit what waits is dropped and the stream ends, with the follower's id in words; counted at its close."""
    tracker, feed = build(limits)
    (source,) = join(tracker, member()).values()
    follower = feed.open("sleepy", "")
    drain(follower)
    for block in range(11):
        tracker.on_batch(source.batch(("stored", [block])), 1.0)
    with pytest.raises(Overloaded, match="sleepy"):
        follower.poll()
    assert follower.queued == 0
    feed.close(follower)
    assert feed.cut_off == 1
    assert not feed.followers


def test_streams_end_when_the_indexer_stops() -> None:
    """After `end` every stream raises Unavailable."""
    _, feed = build()
    follower = feed.open("f", "")
    feed.end()
    with pytest.raises(Unavailable):
        follower.poll()
