"""A worker in this process, without NATS unless a test says so."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from harness.worker import FakeRegistry, LiveWorker, fake_registry, live_worker


@pytest.fixture
async def registry() -> AsyncIterator[tuple[FakeRegistry, str]]:
    """(a registry that admits everything, its endpoint)."""
    async with fake_registry() as pair:
        yield pair


@pytest.fixture
async def worker(registry: tuple[FakeRegistry, str]) -> AsyncIterator[LiveWorker]:
    """Worker "w1" of ranks 4-7; model "sim", byte-level tokenizer, steps that take no time."""
    async with live_worker(registry) as live:
        yield live


@pytest.fixture
async def slow_worker(registry: tuple[FakeRegistry, str]) -> AsyncIterator[LiveWorker]:
    """The same at 200 prompt tokens/s and 20 ms a decode step, two requests at once on a rank: time to do things to requests."""
    async with live_worker(
        registry, sim_speedup=1.0, sim_prefill_tokens_per_s=200.0, sim_decode_ms=20.0, max_num_seqs=2, size=1
    ) as live:
        yield live
