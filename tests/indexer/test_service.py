"""The indexer as a service: real NATS, real gRPC."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.nats import NatsServer
from harness.waiting import eventually
from nats.aio.client import Client

from rankway import bus, rpc
from rankway.blocks import pack_hashes, root_hash
from rankway.native import hash_chain
from rankway.v1 import events_pb2, indexer_pb2, indexer_pb2_grpc, types_pb2

Start = Callable[..., Any]


async def test_batches_reach_a_replica(start_indexer: Start, start_worker: Start, start_replica: Start) -> None:
    """What a worker publishes is in the index and in a follower's replica, rank by rank, loads included."""
    worker = await start_worker(size=2)
    indexer = await start_indexer()
    replica = await start_replica(indexer)
    await worker.change(0, ("stored", [1, 2, 3]))
    await worker.change(1, ("stored", [1, 9]))
    await worker.change(0, ("removed", [2]))
    await worker.load(0, running=3)
    await eventually(lambda: replica.equals(worker))
    await eventually(lambda: replica.replica.ranks[worker.sources[0].key].load.running == 3)
    stats = await indexer.stats()
    assert [(rank.dp_rank, rank.known, rank.last_seq, rank.block_count) for rank in stats.ranks] == [
        (0, True, 2, 2),
        (1, True, 1, 2),
    ]
    assert stats.distinct_blocks == 3
    assert stats.followers == 1


async def test_a_follower_that_comes_late_gets_the_snapshot(
    start_indexer: Start, start_worker: Start, start_replica: Start
) -> None:
    """A new follower sees blocks and loads from before it came, in chunks, and then every change."""
    worker = await start_worker()
    await worker.change(0, ("stored", range(100_000)))
    await worker.load(0, running=1)
    indexer = await start_indexer()
    await worker.load(0, running=2)
    await eventually(lambda: _load_seen(indexer))
    replica = await start_replica(indexer)
    assert replica.equals(worker)
    assert replica.replica.ranks[worker.sources[0].key].load.running == 2
    await worker.change(0, ("removed", range(0, 100_000, 3)))
    await eventually(lambda: replica.equals(worker))


async def _load_seen(indexer: Any) -> bool:
    return (await indexer.rank_stats(0)).HasField("load_age_ms")


async def test_lost_messages_are_repaired(start_indexer: Start, start_worker: Start, start_replica: Start) -> None:
    """A hole in the seqs and a lost last message both end in the worker's state, and the repairs' causes are counted."""
    worker = await start_worker()
    indexer = await start_indexer()
    replica = await start_replica(indexer)
    worker.sources[0].change(("stored", [1]))
    await worker.change(0, ("stored", [2]))
    await eventually(lambda: replica.equals(worker))
    worker.sources[0].change(("stored", [3]))
    await worker.load(0)
    await eventually(lambda: replica.equals(worker))
    assert dict((await indexer.rank_stats(0)).repairs) == {"start": 1, "gap": 1, "tail": 1}


async def test_a_wrong_digest_is_repaired(start_indexer: Start, start_worker: Start, start_replica: Start) -> None:
    """A batch that arrived but isn't what the engine did shows in the next load's digest."""
    worker = await start_worker()
    indexer = await start_indexer()
    replica = await start_replica(indexer)
    worker.sources[0].add_silently(77)
    await worker.change(0, ("stored", [1]))
    await worker.load(0)
    await eventually(lambda: replica.equals(worker))
    assert (await indexer.rank_stats(0)).repairs["digest"] == 1


async def test_malformed_and_foreign_messages_are_counted_and_skipped(
    start_indexer: Start, start_worker: Start, start_replica: Start, client: Client
) -> None:
    """Junk, half hashes, unknown events, wrong subjects and unknown workers change nothing but their counters."""
    worker = await start_worker()
    indexer = await start_indexer()
    replica = await start_replica(indexer)
    await worker.change(0, ("stored", [1]))
    unknown_event = events_pb2.KvEventBatch(worker_id="w1", epoch=1, dp_rank=0, seq=2)
    unknown_event.events.add()
    half_hash = events_pb2.KvEventBatch(worker_id="w1", epoch=1, dp_rank=0, seq=2)
    half_hash.events.add().stored.block_hashes = b"1234567"
    subject = bus.kv_subject("g", "w1", 0)
    for payload in (b"\xff\xff", b"", unknown_event.SerializeToString(), half_hash.SerializeToString()):
        await client.publish(subject, payload)
    await client.publish(bus.load_subject("g", "w1", 0), b"\x80")
    await client.publish(
        bus.kv_subject("g", "w2", 0), events_pb2.KvEventBatch(worker_id="w1", epoch=1, seq=2).SerializeToString()
    )
    await client.publish(
        bus.kv_subject("h", "w1", 0), events_pb2.KvEventBatch(worker_id="w1", epoch=1, seq=2).SerializeToString()
    )
    await client.publish("rankway.v1.g.else.w1.0", b"")
    stranger = events_pb2.KvEventBatch(worker_id="w9", epoch=1, seq=1).SerializeToString()
    await client.publish(bus.kv_subject("g", "w9", 0), stranger)
    old_life = events_pb2.KvEventBatch(worker_id="w1", epoch=0, seq=1).SerializeToString()
    await client.publish(subject, old_life)
    await worker.change(0, ("stored", [2]))
    await eventually(lambda: replica.equals(worker))
    stats = await indexer.stats()
    assert stats.malformed_messages == 8
    assert stats.unknown_worker_messages == 2
    assert stats.ranks[0].repairs.keys() == {"start"}


async def test_messages_before_the_registry_tells_are_not_lost(
    start_indexer: Start, start_worker: Start, start_replica: Start, registry: Any
) -> None:
    """Batches of a worker that no lease names yet are not believed; once it is there its start repair contains them."""
    worker = await start_worker(register=False)
    indexer = await start_indexer()
    replica = await start_replica(indexer)
    await worker.change(0, ("stored", [1, 2]))
    await eventually(lambda: _unknown_seen(indexer))
    assert not replica.replica.ranks
    registry.put(worker.record)
    await eventually(lambda: replica.equals(worker))


async def _unknown_seen(indexer: Any) -> bool:
    return (await indexer.stats()).unknown_worker_messages == 1


async def test_a_lease_that_ends_takes_everything_with_it(
    start_indexer: Start, start_worker: Start, start_replica: Start, registry: Any
) -> None:
    """Blocks, loads, slots and metric series of exactly the worker's ranks go; the other worker's stay."""
    leaving = await start_worker("w1", start=4, size=3)
    staying = await start_worker("w2", start=0, size=2)
    indexer = await start_indexer()
    replica = await start_replica(indexer)
    for worker in (leaving, staying):
        for rank in worker.window.ranks():
            await worker.change(rank, ("stored", [1, 2, 100 + rank]))
            await worker.load(rank)
    await eventually(lambda: replica.equals(leaving, staying))
    assert 'rankway_indexer_blocks{dp_rank="6",worker_id="w1"} 3.0' in await _metrics(indexer)
    registry.end_lease("w1")
    await eventually(lambda: replica.equals(staying))
    stats = await indexer.stats()
    assert {rank.worker_id for rank in stats.ranks} == {"w2"}
    assert stats.distinct_blocks == 4
    assert len(replica.replica.index) == 4
    metrics = await _metrics(indexer)
    assert 'worker_id="w1"' not in metrics
    assert 'rankway_indexer_blocks{dp_rank="1",worker_id="w2"} 3.0' in metrics


async def _metrics(indexer: Any) -> str:
    url = f"http://{indexer.addresses['metrics']}/metrics"
    return await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())


async def test_a_new_epoch_starts_from_nothing(start_indexer: Start, start_worker: Start, start_replica: Start) -> None:
    """A restarted worker's old blocks are dropped, and late messages of its old life are not believed."""
    old = await start_worker(epoch=1)
    indexer = await start_indexer()
    replica = await start_replica(indexer)
    await old.change(0, ("stored", [1, 2, 3]))
    await eventually(lambda: replica.equals(old))
    new = await start_worker(epoch=2)
    await eventually(lambda: replica.equals(new))
    await old.change(0, ("stored", [4]))
    await old.load(0)
    await new.change(0, ("stored", [5]))
    await eventually(lambda: replica.equals(new))
    assert (await indexer.stats()).unknown_worker_messages >= 2


async def test_a_worker_that_does_not_answer_delays_readiness_for_a_bounded_time(
    start_indexer: Start, start_worker: Start, start_replica: Start
) -> None:
    """Follow waits for the first resync, but a rank that hangs holds it up no longer than the timeout; others are known."""
    hanging = await start_worker("w1", start=0, size=4)
    hanging.answers.clear()
    fine = await start_worker("w2", start=4, size=2)
    indexer = await start_indexer(resync_timeout_s=1.0, wait=False)
    await eventually(lambda: hanging.snapshots and fine.snapshots)
    assert not indexer.ready.is_set()
    await indexer.wait_ready()
    replica = await start_replica(indexer)
    assert replica.held("w1", 1, 0) is None
    assert replica.held("w2", 1, 4) == set()
    hanging.answers.set()
    await eventually(lambda: replica.equals(hanging, fine))


async def test_follow_is_refused_before_the_first_resync(
    start_indexer: Start, start_worker: Start, nats_server: NatsServer
) -> None:
    """Before it is ready Follow answers UNAVAILABLE and the service's health NOT_SERVING, while the process's is SERVING."""
    worker = await start_worker()
    worker.answers.clear()
    indexer = await start_indexer(wait=False, grpc_listen="127.0.0.1:0")
    await eventually(lambda: worker.snapshots)
    endpoint = await eventually(lambda: _listening(indexer))
    async with rpc.open_channel(endpoint) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        service = health_pb2.HealthCheckRequest(service="rankway.v1.Indexer")
        assert (await health.Check(service)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await indexer_pb2_grpc.IndexerStub(channel).Follow(indexer_pb2.FollowRequest()).read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        worker.answers.set()
        await indexer.wait_ready()
        assert (await health.Check(service)).status == health_pb2.HealthCheckResponse.SERVING


def _listening(indexer: Any) -> str:
    """The indexer's endpoint before it has told it."""
    frame = indexer.task.get_coro().cr_frame
    return str(frame.f_locals.get("address", ""))


async def test_a_worker_that_vanished_is_not_waited_for(
    start_indexer: Start, start_worker: Start, start_replica: Start, registry: Any
) -> None:
    """The end of its lease cancels a repair that waits for an answer; nothing of it is left."""
    worker = await start_worker()
    worker.answers.clear()
    indexer = await start_indexer(resync_timeout_s=0.2)
    replica = await start_replica(indexer)
    assert len(replica.replica.ranks) == 1
    registry.end_lease("w1")
    await eventually(lambda: not replica.replica.ranks)
    assert "rankway_indexer_repairs_running 0.0" in await _metrics(indexer)


async def test_failed_snapshots_are_tried_again(start_indexer: Start, start_worker: Start, start_replica: Start) -> None:
    """A worker that refuses is asked again after a pause; the cause "snapshot_failed" counts it."""
    worker = await start_worker()
    worker.refuse = grpc.StatusCode.UNAVAILABLE
    await worker.change(0, ("stored", [1]))
    indexer = await start_indexer(resync_timeout_s=0.2)
    replica = await start_replica(indexer)
    assert replica.held("w1", 1, 0) is None
    worker.refuse = None
    await eventually(lambda: replica.equals(worker))
    assert (await indexer.rank_stats(0)).repairs["snapshot_failed"] >= 1


async def test_a_nats_restart_ends_in_the_same_state(
    start_indexer: Start, start_worker: Start, start_replica: Start, nats_server: NatsServer
) -> None:
    """What is lost while NATS is away shows in the loads after it, and is repaired."""
    worker = await start_worker(size=2)
    indexer = await start_indexer()
    replica = await start_replica(indexer)
    await worker.change(0, ("stored", [1]))
    await eventually(lambda: replica.equals(worker))
    nats_server.kill()
    worker.sources[0].change(("stored", [2]))
    worker.sources[1].change(("stored", [3]))
    nats_server.start()

    async def says_its_load() -> bool:
        await worker.loads()
        return replica.equals(worker)

    await eventually(says_its_load)


async def test_two_indexers_agree_and_a_replica_goes_to_the_other_when_its_own_dies(
    start_indexer: Start, start_worker: Start, start_replica: Start
) -> None:
    """A follower fails over, keeps its last known view meanwhile, and ends in the same state."""
    worker = await start_worker()
    first, second = await start_indexer(indexer_id="one"), await start_indexer(indexer_id="two")
    replica = await start_replica(first, second)
    await worker.change(0, ("stored", [1, 2]))
    await eventually(lambda: replica.equals(worker))
    assert replica.replica.indexer_id == "one"
    await first.stop()
    assert replica.equals(worker)
    await worker.change(0, ("removed", [1]))
    await eventually(lambda: replica.equals(worker))
    assert replica.replica.indexer_id == "two"


async def test_the_view_stays_while_no_indexer_is_there(start_indexer: Start, start_worker: Start, start_replica: Start) -> None:
    """With every indexer gone the last known view serves; a restarted one on the same port is followed again."""
    worker = await start_worker()
    indexer = await start_indexer()
    replica = await start_replica(indexer)
    await worker.change(0, ("stored", [1, 2]))
    await eventually(lambda: replica.equals(worker))
    await indexer.stop()
    await eventually(lambda: not replica.follower.connected_to)
    assert replica.equals(worker)
    await worker.change(0, ("stored", [3]))
    await start_indexer(grpc_listen=indexer.endpoint)
    await eventually(lambda: replica.equals(worker))


async def test_a_follower_that_is_too_slow_is_cut_off(start_indexer: Start, start_worker: Start, start_replica: Start) -> None:
    """A follower that doesn't read ends with RESOURCE_EXHAUSTED; others and the index go on."""
    worker = await start_worker()
    indexer = await start_indexer(follower_bytes=1_000_000)
    replica = await start_replica(indexer)
    async with rpc.open_channel(indexer.endpoint) as channel:
        call = indexer_pb2_grpc.IndexerStub(channel).Follow(indexer_pb2.FollowRequest(follower_id="sleepy"))
        await call.read()
        for _ in range(60):  # more than the buffers of both sides hold
            await worker.change(0, ("stored", [7] * 60_000))
        await eventually(lambda: replica.equals(worker), timeout_s=20)
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await _read_to_the_end(call)
        assert cut.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "sleepy" in (cut.value.details() or "")
    cut_off = re.search(r"^rankway_indexer_followers_cut_off_total (\S+)$", await _metrics(indexer), re.MULTILINE)
    # On a machine that is busy enough the good follower may be cut off too, and follow again.
    assert cut_off is not None
    assert float(cut_off[1]) >= 1


async def _read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_snapshot_under_load_has_no_gap_and_no_double(
    start_indexer: Start, start_worker: Start, start_replica: Start
) -> None:
    """Replicas that begin while batches pour in never see a wrong seq and end equal."""
    worker = await start_worker(size=4)
    for rank in worker.window.ranks():
        await worker.change(rank, ("stored", range(rank * 10**6, rank * 10**6 + 20_000)))
    indexer = await start_indexer()
    stop = asyncio.Event()

    async def pour() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            for rank in worker.window.ranks():
                first = rank * 10**6 + 100 * step
                await worker.change(
                    rank, ("stored", range(first + 20_000, first + 20_100)), ("removed", range(first, first + 100))
                )
            await worker.loads()
            await asyncio.sleep(0.002)

    pouring = asyncio.create_task(pour())
    replicas = [await start_replica(indexer) for _ in range(5)]
    stop.set()
    await pouring
    for replica in replicas:
        await eventually(lambda: replica.equals(worker), timeout_s=10)  # noqa: B023  # awaited in this turn
        assert not replica.restarts


async def test_find_matches(start_indexer: Start, start_worker: Start, start_replica: Start) -> None:
    """Overlaps by hashes and by token ids are the leading runs of every known rank, longest first."""
    worker = await start_worker(size=3)
    indexer = await start_indexer()
    replica = await start_replica(indexer)
    tokens = list(range(16 * 5 + 3))
    chain = hash_chain(tokens, 16, root_hash("model-a", "", "salt"))
    numbers = [int.from_bytes(chain[i : i + 8], "little") for i in range(0, len(chain), 8)]
    await worker.change(0, ("stored", numbers[:2]))
    await worker.change(1, ("stored", numbers[:4]))
    await worker.change(2, ("stored", numbers[1:]))
    await eventually(lambda: replica.equals(worker))
    async with rpc.open_channel(indexer.endpoint) as channel:
        stub = indexer_pb2_grpc.IndexerStub(channel)
        by_tokens = indexer_pb2.FindMatchesRequest(token_ids=types_pb2.TokenIds(ids=tokens), model="model-a", cache_salt="salt")
        for request in (by_tokens, indexer_pb2.FindMatchesRequest(block_hashes=chain, dp_group="g")):
            answer = await stub.FindMatches(request)
            assert [(match.dp_rank, match.overlap_blocks) for match in answer.matches] == [(1, 4), (0, 2)]
            assert answer.prompt_blocks == 5
        assert not (await stub.FindMatches(indexer_pb2.FindMatchesRequest(block_hashes=chain, dp_group="other"))).matches


@pytest.mark.parametrize(
    ("request_", "code", "word"),
    [
        (indexer_pb2.FindMatchesRequest(), grpc.StatusCode.INVALID_ARGUMENT, "block_hashes"),
        (
            indexer_pb2.FindMatchesRequest(block_hashes=pack_hashes([1]), token_ids=types_pb2.TokenIds(ids=[1])),
            grpc.StatusCode.INVALID_ARGUMENT,
            "block_hashes",
        ),
        (indexer_pb2.FindMatchesRequest(block_hashes=b"123"), grpc.StatusCode.INVALID_ARGUMENT, "multiple of 8"),
        (indexer_pb2.FindMatchesRequest(token_ids=types_pb2.TokenIds(ids=[1])), grpc.StatusCode.INVALID_ARGUMENT, "model"),
        (
            indexer_pb2.FindMatchesRequest(token_ids=types_pb2.TokenIds(packed=b"123"), model="model-a"),
            grpc.StatusCode.INVALID_ARGUMENT,
            "token_ids.packed",
        ),
        (
            indexer_pb2.FindMatchesRequest(token_ids=types_pb2.TokenIds(ids=[1]), model="nobody"),
            grpc.StatusCode.NOT_FOUND,
            "model-a",
        ),
    ],
)
async def test_bad_find_matches_are_refused_by_name(
    start_indexer: Start, start_worker: Start, request_: indexer_pb2.FindMatchesRequest, code: grpc.StatusCode, word: str
) -> None:
    """Each wrong request has its status code and names what is wrong."""
    await start_worker()
    indexer = await start_indexer()
    async with rpc.open_channel(indexer.endpoint) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await indexer_pb2_grpc.IndexerStub(channel).FindMatches(request_)
    assert refused.value.code() is code
    assert word in (refused.value.details() or "")


async def test_one_group_only(start_indexer: Start, start_worker: Start, start_replica: Start) -> None:
    """A follower of one DP group hears of that group alone, and so does an indexer that is set to one."""
    ours, theirs = await start_worker("w1", dp_group="a"), await start_worker("w2", dp_group="b")
    both = await start_indexer()
    replica = await start_replica(both, dp_group="a")
    await ours.change(0, ("stored", [1]))
    await theirs.change(0, ("stored", [2]))
    await eventually(lambda: replica.equals(ours))
    everything = await start_replica(both)
    await eventually(lambda: everything.equals(ours, theirs))
