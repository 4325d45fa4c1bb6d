"""The event stream of a real engine through a network that fails: vLLM's replay buffer of a few steps, and proxies before it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import pytest_asyncio
from harness.proxies import TcpProxy
from harness.vllm_engines import QUICK_FLAGS, Live, count_finished, start
from harness.waiting import eventually

from rankway.worker import vllm_stream
from rankway.worker.vllm_stream import EventSource, RankStream

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

BUFFER_STEPS = 100


@dataclass
class Proxied:
    live: Live
    proxies: tuple[TcpProxy, TcpProxy]
    """Before the publisher's live batches, and before its replays."""

    @property
    def stream(self) -> RankStream:
        return self.live.engine.caches.streams[0]


@pytest.fixture(scope="module")
def impatient() -> Iterator[None]:
    """A quiet stream soon asks for what it may have missed, and soon gives up a silent replay socket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_stream, "PROBE_S", 1.0)
        patch.setattr(vllm_stream, "REPLAY_TIMEOUT_S", 0.5)
        yield


def address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxied(tiny_model: str, impatient: None) -> AsyncIterator[Proxied]:
    from rankway.worker import vllm_api

    real = vllm_api.event_sources
    behind: list[EventSource] = []
    batches = TcpProxy(lambda: address(behind[0].endpoint))
    replays = TcpProxy(lambda: address(behind[0].replay_endpoint))
    await batches.start()
    await replays.start()

    def through_proxies(llm: Any) -> dict[int, EventSource]:
        ((rank, source),) = real(llm).items()
        behind.append(source)
        return {rank: EventSource(f"tcp://{batches.address}", f"tcp://{replays.address}")}

    undo = count_finished(Counter())
    small = f'--kv-events-config={{"buffer_steps": {BUFFER_STEPS}}}'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_api, "event_sources", through_proxies)
        live = await start(tiny_model, *QUICK_FLAGS, "--num-gpu-blocks-override=2048", small)
    yield Proxied(live, (batches, replays))
    await live.engine.stop()
    live.running.cancel()
    await asyncio.gather(live.running, return_exceptions=True)
    await batches.stop()
    await replays.stop()
    undo()


def prompt(seed: int, length: int = 100) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


async def test_a_gap_is_filled_by_replay(proxied: Proxied) -> None:
    """Batches that were published while the connection was down come by replay, in order; then live batches are read again."""
    live, stream, (to_batches, _) = proxied.live, proxied.stream, proxied.proxies
    await live.ask(0, prompt(1))
    await eventually(lambda: live.predicted(0, prompt(1)) == 96)
    replayed = stream.counts.replayed
    missed = range(2, 6)
    to_batches.sever()
    for seed in missed:
        await live.ask(0, prompt(seed))
    heard = stream.counts.batches
    to_batches.heal()
    fresh = count(1000)

    async def hears_live_batches_again() -> bool:
        await live.ask(0, prompt(next(fresh)))
        return stream.counts.batches > heard + 3

    await eventually(hears_live_batches_again)
    await live.quiet()
    assert all(live.predicted(0, prompt(seed)) == 96 for seed in (1, *missed))
    assert stream.counts.replayed >= replayed + len(missed)
    assert (stream.counts.losses, live.sink.lost) == (0, [])
    mirror = live.sink.mirrors[0]
    assert (mirror.counts.orphans, mirror.counts.unknown_removals, mirror.counts.malformed) == (0, 0, 0)


async def test_a_gap_that_replay_cannot_fill_ends_in_repair(proxied: Proxied) -> None:
    """If more is missed than the buffer keeps, the rank counts as empty even if it is silent from then on, and is reset."""
    live, stream, (to_batches, to_replays) = proxied.live, proxied.stream, proxied.proxies
    tokens = prompt(90, 300)
    await live.ask(0, tokens)
    await eventually(lambda: live.predicted(0, tokens) == 288)
    to_batches.sever()
    to_replays.sever()
    for seed in range(100, 100 + 2 * BUFFER_STEPS):
        await live.ask(0, prompt(seed))
    to_replays.heal()
    await eventually(lambda: live.sink.lost == [0])
    await eventually(lambda: not live.engine.caches.repairing)
    assert stream.counts.losses == 1
    assert len(live.sink.mirrors[0]) == 0
    to_batches.heal()
    assert (await live.ask(0, tokens)).cached == 0
    await eventually(lambda: live.predicted(0, tokens) == 288)
    assert (await live.ask(0, tokens)).cached == 288
    await live.quiet()
    assert live.sink.lost == [0]
    assert live.sink.mirrors[0].counts.unknown_removals == 0
