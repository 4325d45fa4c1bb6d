"""Registry replicas on a test's own nats-server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from harness.nats import NatsServer
from harness.registry import Replica

from rankway.registry.client import RegistryClient
from rankway.registry.settings import RegistrySettings


@pytest.fixture
async def start_replica(nats_server: NatsServer) -> AsyncIterator[Callable[..., Any]]:
    """Starts a replica with a lease of 1 s (or other settings) and waits until it is ready."""
    replicas: list[Replica] = []

    async def start(**changes: Any) -> Replica:
        fields: dict[str, Any] = {"grpc_listen": "127.0.0.1:0", "nats_url": nats_server.url, "lease_ttl_s": 1}
        replica = Replica(RegistrySettings(**{**fields, **changes}))
        replicas.append(replica)
        await replica.wait_ready()
        return replica

    yield start
    for replica in replicas:
        await replica.stop()


@pytest.fixture
async def replica(start_replica: Callable[..., Any]) -> Replica:
    started: Replica = await start_replica()
    return started


@pytest.fixture
async def client(replica: Replica) -> AsyncIterator[RegistryClient]:
    client = RegistryClient([replica.endpoint])
    yield client
    await client.close()
