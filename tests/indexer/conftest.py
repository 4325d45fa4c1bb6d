"""Indexers over a real nats-server and real gRPC, with a registry and workers whose every word the test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import nats
import pytest
from harness.indexer import RunningIndexer, RunningReplica
from harness.messages import Event, RankSource
from harness.nats import NatsServer
from harness.registry import record
from harness.waiting import eventually
from nats.aio.client import Client

from rankway import bus, rpc
from rankway.indexer.settings import IndexerSettings
from rankway.indexer.slots import RankKey
from rankway.ranks import DpRange
from rankway.registry.records import Record, to_proto
from rankway.v1 import (
    registry_pb2,
    registry_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

CHUNK_BLOCKS = 1000


class ScriptedRegistry(registry_pb2_grpc.RegistryServicer):
    """Only Watch: whoever watches sees `records` and what the test changes."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.endpoint = ""
        self._watchers: set[asyncio.Queue[registry_pb2.WatchResponse]] = set()
        self._server = rpc.Server(["rankway.v1.Registry"])
        registry_pb2_grpc.add_RegistryServicer_to_server(self, self._server.grpc)

    async def start(self) -> None:
        self.endpoint = f"127.0.0.1:{await self._server.start('127.0.0.1:0')}"

    async def stop(self) -> None:
        await self._server.stop(0)

    def put(self, worker: Record) -> None:
        self.records[worker.worker_id] = worker
        self._tell(registry_pb2.WatchResponse(revision=1, put=to_proto(worker)))

    def end_lease(self, worker_id: str) -> None:
        worker = self.records.pop(worker_id)
        gone = registry_pb2.WorkerGone(worker_id=worker_id, epoch=worker.epoch)
        self._tell(registry_pb2.WatchResponse(revision=1, gone=gone))

    def _tell(self, message: registry_pb2.WatchResponse) -> None:
        for queue in self._watchers:
            queue.put_nowait(message)

    @rpc.stream
    async def Watch(self, request: registry_pb2.WatchRequest, context: Any) -> AsyncIterator[registry_pb2.WatchResponse]:  # type: ignore[override]
        queue: asyncio.Queue[registry_pb2.WatchResponse] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            snapshot = registry_pb2.WorkerSnapshot(records=map(to_proto, self.records.values()))
            yield registry_pb2.WatchResponse(revision=1, snapshot=snapshot)
            while True:
                yield await queue.get()
        finally:
            self._watchers.discard(queue)


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """A worker without an engine: the test decides what its ranks hold, what it publishes and how it answers Snapshot."""

    def __init__(self, client: Client, worker_id: str, epoch: int, window: DpRange, dp_group: str) -> None:
        self.worker_id = worker_id
        self.window = window
        self.dp_group = dp_group
        self.sources = {rank: RankSource(RankKey(worker_id, epoch, rank)) for rank in window.ranks()}
        self.record = record(worker_id, epoch=epoch, window=window, dp_group=dp_group, data_parallel_size=64)
        self.snapshots = 0
        self.answers = asyncio.Event()
        """Snapshots wait for it."""
        self.answers.set()
        self.refuse: grpc.StatusCode | None = None
        self._client = client
        self._server = rpc.Server(["rankway.v1.Worker"])
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server.grpc)

    async def start(self) -> Record:
        port = await self._server.start("127.0.0.1:0")
        changed = {**{f: getattr(self.record, f) for f in self.record.__slots__}, "endpoint": f"127.0.0.1:{port}"}
        self.record = Record(**changed)
        return self.record

    async def stop(self) -> None:
        await self._server.stop(0)

    async def publish(self, dp_rank: int, payload: bytes, kind: str = "kv") -> None:
        subject = (bus.kv_subject if kind == "kv" else bus.load_subject)(self.dp_group, self.worker_id, dp_rank)
        await self._client.publish(subject, payload)

    async def change(self, dp_rank: int, *events: Event) -> None:
        await self.publish(dp_rank, self.sources[dp_rank].change(*events))  # type: ignore[index]

    async def load(self, dp_rank: int, **fields: int) -> None:
        await self.publish(dp_rank, self.sources[dp_rank].load_payload(**fields), "load")  # type: ignore[index]

    async def loads(self) -> None:
        """A load of each rank, as a worker's timer sends them."""
        for dp_rank in self.window.ranks():
            await self.load(dp_rank)

    @rpc.stream
    async def Snapshot(self, request: worker_pb2.SnapshotRequest, context: Any) -> AsyncIterator[worker_pb2.SnapshotResponse]:  # type: ignore[override]
        self.snapshots += 1
        await self.answers.wait()
        if self.refuse is not None:
            await context.abort(self.refuse, "as the test wants it")
        source = self.sources[request.dp_rank]  # type: ignore[index]
        snapshot = source.snapshot()
        for chunk in snapshot.chunks:
            yield worker_pb2.SnapshotResponse(
                epoch=source.key.epoch,
                seq=snapshot.seq,
                block_hashes=chunk,
                kv_digest=snapshot.digest,
                kv_block_count=snapshot.block_count,
            )


@pytest.fixture
async def registry() -> AsyncIterator[ScriptedRegistry]:
    registry = ScriptedRegistry()
    await registry.start()
    yield registry
    await registry.stop()


@pytest.fixture
async def client(nats_server: NatsServer) -> AsyncIterator[Client]:
    client = await nats.connect(nats_server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.05)
    yield client
    await client.close()


@pytest.fixture
async def start_worker(client: Client, registry: ScriptedRegistry) -> AsyncIterator[Callable[..., Any]]:
    """Starts a worker and registers it, unless `register` is False."""
    workers = []

    async def start(
        worker_id: str = "w1", epoch: int = 1, start: int = 0, size: int = 1, dp_group: str = "g", *, register: bool = True
    ) -> ScriptedWorker:
        worker = ScriptedWorker(client, worker_id, epoch, DpRange(start, size), dp_group)
        workers.append(worker)
        await worker.start()
        if register:
            registry.put(worker.record)
        return worker

    yield start
    for worker in workers:
        await worker.stop()


@pytest.fixture
async def start_indexer(nats_server: NatsServer, registry: ScriptedRegistry) -> AsyncIterator[Callable[..., Any]]:
    indexers = []

    async def start(*, wait: bool = True, **changes: Any) -> RunningIndexer:
        fields: dict[str, Any] = {
            "grpc_listen": "127.0.0.1:0",
            "nats_url": nats_server.url,
            "registry_endpoints": (registry.endpoint,),
        }
        indexer = RunningIndexer(IndexerSettings(**{**fields, **changes}))
        indexers.append(indexer)
        if wait:
            await indexer.wait_ready()
        return indexer

    yield start
    for indexer in indexers:
        await indexer.stop()


@pytest.fixture
async def start_replica() -> AsyncIterator[Callable[..., Any]]:
    """Starts a replica of the given indexers and waits until its view is complete."""
    replicas = []

    async def start(*indexers: RunningIndexer, dp_group: str = "", endpoints: list[str] | None = None) -> RunningReplica:
        replica = RunningReplica(endpoints or [indexer.endpoint for indexer in indexers], dp_group)
        replicas.append(replica)
        await eventually(lambda: replica.replica.complete)
        return replica

    yield start
    for replica in replicas:
        await replica.stop()
