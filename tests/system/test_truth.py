"""The index at its limits: a slow consumer, huge batches, a churn that leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
from harness.indexer import RunningReplica
from harness.messages import RankSource
from harness.nats import NatsServer
from harness.registry import Replica as RunningRegistry
from harness.storm import Service
from harness.waiting import eventually, wait_for_port

from rankway import rpc
from rankway.indexer.rank import Limits
from rankway.indexer.slots import RankKey
from rankway.indexer.tracker import Member, Tracker
from rankway.native import open_index
from rankway.ranks import DpRange, LocalRank
from rankway.registry.settings import RegistrySettings
from rankway.v1 import indexer_pb2, indexer_pb2_grpc
from rankway.worker import service as worker_service
from rankway.worker.engine import BlockRemoved, BlockStored, EngineEvent
from rankway.worker.settings import WorkerSettings

STALL_S = float(os.environ.get("OUTAGE_S", "3"))
"""How long the indexer is stopped; `make soak` says 30."""

MESSAGES_PER_S = 5_000
BLOCK_SIZE = 4
RANK = LocalRank(0)


class Cluster:
    """A registry and a worker in this process, an indexer in one of its own, and a replica of it."""

    def __init__(self, worker: Any, indexer: subprocess.Popen[bytes], endpoint: str, replica: RunningReplica) -> None:
        self.worker = worker
        self.indexer = indexer
        self.endpoint = endpoint
        self.replica = replica

    @property
    def publisher(self) -> Any:
        return self.worker._publisher

    def truth(self) -> dict[RankKey, set[int]]:
        instance = self.worker._instance
        return {RankKey(instance.worker_id, instance.epoch, f.dp_rank): set(f.mirror.snapshot()) for f in self.publisher.feeds}

    async def stats(self) -> indexer_pb2.StatsResponse:
        async with rpc.open_channel(self.endpoint) as channel:
            return await indexer_pb2_grpc.IndexerStub(channel).Stats(indexer_pb2.StatsRequest())


@pytest.fixture
async def cluster(nats_server: NatsServer, unused_tcp_port: int) -> AsyncIterator[Cluster]:
    registry = RunningRegistry(RegistrySettings(grpc_listen="127.0.0.1:0", nats_url=nats_server.url))
    await registry.wait_ready()
    built: list[Any] = []
    settings = WorkerSettings(
        worker_id="w",
        dp_group="g",
        nats_url=nats_server.url,
        registry_endpoints=(registry.endpoint,),
        block_size=BLOCK_SIZE,
        num_kv_blocks=2**20,
    )
    worker = Service(worker_service.run, settings, built.append)
    await worker.wait_ready()
    endpoint = f"127.0.0.1:{unused_tcp_port}"
    arguments = [f"--grpc-listen={endpoint}", f"--nats-url={nats_server.url}", f"--registry-endpoints={registry.endpoint}"]
    command = [sys.executable, "-P", "-m", "rankway", "indexer", *arguments, "--log-level=warning"]
    indexer = await asyncio.to_thread(subprocess.Popen, command)
    await asyncio.to_thread(wait_for_port, unused_tcp_port, 20)
    replica = RunningReplica([endpoint], "g")
    await eventually(lambda: replica.replica.complete, 10)
    yield Cluster(built[0], indexer, endpoint, replica)
    await replica.stop()
    indexer.send_signal(signal.SIGCONT)
    indexer.terminate()
    assert await asyncio.to_thread(indexer.wait, 10) == 0
    await worker.stop()
    await registry.stop()


def steps(held: int) -> Any:
    """Engine steps without an end: each stores a block and, once `held` are there, removes the oldest."""
    for number in itertools.count():
        tokens = array("I", [number & 0xFFFF, number >> 16, 0, 0])
        events: list[EngineEvent] = [BlockStored((number,), None, tokens, BLOCK_SIZE)]
        if number >= held:
            events.append(BlockRemoved((number - held,)))
        yield events


@pytest.mark.timeout(600)
async def test_a_stopped_indexer_blocks_no_engine_and_is_right_again(cluster: Cluster) -> None:
    """While the indexer stands still the engine goes on at 5,000 messages a second; afterwards every block is right, and what was
    repaired is said."""
    engine = steps(held=500)
    await eventually(lambda: cluster.publisher._connected())
    cluster.indexer.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    sent = 0
    while (passed := time.monotonic() - started) < STALL_S:
        while sent < passed * MESSAGES_PER_S:
            cluster.publisher.kv_events(RANK, next(engine))
            sent += 1
        await asyncio.sleep(0.001)
    assert cluster.publisher.feeds[0].seq == sent
    cluster.indexer.send_signal(signal.SIGCONT)
    await eventually(lambda: cluster.replica.holds(cluster.truth()), 20)
    cluster.publisher.kv_events(RANK, next(engine))
    await eventually(lambda: cluster.replica.holds(cluster.truth()), 5)
    (rank,) = (await cluster.stats()).ranks
    assert rank.known
    assert rank.last_seq == sent + 1


async def test_a_batch_beyond_nats_limit_is_split_in_order(cluster: Cluster) -> None:
    """One engine event of 300,000 blocks (2.4 MB of hashes) arrives whole, and so does its removal."""
    blocks = range(300_000)
    tokens = array("I", itertools.chain.from_iterable((number & 0xFFFF, number >> 16, 1, 1) for number in blocks))
    await eventually(lambda: cluster.publisher._connected())
    cluster.publisher.kv_events(RANK, [BlockStored(blocks, None, tokens, BLOCK_SIZE)])
    assert cluster.publisher.feeds[0].seq >= 3
    await eventually(lambda: cluster.replica.holds(cluster.truth()), 10)
    assert len(cluster.replica.replica.index) == len(blocks)
    cluster.publisher.kv_events(RANK, [BlockRemoved(blocks[1000:])])
    await eventually(lambda: cluster.replica.holds(cluster.truth()), 10)
    assert len(cluster.replica.replica.index) == 1000
    (rank,) = (await cluster.stats()).ranks
    assert rank.repairs.keys() == {"start"}


def test_churn_leaves_nothing_behind() -> None:
    """200 rounds of storing and removing 20,000 blocks, then the worker's end: nodes as at the start, memory flat."""
    tracker = Tracker(open_index(), Limits())
    tracker.put_member(Member("w", 1, "h:1", "g", DpRange(0, 1), "m", (), 16))
    source = RankSource(RankKey("w", 1, 0))
    rank = tracker.ranks[source.key]
    rank.on_repair_started(0.0)
    tracker.on_snapshot(rank, source.snapshot(), 0.0)
    process = psutil.Process()
    rss: list[int] = []
    for round_ in range(200):
        hashes = array("Q", range(round_ * 20_000, (round_ + 1) * 20_000))
        for kind in ("stored", "removed"):
            tracker.on_batch(source.batch((kind, hashes)), float(round_))
        assert len(tracker.index) == 0
        if round_ % 20 == 19:
            gc.collect()
            rss.append(process.memory_info().rss)
    assert rank.last_seq == 400
    assert rss[-1] - rss[2] < 8 * 2**20, rss
    tracker.remove_member("w", 1)
    assert len(tracker.slots) == 0
