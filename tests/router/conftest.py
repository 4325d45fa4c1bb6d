"""A router without registry, indexer and NATS: members are told to it, workers are fakes over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from harness.fake_worker import FakeWorker
from harness.fleet import a_record
from harness.nats import NatsServer
from harness.router import TestRouter
from harness.waiting import eventually
from hypothesis import settings

# Examples take as long as the machine is busy.
settings.register_profile("router", deadline=None)
settings.load_profile("router")

MakeRouter = Callable[..., Awaitable[TestRouter]]


@pytest.fixture
async def make_router() -> AsyncIterator[MakeRouter]:
    """Makes routers with settings of the test's choice; they end with it."""
    routers: list[TestRouter] = []

    async def make(*workers: FakeWorker, **settings: Any) -> TestRouter:
        router = TestRouter(**settings)
        routers.append(router)
        for worker in workers:
            await router.join(worker)
        return router

    yield make
    for router in routers:
        await router.close()


@pytest.fixture
async def two_workers() -> AsyncIterator[tuple[FakeWorker, FakeWorker]]:
    """w1 owns ranks 0-3, w2 ranks 4-7 of group "g"."""
    workers = FakeWorker(a_record("w1", 0, 4)), FakeWorker(a_record("w2", 4, 4))
    yield workers
    await asyncio.gather(*(worker.kill() for worker in workers))


@pytest.fixture
async def one_worker() -> AsyncIterator[FakeWorker]:
    """w1 owns rank 0, the only one of its group."""
    worker = FakeWorker(a_record("w1", 0, 1, data_parallel_size=1))
    yield worker
    await worker.kill()


@pytest.fixture
async def sharing(shared_nats: NatsServer, request: pytest.FixtureRequest) -> Any:
    """Makes routers that share bookings in a group of this test's own over two workers of 4 ranks each."""
    group = request.node.name.replace("[", "-").replace("]", "")[:60]
    workers = [FakeWorker(a_record(f"w{i}", 4 * i, 4, dp_group=group)) for i in range(2)]
    routers: list[TestRouter] = []

    async def make(router_id: str) -> TestRouter:
        router = TestRouter(share_bookings=True, router_id=router_id, nats_url=shared_nats.url, dp_group=group)
        routers.append(router)
        for worker in workers:
            await router.join(worker)
        await eventually(lambda: router.parts.sharing.connected)
        return router

    make.workers = workers  # type: ignore[attr-defined]
    yield make
    for router in routers:
        await router.close()
    for worker in workers:
        await worker.kill()
