"""Leases: how they end, how a keeper holds one, and what it does when it is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from harness.registry import Replica, Watcher, record
from harness.waiting import eventually

from rankway.errors import Conflict, NotFound, Outdated
from rankway.ranks import Instance
from rankway.registry.client import Gone, LeaseKeeper, Put, RegistryClient, Snapshot
from rankway.registry.records import Record, State

LEASE_S = 2.0
"""Of the replicas in these tests."""


class Kept:
    """A worker's lease, kept by a task. `crash` leaves it as kill -9 would."""

    def __init__(self, client: RegistryClient, given: Record) -> None:
        self.keeper = LeaseKeeper(client, given)
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> Kept:
        await self.keeper.register()
        self.task = asyncio.create_task(self.keeper.run())
        return self

    async def crash(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})


@pytest.fixture
async def keep() -> AsyncIterator[Callable[[RegistryClient, Record], Kept]]:
    kept: list[Kept] = []

    def make(client: RegistryClient, given: Record) -> Kept:
        kept.append(Kept(client, given))
        return kept[-1]

    yield make
    for each in kept:
        await each.crash()


async def test_a_dead_worker_is_gone_within_its_lease(
    client: RegistryClient, watch: Callable[..., Watcher], keep: Callable[..., Kept]
) -> None:
    """A worker that stops renewing is gone from watchers once its lease is over, and its window is free."""
    watcher = watch(client)
    worker = await keep(client, record()).start()
    await eventually(lambda: worker.keeper.renewals >= 2)
    await worker.crash()
    crashed = time.monotonic()
    await eventually(lambda: watcher.events[-1] == Gone(Instance("w1", 1000)), timeout_s=10)
    # The rule is a lease plus half a second; the rest is for a busy test machine.
    assert time.monotonic() - crashed < LEASE_S + 2
    await client.register(record("w2"))


async def test_a_kept_lease_outlives_its_length(
    client: RegistryClient, watch: Callable[..., Watcher], keep: Callable[..., Kept]
) -> None:
    """Renewals keep a worker in the registry, and watchers hear nothing of them."""
    watcher = watch(client)
    await eventually(lambda: watcher.events)
    worker = await keep(client, record()).start()
    await eventually(lambda: worker.keeper.renewals >= 4, timeout_s=15)
    assert watcher.events == [Snapshot(()), Put(record())]


async def test_an_update_is_announced_at_once(
    client: RegistryClient, watch: Callable[..., Watcher], keep: Callable[..., Kept]
) -> None:
    """A changed state doesn't wait for the next renewal."""
    watcher = watch(client)
    worker = await keep(client, record(state=State.STARTING)).start()
    await eventually(lambda: "w1" in watcher.known)
    await worker.keeper.set_state(State.READY)
    await eventually(lambda: watcher.known["w1"].state is State.READY)


async def test_a_lost_lease_is_registered_again(
    client: RegistryClient, watch: Callable[..., Watcher], keep: Callable[..., Kept]
) -> None:
    """A keeper whose lease has ended registers again by itself."""
    watcher = watch(client)
    worker = await keep(client, record()).start()
    await client.deregister(record().instance)
    await eventually(lambda: worker.keeper.lost_leases == 1)
    await eventually(lambda: watcher.known == {"w1": record()})


async def test_a_superseded_worker_is_told(client: RegistryClient, keep: Callable[..., Kept]) -> None:
    """When a newer epoch has taken over, the keeper of the old one ends with Outdated."""
    worker = await keep(client, record()).start()
    await client.register(record(epoch=2000))
    assert worker.task is not None
    await asyncio.wait({worker.task}, timeout=15)
    assert isinstance(worker.task.exception(), Outdated)


async def test_a_worker_whose_window_was_taken_is_told(client: RegistryClient, keep: Callable[..., Kept]) -> None:
    """When the lease was lost and another worker has the window, the keeper ends with Conflict naming both."""
    worker = await keep(client, record()).start()
    await client.deregister(record().instance)
    await client.register(record("w2"))
    assert worker.task is not None
    await asyncio.wait({worker.task}, timeout=15)
    failure = worker.task.exception()
    assert isinstance(failure, Conflict)
    assert "worker w1 overlaps window [0, 4) of worker w2" in failure.message


async def test_leaving(client: RegistryClient, watch: Callable[..., Watcher], keep: Callable[..., Kept]) -> None:
    """Deregistering ends the keeper's task and the record, at once and for good."""
    watcher = watch(client)
    worker = await keep(client, record()).start()
    await eventually(lambda: "w1" in watcher.known)
    await worker.keeper.deregister()
    assert worker.task is not None
    await asyncio.wait_for(worker.task, 15)
    await eventually(lambda: not watcher.known)
    with pytest.raises(NotFound):
        await client.keep_alive(record())


async def test_a_keeper_outlives_the_registry(
    start_replica: Callable[..., object], open_client: Callable[..., RegistryClient], keep: Callable[..., Kept]
) -> None:
    """A keeper waits out a registry that is away and goes to another replica when there is one."""
    first, second = await start_replica(lease_ttl_s=5), await start_replica(lease_ttl_s=5)
    assert isinstance(first, Replica)
    client = open_client(first, second)
    worker = await keep(client, record()).start()
    await first.stop()
    before = worker.keeper.renewals
    await worker.keeper.update(record(labels={"a": "b"}))
    await eventually(lambda: worker.keeper.renewals > before, timeout_s=15)
    assert worker.keeper.lost_leases == 0
    assert await client.list() == [record(labels={"a": "b"})]
