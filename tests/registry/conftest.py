"""Registry replicas on a test's own nats-server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from harness.nats import NatsServer
from harness.registry import Replica, Watcher

from rankway.registry.client import RegistryClient
from rankway.registry.settings import RegistrySettings

StartReplica = Callable[..., Awaitable[Replica]]
OpenClient = Callable[..., RegistryClient]
OpenWatcher = Callable[..., Watcher]


@pytest.fixture
async def start_replica(nats_server: NatsServer) -> AsyncIterator[StartReplica]:
    """Starts a replica with a lease of 2 s (or other settings) and waits until it is ready."""
    replicas: list[Replica] = []

    async def start(**changes: Any) -> Replica:
        fields: dict[str, Any] = {"grpc_listen": "127.0.0.1:0", "nats_url": nats_server.url, "lease_ttl_s": 2}
        replica = Replica(RegistrySettings(**{**fields, **changes}))
        replicas.append(replica)
        await replica.wait_ready()
        return replica

    yield start
    await asyncio.gather(*(replica.stop() for replica in replicas))


@pytest.fixture
async def replica(start_replica: StartReplica) -> Replica:
    return await start_replica()


@pytest.fixture
async def open_client() -> AsyncIterator[OpenClient]:
    """Opens clients of one or several replicas."""
    async with contextlib.AsyncExitStack() as stack:

        def open_one(*replicas: Replica) -> RegistryClient:
            client = RegistryClient([replica.endpoint for replica in replicas])
            stack.push_async_callback(client.close)
            return client

        yield open_one


@pytest.fixture
async def client(replica: Replica, open_client: OpenClient) -> RegistryClient:
    return open_client(replica)


@pytest.fixture
async def watch() -> AsyncIterator[OpenWatcher]:
    """Watches a DP group (or all) through a client and keeps what it saw."""
    watchers: list[Watcher] = []

    def start(client: RegistryClient, dp_group: str = "") -> Watcher:
        watchers.append(Watcher(client, dp_group))
        return watchers[-1]

    yield start
    for watcher in watchers:
        await watcher.stop()
