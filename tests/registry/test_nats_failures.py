"""NATS goes away, comes back with or without its store, or hangs: what is known stays, and everything repairs itself."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.nats import NatsServer
from harness.registry import Replica, Watcher, record
from harness.waiting import eventually, free_port

from rankway import rpc
from rankway.errors import Unavailable
from rankway.registry.client import Gone, LeaseKeeper, RegistryClient, Snapshot
from rankway.registry.service import SERVICE_NAME

StartReplica = Callable[..., Awaitable[Replica]]


@pytest.fixture
async def kept(client: RegistryClient) -> AsyncIterator[LeaseKeeper]:
    """A worker that keeps its lease."""
    keeper = LeaseKeeper(client, record())
    await keeper.register()
    task = asyncio.create_task(keeper.run())
    yield keeper
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled(), task.exception()


async def serving(replica: Replica, name: str = SERVICE_NAME) -> bool:
    channel = rpc.open_channel(replica.endpoint)
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    finally:
        await channel.close()
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("lose_store", [False, True], ids=["store kept", "store lost"])
async def test_nats_restarts(
    nats_server: NatsServer,
    replica: Replica,
    client: RegistryClient,
    kept: LeaseKeeper,
    watch: Callable[..., Watcher],
    lose_store: bool,
) -> None:
    """Over a NATS restart longer than the lease no worker is lost: watchers hear nothing, and the lease is there again."""
    watcher = watch(client)
    await eventually(lambda: "w1" in watcher.known)
    nats_server.kill(lose_store=lose_store)
    await eventually(lambda: _not(serving(replica)), timeout_s=15)
    assert await client.list() == [record()]
    with pytest.raises(Unavailable, match="NATS"):
        await client.register(record("w2", 4, 4))
    await asyncio.sleep(2.2)  # the rule is about an outage that is longer than the lease of 2 s
    nats_server.start()
    before = kept.renewals + kept.lost_leases
    await eventually(lambda: kept.renewals + kept.lost_leases > before, timeout_s=15)
    await eventually(lambda: serving(replica))
    await client.register(record("w2", 4, 4))
    await eventually(lambda: set(watcher.known) == {"w1", "w2"})
    assert not [event for event in watcher.events if isinstance(event, Gone)]
    assert len([event for event in watcher.events if isinstance(event, Snapshot)]) == 1


async def _not(answer: Awaitable[bool]) -> bool:
    return not await answer


async def test_a_worker_that_died_meanwhile_is_gone(
    nats_server: NatsServer, client: RegistryClient, watch: Callable[..., Watcher]
) -> None:
    """A worker that doesn't come back after a NATS restart is gone one lease later."""
    watcher = watch(client)
    await client.register(record())
    await eventually(lambda: "w1" in watcher.known)
    nats_server.restart(lose_store=True)
    await eventually(lambda: not watcher.known, timeout_s=15)
    await eventually(lambda: client.register(record("w2")), timeout_s=15)


async def test_nats_hangs(
    nats_server: NatsServer, replica: Replica, client: RegistryClient, kept: LeaseKeeper, watch: Callable[..., Watcher]
) -> None:
    """A NATS that accepts and never answers is UNAVAILABLE, not a hang; what is known stays."""
    watcher = watch(client)
    await eventually(lambda: "w1" in watcher.known)
    nats_server.pause()
    try:
        with pytest.raises(Unavailable):
            await client.register(record("w2", 4, 4))
        await eventually(lambda: _not(serving(replica)), timeout_s=15)
        assert await client.list() == [record()]
    finally:
        nats_server.resume()
    await eventually(lambda: serving(replica), timeout_s=15)
    await eventually(lambda: watcher.known == {"w1": record()})
    assert not [event for event in watcher.events if isinstance(event, Gone)]


async def test_nats_is_late(nats_server: NatsServer, start_replica: StartReplica) -> None:
    """A registry that starts before NATS is alive and not ready, answers UNAVAILABLE, and serves once NATS is there."""
    nats_server.stop()
    address = f"127.0.0.1:{free_port()}"
    starting = asyncio.create_task(start_replica(grpc_listen=address))
    client = RegistryClient([address])
    try:

        async def refused() -> bool:
            try:
                await client.register(record())
            except Unavailable as error:
                return "not reached NATS" in error.message
            return False

        await eventually(refused)
        nats_server.start()
        replica = await starting
        assert await serving(replica)
        await client.register(record())
    finally:
        await client.close()


async def test_readiness_and_metrics(replica: Replica, client: RegistryClient) -> None:
    """Health and metrics describe what is there, and a worker that left leaves no series."""
    assert await serving(replica)
    assert await serving(replica, "")
    await client.register(record())
    text = await _metrics(replica)
    assert 'rankway_registry_workers{dp_group="g",state="READY"} 1.0' in text
    assert 'rankway_registry_ranks{dp_group="g"} 4.0' in text
    assert 'rankway_registry_calls_total{code="OK",method="Register"} 1.0' in text
    await client.deregister(record().instance)
    assert 'dp_group="g"' not in await _metrics(replica)


async def _metrics(replica: Replica) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://{replica.addresses['metrics']}/metrics") as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(read)
