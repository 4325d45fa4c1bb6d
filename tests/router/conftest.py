"""A router without registry, indexer and NATS: members are told to it, workers are fakes over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from harness.fake_worker import FakeWorker
from harness.fleet import a_record
from harness.router import TestRouter
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
