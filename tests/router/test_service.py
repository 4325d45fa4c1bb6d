"""The router as a service: real NATS, registry and indexer; scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.fake_worker import STOP, FakeWorker
from harness.indexer import RunningIndexer
from harness.nats import NatsServer
from harness.registry import Replica
from harness.waiting import eventually

from rankway import rpc
from rankway.indexer.settings import IndexerSettings
from rankway.registry.client import RegistryClient
from rankway.registry.settings import RegistrySettings
from rankway.router import service
from rankway.router.settings import RouterSettings
from rankway.settings import to_argv
from rankway.v1 import generate_pb2, generate_pb2_grpc, router_pb2, router_pb2_grpc, types_pb2


class Running:
    """A router as a task; `stop` ends it as SIGTERM does."""

    def __init__(self, settings: RouterSettings) -> None:
        self.addresses: Mapping[str, str] = {}
        self.ready = asyncio.Event()
        self._stop = asyncio.Event()
        self.task = asyncio.create_task(service.run(settings, ready=self._on_ready, stop=self._stop))

    def _on_ready(self, addresses: Mapping[str, str]) -> None:
        self.addresses = addresses
        self.ready.set()

    def begin_stop(self) -> None:
        self._stop.set()

    async def stop(self) -> None:
        self._stop.set()
        await self.task


class World:
    """NATS, a registry and an indexer, and what a router is told of them."""

    def __init__(self, nats: NatsServer, registry: Replica, indexer: RunningIndexer) -> None:
        self.settings: dict[str, Any] = {
            "grpc_listen": "127.0.0.1:0",
            "http_listen": "127.0.0.1:0",
            "metrics_listen": "127.0.0.1:0",
            "nats_url": nats.url,
            "registry_endpoints": (registry.endpoint,),
            "indexer_endpoints": (indexer.endpoint,),
            "drain_timeout_s": 5.0,
        }
        self.client = RegistryClient([registry.endpoint])
        self.registry = registry

    async def join(self, worker: FakeWorker) -> None:
        await worker.serve()
        await self.client.register(worker.record)

    def router(self, **settings: Any) -> Running:
        return Running(RouterSettings(**(self.settings | settings)))


@pytest.fixture
async def world(nats_server: NatsServer) -> AsyncIterator[World]:
    registry = Replica(RegistrySettings(grpc_listen="127.0.0.1:0", nats_url=nats_server.url, lease_ttl_s=60))
    await registry.wait_ready()
    indexer = RunningIndexer(
        IndexerSettings(
            grpc_listen="127.0.0.1:0",
            nats_url=nats_server.url,
            registry_endpoints=(registry.endpoint,),
            resync_timeout_s=0.1,
        )
    )
    await indexer.wait_ready()
    world = World(nats_server, registry, indexer)
    yield world
    await world.client.close()
    await indexer.stop()
    await registry.stop()


def a_request(prompt: int = 40, **fields: Any) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=range(prompt)), sampling=types_pb2.SamplingParams(max_tokens=4), **fields
    )


async def health(channel: grpc.aio.Channel, name: str = "rankway.v1.Generation") -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return int(answer.status)


async def test_it_serves_tells_its_health_and_drains(world: World, one_worker: FakeWorker) -> None:
    """Ready with a worker attached; SIGTERM lets the running stream end, refuses new ones and leaves nothing attached."""
    await world.join(one_worker)
    router = world.router()
    await asyncio.wait_for(router.ready.wait(), 10)
    async with rpc.open_channel(router.addresses["grpc"]) as channel:
        await eventually(lambda: _serving(channel))
        assert await health(channel, "") == health_pb2.HealthCheckResponse.SERVING
        call = generate_pb2_grpc.GenerationStub(channel).Generate(a_request())
        seen = await one_worker.next_start()
        metrics = await asyncio.to_thread(_get, f"http://{router.addresses['metrics']}/metrics")
        assert 'rankway_router_rank_requests{dp_rank="0",worker_id="w1"} 1.0' in metrics
        assert "rankway_router_in_flight 1.0" in metrics
        assert "rankway_router_index_age_seconds 0.0" in metrics
        router.begin_stop()
        await eventually(lambda: _refused(f"http://{router.addresses['http']}/health"))
        seen.delta([1], finish=STOP)
        last = None
        while (message := await call.read()) is not grpc.aio.EOF:
            last = message
        assert last is not None
        assert last.HasField("finished")
    await asyncio.wait_for(router.task, 10)
    await eventually(lambda: one_worker.attached == 0)


async def test_series_of_a_worker_go_with_it(world: World, one_worker: FakeWorker) -> None:
    """When a worker leaves the registry its ranks' series are gone, and the router is not ready any more."""
    await world.join(one_worker)
    router = world.router()
    await asyncio.wait_for(router.ready.wait(), 10)
    address = f"http://{router.addresses['metrics']}/metrics"
    await eventually(lambda: asyncio.to_thread(lambda: 'worker_id="w1"' in _get(address)))
    await one_worker.kill()
    await world.client.deregister(one_worker.record.instance)
    await eventually(lambda: asyncio.to_thread(lambda: "w1" not in _get(address)))
    async with rpc.open_channel(router.addresses["grpc"]) as channel:
        await eventually(lambda: _not_serving(channel))
    await router.stop()


async def test_health_follows_the_workers_at_once(world: World, one_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher hears that the last worker is lost, and that one is back, when it happens and not at the next sweep."""
    monkeypatch.setattr(service, "SWEEP_S", 3600.0)
    await world.join(one_worker)
    router = world.router()
    await asyncio.wait_for(router.ready.wait(), 10)
    async with rpc.open_channel(router.addresses["grpc"]) as channel:
        request = health_pb2.HealthCheckRequest(service="rankway.v1.Router")
        call = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=10)
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        await one_worker.kill()
        assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await one_worker.serve_again()
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
    await router.stop()


async def test_it_starts_without_nats_and_indexer(world: World, one_worker: FakeWorker) -> None:
    """With neither NATS nor an indexer in reach, requests are served by load alone."""
    await world.join(one_worker)
    one_worker.on_start = lambda seen: seen.delta([1], finish=STOP)
    router = world.router(nats_url="nats://127.0.0.1:1", indexer_endpoints=("127.0.0.1:1",))
    await asyncio.wait_for(router.ready.wait(), 10)
    metrics = await asyncio.to_thread(_get, f"http://{router.addresses['metrics']}/metrics")
    assert "rankway_router_index_age_seconds +Inf" in metrics
    async with rpc.open_channel(router.addresses["grpc"]) as channel:
        messages = [message async for message in generate_pb2_grpc.GenerationStub(channel).Generate(a_request(), timeout=5)]
    assert messages[-1].HasField("finished")
    await router.stop()


async def test_it_goes_on_without_the_registry(world: World, one_worker: FakeWorker) -> None:
    """When the registry stops, the last known workers serve."""
    await world.join(one_worker)
    one_worker.on_start = lambda seen: seen.delta([1], finish=STOP)
    router = world.router()
    await asyncio.wait_for(router.ready.wait(), 10)
    await world.registry.stop()
    async with rpc.open_channel(router.addresses["grpc"]) as channel:
        for _ in range(5):
            messages = [m async for m in generate_pb2_grpc.GenerationStub(channel).Generate(a_request(), timeout=5)]
            assert messages[-1].HasField("finished")
    await router.stop()


async def test_several_processes_share_the_ports(world: World, two_workers: tuple[FakeWorker, FakeWorker]) -> None:
    """--processes 2: one port, two routers, both attached to every worker and with the same reservations; SIGTERM ends all with
    exit code 0.
    """
    for worker in two_workers:
        worker.on_start = lambda seen: seen.delta([1], finish=STOP)
        await world.join(worker)
    settings = RouterSettings(**(world.settings | {"processes": 2, "router_id": "many", "log_level": "warning"}))
    reader, writer = os.pipe()
    process = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-m", "rankway.router", *to_argv(settings)],
        env={**os.environ, "RANKWAY_READY_FD": str(writer)},
        pass_fds=(writer,),
    )
    os.close(writer)
    try:
        with os.fdopen(reader) as pipe:
            addresses = json.loads(await asyncio.wait_for(asyncio.to_thread(pipe.readline), 60))
        assert all(worker.attached == 2 for worker in two_workers)
        assert {hello.router_id for hello in two_workers[0].hellos} == {"many-0", "many-1"}
        for _ in range(6):
            async with rpc.open_channel(addresses["grpc"]) as channel:
                messages = [m async for m in generate_pb2_grpc.GenerationStub(channel).Generate(a_request(), timeout=5)]
                assert messages[-1].HasField("finished")
        await _each_process_knows_the_others_reservation(addresses["grpc"])
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def _each_process_knows_the_others_reservation(address: str) -> None:
    """Over connections of their own, which the kernel spreads, until both processes have made one."""
    async with contextlib.AsyncExitStack() as channels:
        made: dict[str, tuple[router_pb2_grpc.RouterStub, router_pb2.RouteResponse]] = {}
        count = 0
        while len(made) < 2:
            stub = router_pb2_grpc.RouterStub(await channels.enter_async_context(rpc.open_channel(address)))
            count += 1
            route = await stub.Route(router_pb2.RouteRequest(request=a_request(100, request_id=f"r{count}")), timeout=5)
            made[route.reservation_id.partition("/")[0]] = stub, route
        (first, at_first), (second, at_second) = made.values()
        for stub in (first, second):
            await eventually(lambda stub=stub: _counts(stub, 100 * count))
        for stub, route in ((first, at_second), (second, at_first)):
            again = router_pb2.RouteRequest(request=a_request(100, request_id=route.request_id))
            assert await stub.Route(again, timeout=5) == route
            assert (await stub.Release(router_pb2.ReleaseRequest(reservation_id=route.reservation_id), timeout=5)).released


async def _counts(stub: router_pb2_grpc.RouterStub, prefill_tokens: int) -> bool:
    """Whether the process counts exactly so many tokens to prefill."""
    explained = await stub.Explain(router_pb2.ExplainRequest(request=a_request()), timeout=5)
    return sum(candidate.queued_prefill_tokens for candidate in explained.candidates) == prefill_tokens


async def test_an_address_in_use_is_an_oserror(world: World) -> None:
    """A port that somebody else has ends the start with a clear error."""
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        await world.router(grpc_listen=world.registry.endpoint).task


async def _serving(channel: grpc.aio.Channel) -> bool:
    return await health(channel) == health_pb2.HealthCheckResponse.SERVING


async def _not_serving(channel: grpc.aio.Channel) -> bool:
    return await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


async def _refused(url: str) -> bool:
    try:
        await asyncio.to_thread(_get, url)
    except OSError:
        return True
    return False
