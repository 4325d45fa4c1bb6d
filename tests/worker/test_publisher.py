"""What a worker says over NATS: KV events and loads, and what it does when NATS can't be had."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from google.protobuf.message import Message
from harness.nats import NatsServer
from harness.waiting import eventually
from harness.worker import FakeRegistry, live_worker
from hypothesis import given
from hypothesis import strategies as st

from rankway import bus
from rankway.blocks import mix, unpack_hashes
from rankway.ranks import DpRange, GlobalRank, Instance, LocalRank
from rankway.v1 import events_pb2, generate_pb2, types_pb2, worker_pb2
from rankway.worker import publisher
from rankway.worker.engine import AllBlocksCleared, BlockStored, EngineInfo, EngineLoad
from rankway.worker.feed import RankFeed, split_changes
from rankway.worker.mirror import Change, Cleared, Removed, Stored
from rankway.worker.publisher import Publisher

INFO = EngineInfo("sim", "1", "m", DpRange(4, 2), 8, 4, 100, 8, 64, 1000, 512)


def hashes(*numbers: int) -> array[int]:
    return array("Q", numbers)


def make_feed() -> RankFeed:
    return RankFeed(Instance("w1", 7), GlobalRank(5), "m", 4)


def blocks(count: int, first: int = 0) -> BlockStored:
    """`count` blocks of a prompt that no other `first` shares."""
    tokens = [first, *range(1, 4 * count)]
    return BlockStored([(first << 32) + i for i in range(count)], None, tokens, 4)


def test_batches_count_from_one() -> None:
    """Each batch has the next seq, and says whose it is."""
    feed = make_feed()
    messages = feed.batches([Stored(None, hashes(1, 2))], 0) + feed.batches([Removed(hashes(1)), Cleared()], 0)
    first, second = map(events_pb2.KvEventBatch.FromString, messages)
    assert (first.worker_id, first.epoch, first.dp_rank, first.seq, second.seq) == ("w1", 7, 5, 1, 2)
    assert not first.events[0].stored.HasField("parent_hash")
    assert list(unpack_hashes(first.events[0].stored.block_hashes)) == [1, 2]
    assert [event.WhichOneof("event") for event in second.events] == ["removed", "cleared"]


def test_a_parent_of_zero_is_not_absent() -> None:
    """Hash 0 is a hash: the parent is told by presence."""
    (message,) = make_feed().batches([Stored(0, hashes(1))], 0)
    assert events_pb2.KvEventBatch.FromString(message).events[0].stored.HasField("parent_hash")


_CHANGES = st.lists(
    st.one_of(
        st.builds(
            Stored,
            st.one_of(st.none(), st.integers(0, 99)),
            st.lists(st.integers(0, 99), min_size=1, max_size=30).map(lambda v: hashes(*v)),
        ),
        st.builds(Removed, st.lists(st.integers(0, 99), min_size=1, max_size=30).map(lambda v: hashes(*v))),
        st.just(Cleared()),
    ),
    max_size=10,
)


@given(_CHANGES, st.integers(4, 40))
def test_a_split_keeps_order_content_and_parents(changes: list[Change], most: int) -> None:
    """Parts are within the limit, in order, and chain on: put together they are what was split."""
    together: list[tuple[type, int]] = []
    previous: int | None = None
    whole = [(type(change), block) for change in changes for block in ([0] if isinstance(change, Cleared) else change.blocks)]
    parents = {(index, change.blocks[0]): change.parent for index, change in enumerate(changes) if isinstance(change, Stored)}
    first_parents = list(parents.values())
    for group in split_changes(changes, most):
        assert sum(3 + (0 if isinstance(change, Cleared) else len(change.blocks)) for change in group) <= most
        for change in group:
            together += [(type(change), block) for block in ([0] if isinstance(change, Cleared) else change.blocks)]
            if isinstance(change, Stored):
                assert change.parent == previous or change.parent in first_parents
                previous = change.blocks[-1]
    assert together == whole


def test_a_batch_over_the_payload_limit_is_split() -> None:
    """300,000 blocks are several messages, each within NATS's limit, with seqs in a row."""
    feed = make_feed()
    messages = feed.batches([Stored(None, hashes(*range(300_000)))], 0)
    assert len(messages) == 3
    assert max(map(len, messages)) <= bus.MAX_PAYLOAD_BYTES
    batches = list(map(events_pb2.KvEventBatch.FromString, messages))
    assert [batch.seq for batch in batches] == [1, 2, 3]
    assert [block for batch in batches for block in unpack_hashes(batch.events[0].stored.block_hashes)] == list(range(300_000))


def test_many_small_events_stay_within_the_payload_limit() -> None:
    """Framing counts: 100,000 removals of one block each are split too."""
    messages = make_feed().batches([Removed(hashes(2**64 - 1 - i)) for i in range(100_000)], 0)
    assert max(map(len, messages)) <= bus.MAX_PAYLOAD_BYTES


def test_a_load_is_consistent_with_its_seq() -> None:
    """A load carries digest and count of the blocks as of the seq that it names."""
    feed = make_feed()
    feed.batches(feed.mirror.apply([blocks(3)]), 0)
    first = events_pb2.RankLoad.FromString(feed.load_report(100, 0))
    digest = 0
    for block in feed.mirror.snapshot():
        digest ^= mix(block)
    assert (first.kv_seq, first.kv_block_count, first.kv_digest, first.load_seq) == (1, 3, digest, 1)
    feed.batches(feed.mirror.apply([AllBlocksCleared()]), 0)
    second = events_pb2.RankLoad.FromString(feed.load_report(100, 0))
    assert (second.kv_seq, second.kv_block_count, second.kv_digest, second.load_seq) == (2, 0, 0, 2)


def opened() -> Publisher:
    publisher = Publisher(Instance("w1", 7), "g")
    publisher.open(INFO, lambda: [EngineLoad(), EngineLoad()])
    return publisher


async def test_events_before_open_are_kept() -> None:
    """What an engine tells while it starts is not lost."""
    publisher = Publisher(Instance("w1", 7), "g")
    publisher.kv_events(LocalRank(1), [blocks(3)])
    publisher.open(INFO, lambda: [EngineLoad(), EngineLoad()])
    assert len(publisher.snapshot(LocalRank(1)).blocks) == 3


async def test_lost_events_void_the_rank() -> None:
    """After kv_lost nothing is claimed of the rank's cache, and that is told."""
    publisher = opened()
    publisher.kv_events(LocalRank(0), [blocks(3)])
    publisher.kv_lost(LocalRank(0))
    snapshot = publisher.snapshot(LocalRank(0))
    assert (snapshot.seq, list(snapshot.blocks), snapshot.digest) == (2, [], 0)


async def test_without_nats_events_are_dropped_and_counted_and_seqs_go_on() -> None:
    """An absent NATS costs the engine nothing: no queue grows, and the seqs leave a hole that indexers see."""
    publisher = opened()
    for first in range(100):
        publisher.kv_events(LocalRank(0), [blocks(1, first)])
    feed = publisher.feeds[0]
    assert (feed.seq, feed.counts.batches, feed.counts.dropped_batches) == (100, 100, 100)
    assert len(publisher.snapshot(LocalRank(0)).blocks) == 100


class Listener:
    """Decoded messages of all subjects of DP group "default"."""

    def __init__(self) -> None:
        self.batches: dict[int, list[events_pb2.KvEventBatch]] = {}
        self.loads: dict[int, list[events_pb2.RankLoad]] = {}
        self.subjects: set[str] = set()

    async def on_message(self, message: Any) -> None:
        self.subjects.add(message.subject)
        kind: type[Message] = events_pb2.KvEventBatch if ".kv." in message.subject else events_pb2.RankLoad
        decoded: Any = kind.FromString(message.data)
        (self.batches if ".kv." in message.subject else self.loads).setdefault(decoded.dp_rank, []).append(decoded)


@pytest.fixture
async def listener(nats_server: NatsServer) -> AsyncIterator[Listener]:
    client = await nats.connect(nats_server.url, reconnect_time_wait=0.05, max_reconnect_attempts=-1)
    listener = Listener()
    await client.subscribe("rankway.v1.default.>", cb=listener.on_message)
    await client.flush()
    yield listener
    await client.close()


def request(dp_rank: int, first: int = 0) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=[first, *range(1, 50)]),
        sampling=types_pb2.SamplingParams(max_tokens=2),
        dp_rank=dp_rank,
    )


async def test_events_and_loads_cross_nats_on_their_subjects(
    registry: tuple[FakeRegistry, str], nats_server: NatsServer, listener: Listener
) -> None:
    """A request's blocks and the rank's loads arrive decoded on rankway.v1.<dp_group>.kv|load.<worker_id>.<dp_rank>."""
    async with live_worker(registry, nats_url=nats_server.url) as worker:
        await eventually(lambda: sorted(listener.loads) == [4, 5, 6, 7])
        _ = [event async for event in worker.generation.Generate(request(6))]
        await eventually(lambda: 6 in listener.batches and listener.loads[6][-1].kv_seq == 1)
        (batch,) = listener.batches[6]
        assert (batch.worker_id, batch.epoch, batch.seq) == ("w1", worker.record.epoch, 1)
        (stored,) = batch.events
        assert len(stored.stored.block_hashes) == 8 * 3
        load = listener.loads[6][-1]
        assert (load.kv_block_count, load.total_blocks, load.running, load.used_blocks) == (3, 256, 0, 0)
        assert {"rankway.v1.default.kv.w1.6", "rankway.v1.default.load.w1.6"} <= listener.subjects
        await worker.worker.ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(dp_rank=6))
        await eventually(lambda: listener.batches[6][-1].events[0].HasField("cleared"))
        assert list(listener.batches) == [6]


async def test_a_worker_that_waits_for_nats_can_always_be_stopped() -> None:
    """A cancellation isn't lost, not even one that comes just as an attempt to connect fails."""
    runs = [asyncio.create_task(opened().run("nats://127.0.0.1:1")) for _ in range(200)]
    for number, task in enumerate(runs):
        asyncio.get_running_loop().call_later(0.003 * number, task.cancel)
    _, hanging = await asyncio.wait(runs, timeout=5)
    assert not hanging


async def test_after_nats_was_away_the_next_load_shows_what_was_missed(
    registry: tuple[FakeRegistry, str], nats_server: NatsServer, listener: Listener
) -> None:
    """While NATS is away requests go on; afterwards nothing old is sent, and seq and digest tell the indexer to repair."""
    async with live_worker(registry, nats_url=nats_server.url) as worker:
        await eventually(lambda: sorted(listener.loads) == [4, 5, 6, 7])
        nats_server.kill()
        for first in range(3):
            _ = [event async for event in worker.generation.Generate(request(6, first))]
        nats_server.start()
        await eventually(lambda: listener.loads[6][-1].kv_seq == 3, timeout_s=10)
        assert listener.loads[6][-1].kv_block_count == 9
        assert 6 not in listener.batches
        _ = [event async for event in worker.generation.Generate(request(6, 4))]
        await eventually(lambda: [batch.seq for batch in listener.batches.get(6, [])] == [4])


async def test_a_nats_that_hangs_does_not_hold_up_requests(
    registry: tuple[FakeRegistry, str], nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen NATS server fills a bounded queue; requests are served and the worker stops in time."""
    monkeypatch.setattr(publisher, "MAX_QUEUED_BYTES", 2_000)
    async with live_worker(registry, nats_url=nats_server.url) as worker:
        nats_server.pause()
        try:
            for first in range(20):
                await asyncio.wait_for(_drain(worker.generation.Generate(request(6, first))), 5)
            worker.stop.set()
            await asyncio.wait_for(worker.task, 8)
        finally:
            nats_server.resume()


async def _drain(call: Any) -> None:
    async for _ in call:
        pass
