"""A worker in this process, with a registry that admits everything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import grpc.aio

from rankway import rpc
from rankway.v1 import generate_pb2_grpc, registry_pb2, registry_pb2_grpc, worker_pb2_grpc
from rankway.worker import service
from rankway.worker.settings import WorkerSettings


class FakeRegistry(registry_pb2_grpc.RegistryServicer):
    """Admits every record and remembers what it was told."""

    def __init__(self) -> None:
        self.records: dict[str, registry_pb2.WorkerRecord] = {}
        self.states: list[int] = []
        self.outdated = False

    async def Register(self, request: registry_pb2.RegisterRequest, context: Any) -> registry_pb2.RegisterResponse:
        return registry_pb2.RegisterResponse(lease=self._lease(request.record))

    async def KeepAlive(self, request: registry_pb2.KeepAliveRequest, context: Any) -> registry_pb2.KeepAliveResponse:
        if self.outdated:
            await context.abort(grpc.StatusCode.ABORTED, "a newer epoch holds the worker_id")
        return registry_pb2.KeepAliveResponse(lease=self._lease(request.record))

    async def Deregister(self, request: registry_pb2.DeregisterRequest, context: Any) -> registry_pb2.DeregisterResponse:
        self.records.pop(request.worker_id, None)
        return registry_pb2.DeregisterResponse()

    def _lease(self, record: registry_pb2.WorkerRecord) -> registry_pb2.Lease:
        self.records[record.worker_id] = record
        self.states.append(record.state)
        return registry_pb2.Lease(worker_id=record.worker_id, epoch=record.epoch, ttl_ms=600, revision=1)


@contextlib.asynccontextmanager
async def fake_registry() -> AsyncIterator[tuple[FakeRegistry, str]]:
    """(the registry, its endpoint)."""
    fake = FakeRegistry()
    server = grpc.aio.server()
    registry_pb2_grpc.add_RegistryServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield fake, f"127.0.0.1:{port}"
    await server.stop(0)


@dataclass
class LiveWorker:
    """A worker that serves, and a channel to it."""

    task: asyncio.Task[None]
    stop: asyncio.Event
    addresses: Mapping[str, str]
    channel: grpc.aio.Channel
    registry: FakeRegistry
    engine: Any
    generation: generate_pb2_grpc.GenerationAsyncStub = field(init=False)
    worker: worker_pb2_grpc.WorkerAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.generation = generate_pb2_grpc.GenerationStub(self.channel)
        self.worker = worker_pb2_grpc.WorkerStub(self.channel)

    @property
    def record(self) -> registry_pb2.WorkerRecord:
        return self.registry.records["w1"]

    def queued(self) -> tuple[int, int]:
        """(waiting, running) requests of all the simulator's ranks."""
        waiting, running = zip(*(rank.queued() for rank in self.engine.ranks), strict=True)
        return sum(waiting), sum(running)

    def used_blocks(self) -> int:
        return sum(rank.cache.used_blocks for rank in self.engine.ranks)


def settings(registry_endpoint: str, **changes: Any) -> WorkerSettings:
    """A fast simulator of ranks 4-7 of a group of 8."""
    values: dict[str, Any] = {
        "worker_id": "w1",
        "nats_url": "nats://127.0.0.1:1",
        "registry_endpoints": (registry_endpoint,),
        "data_parallel_size": 8,
        "start_rank": 4,
        "size": 4,
        "num_kv_blocks": 256,
        "max_model_len": 2048,
        "sim_speedup": 0.0,
        "drain_timeout_s": 5.0,
    }
    return WorkerSettings(**(values | changes))


@contextlib.asynccontextmanager
async def live_worker(
    registry: tuple[FakeRegistry, str], engine: Callable[..., Any] | None = None, **changes: Any
) -> AsyncIterator[LiveWorker]:
    """Start a worker, hand it over when it is ready, stop it at the end and wait."""
    fake, endpoint = registry
    stop = asyncio.Event()
    up: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
    engines: list[Any] = []
    real_build = service.build_engine

    def build(*arguments: Any) -> Any:
        engines.append(engine(*arguments) if engine else real_build(*arguments))
        return engines[0]

    with mock.patch.object(service, "build_engine", build):
        task = asyncio.create_task(service.run(settings(endpoint, **changes), ready=up.set_result, stop=stop))
        await asyncio.wait((task, up), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    addresses = up.result()
    channel = rpc.open_channel(addresses["grpc"])
    try:
        yield LiveWorker(task, stop, addresses, channel, fake, engines[0])
    finally:
        await channel.close()
        stop.set()
        await asyncio.gather(task, return_exceptions=True)
