"""Watch: initial metadata, order, resumption, and who falls behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from harness.registry import Replica, Watcher, record
from harness.waiting import eventually

from rankway import rpc
from rankway.ranks import Instance
from rankway.registry import service
from rankway.registry.client import Gone, LeaseKeeper, Put, RegistryClient, Snapshot
from rankway.v1 import registry_pb2, registry_pb2_grpc


@pytest.fixture
async def stub(replica: Replica) -> AsyncIterator[Any]:
    channel = rpc.open_channel(replica.endpoint)
    yield registry_pb2_grpc.RegistryStub(channel)
    await channel.close()


async def test_snapshot_then_changes_in_order(client: RegistryClient, watch: Callable[..., Watcher]) -> None:
    """A watcher gets what is there, then every change in the order in which it happened."""
    await client.register(record("w1"))
    watcher = watch(client)
    await eventually(lambda: watcher.events)
    await client.register(record("w2", 4, 4))
    await client.register(record("w2", 4, 4, epoch=2000))
    await client.deregister(record("w1").instance)
    await eventually(lambda: len(watcher.events) >= 5)
    assert watcher.events == [
        Snapshot((record("w1"),)),
        Put(record("w2", 4, 4)),
        Gone(Instance("w2", 1000)),
        Put(record("w2", 4, 4, epoch=2000)),
        Gone(Instance("w1", 1000)),
    ]


async def test_one_group(client: RegistryClient, watch: Callable[..., Watcher]) -> None:
    """A watcher of one group hears nothing of the others."""
    watcher = watch(client, "h")
    await eventually(lambda: watcher.events)
    await client.register(record("w1"))
    await client.register(record("w2", dp_group="h"))
    await client.deregister(record("w1").instance)
    await client.deregister(record("w2").instance)
    await eventually(lambda: len(watcher.events) >= 3)
    assert watcher.events == [Snapshot(()), Put(record("w2", dp_group="h")), Gone(Instance("w2", 1000))]


async def test_initial_metadata_at_once(stub: Any) -> None:
    """An idle watch sends its headers before any message, and each message carries a revision that never falls."""
    call = stub.Watch(registry_pb2.WatchRequest())
    await asyncio.wait_for(call.initial_metadata(), 2)
    first = await call.read()
    assert first.WhichOneof("event") == "snapshot"
    assert first.revision > 0
    call.cancel()


async def test_resuming(client: RegistryClient, stub: Any) -> None:
    """A watcher that names its last revision gets the changes after it; one that can't be served gets a snapshot."""
    await client.register(record("w1"))
    call = stub.Watch(registry_pb2.WatchRequest())
    snapshot = await call.read()
    call.cancel()
    await client.register(record("w2", 4, 4))
    await client.deregister(record("w1").instance)
    call = stub.Watch(registry_pb2.WatchRequest(after_revision=snapshot.revision))
    put, gone = await call.read(), await call.read()
    assert (put.put.worker_id, gone.gone.worker_id) == ("w2", "w1")
    assert snapshot.revision < put.revision < gone.revision
    call.cancel()
    call = stub.Watch(registry_pb2.WatchRequest(after_revision=put.revision))
    assert (await call.read()).gone.worker_id == "w1"
    call.cancel()
    call = stub.Watch(registry_pb2.WatchRequest(after_revision=1))
    fresh = await call.read()
    assert [r.worker_id for r in fresh.snapshot.records] == ["w2"]
    assert fresh.revision >= gone.revision
    call.cancel()


async def test_a_restarted_registry(
    start_replica: Callable[..., Awaitable[Replica]], open_client: Callable[..., RegistryClient], watch: Callable[..., Watcher]
) -> None:
    """A watch goes on when its registry is started again, and misses nothing of what happened meanwhile."""
    first, other = await start_replica(lease_ttl_s=2), await start_replica(lease_ttl_s=2)
    client, elsewhere = open_client(first), open_client(other)
    worker = LeaseKeeper(elsewhere, record("w1"))
    await worker.register()
    watcher = watch(client)
    await eventually(lambda: "w1" in watcher.known)
    await first.stop()
    other_worker = LeaseKeeper(elsewhere, record("w2", 4, 4))
    await other_worker.register()
    keeping = asyncio.create_task(other_worker.run())
    await worker.deregister()
    await start_replica(lease_ttl_s=2, grpc_listen=first.endpoint)
    # A bucket younger than the lease may stand for a lost one: a watcher that knows more keeps it for that long.
    await eventually(lambda: set(watcher.known) == {"w2"}, timeout_s=15)
    await other_worker.deregister()
    await keeping


async def test_fail_over(
    start_replica: Callable[..., Awaitable[Replica]], open_client: Callable[..., RegistryClient], watch: Callable[..., Watcher]
) -> None:
    """A watcher whose replica dies follows another one, and what it knew stays known."""
    first, second = await start_replica(lease_ttl_s=5), await start_replica(lease_ttl_s=5)
    client = open_client(first, second)
    await client.register(record("w1"))
    watcher = watch(client)
    await eventually(lambda: "w1" in watcher.known)
    await first.stop()
    await client.register(record("w2", 4, 4))
    await eventually(lambda: set(watcher.known) == {"w1", "w2"})
    assert not any(isinstance(event, Gone) for event in watcher.events)


async def test_a_slow_watcher_gets_a_snapshot(
    start_replica: Callable[..., Awaitable[Replica]],
    open_client: Callable[..., RegistryClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A watcher that reads nothing costs the registry nothing, and catches up with one snapshot."""
    monkeypatch.setattr(service, "LOG_SIZE", 8)
    replica = await start_replica(lease_ttl_s=5)
    client = open_client(replica)
    await client.register(record("w1"))
    channel = rpc.open_channel(replica.endpoint)
    call = registry_pb2_grpc.RegistryStub(channel).Watch(registry_pb2.WatchRequest())
    await call.read()
    # Large records fill the stream's flow-control window, then the log moves past the watcher.
    labels = {f"k{i}": "x" * 500 for i in range(400)}
    changes = 150
    for n in range(1, changes + 1):
        await client.keep_alive(record("w1", labels={**labels, "n": str(n)}))
    seen = 0
    snapshots = 0
    while seen < changes:
        message = await asyncio.wait_for(call.read(), 5)
        is_snapshot = message.WhichOneof("event") == "snapshot"
        snapshots += is_snapshot
        seen = int((message.snapshot.records[0] if is_snapshot else message.put).labels["n"])
    assert snapshots == 1
    await channel.close()
