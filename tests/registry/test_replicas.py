"""Two registries side by side: whatever they are asked at the same time, no overlap is admitted."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable

import pytest
from harness.registry import Replica, Watcher, record
from harness.waiting import eventually

from rankway.errors import Conflict
from rankway.registry.client import Lease, RegistryClient

StartReplica = Callable[..., Awaitable[Replica]]
OpenClient = Callable[..., RegistryClient]


async def test_one_of_two_wins(start_replica: StartReplica, open_client: OpenClient) -> None:
    """Two workers that ask for overlapping windows at two replicas at once: exactly one gets it, every time."""
    clients = [open_client(await start_replica(lease_ttl_s=5)) for _ in range(2)]
    for turn in range(40):
        group = f"g{turn}"
        rivals = [record(f"a{turn}", 0, 4, dp_group=group), record(f"b{turn}", 2, 4, dp_group=group)]
        answers = await asyncio.gather(
            *(client.register(rival) for client, rival in zip(clients, rivals, strict=True)), return_exceptions=True
        )
        assert sorted(type(answer) for answer in answers if isinstance(answer, Lease)) == [Lease], answers
        (refused,) = (answer for answer in answers if not isinstance(answer, Lease))
        assert isinstance(refused, Conflict)
        assert f"a{turn}" in refused.message
        assert f"b{turn}" in refused.message


async def test_a_freed_window_has_one_heir(start_replica: StartReplica, open_client: OpenClient) -> None:
    """A worker that left and comes back races with one that wants its window: exactly one gets it, every time."""
    clients = [open_client(await start_replica(lease_ttl_s=5)) for _ in range(2)]
    for turn in range(30):
        group = f"g{turn}"
        old, heir = record(f"a{turn}", dp_group=group), record(f"b{turn}", dp_group=group)
        await clients[0].register(old)
        await clients[0].deregister(old.instance)
        answers = await asyncio.gather(clients[0].register(old), clients[1].register(heir), return_exceptions=True)
        assert sum(isinstance(answer, Lease) for answer in answers) == 1, answers


@pytest.mark.parametrize("seed", range(3))
async def test_a_crowd_at_both(
    start_replica: StartReplica, open_client: OpenClient, watch: Callable[..., Watcher], seed: int
) -> None:
    """Many workers join and leave through two replicas at once: at no time does any watcher see an overlap."""
    replicas = [await start_replica(lease_ttl_s=5) for _ in range(2)]
    clients = [open_client(replica) for replica in replicas]
    watchers = [watch(client) for client in clients]
    chance = random.Random(seed)

    async def live(number: int) -> None:
        for epoch in range(1, 6):
            given = record(f"w{number}", chance.randrange(12), chance.randint(1, 4), epoch=epoch, data_parallel_size=16)
            client = chance.choice(clients)
            try:
                await client.register(given)
            except Conflict:
                continue
            for watcher in watchers:
                for a, b in itertools.combinations(watcher.known.values(), 2):
                    assert not a.window.overlaps(b.window)
            if chance.random() < 0.7:
                await chance.choice(clients).deregister(given.instance)

    await asyncio.gather(*(live(number) for number in range(8)))
    remaining = {r.worker_id: r for r in await clients[0].list()}
    for a, b in itertools.combinations(remaining.values(), 2):
        assert not a.window.overlaps(b.window)
    for watcher in watchers:
        await eventually(lambda watcher=watcher: watcher.known == remaining)
