"""What vLLM's ranks hold in their prefix caches, told to the worker: event streams, resets, and the repair after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from rankway import logs
from rankway.errors import EngineFailed
from rankway.ranks import LocalRank
from rankway.worker.engine import AllBlocksCleared, EngineEvent, EngineSink
from rankway.worker.vllm_events import ClearFence
from rankway.worker.vllm_flags import Placement
from rankway.worker.vllm_stream import EventSource, RankStream

log = logs.get("worker.vllm")

RESET_RETRY_S = 0.5
"""Between two attempts to reset the cache of a rank whose events were lost: vLLM refuses while requests use blocks."""


class Caches:
    """The caches of one engine's ranks. `attach`, then `start`, and `close` in the end.

    Args:
        reset: empties one rank's cache; False where vLLM won't because blocks are in use.
    """

    def __init__(self, place: Placement, sink: EngineSink, reset: Callable[[LocalRank], Awaitable[bool]]) -> None:
        self._place = place
        self._sink = sink
        self._reset_rank = reset
        self._ranks = [LocalRank(rank) for rank in range(place.window.size)]
        self._fences = [ClearFence() for _ in self._ranks]
        self._resetting = asyncio.Lock()
        self._repairs: dict[LocalRank, asyncio.Task[None]] = {}
        self.streams: list[RankStream] = []
        """One a rank."""
        self.tasks: list[asyncio.Task[None]] = []
        """What reads the streams; one that ends has failed."""

    @property
    def repairing(self) -> bool:
        """Whether a rank still waits for its reset after a loss."""
        return bool(self._repairs)

    async def attach(self, sources: Mapping[int, EventSource]) -> None:
        """Connect every rank's stream. `sources`: by vLLM's own number of the rank.

        Raises:
            EngineFailed: a rank has no source, or its publisher doesn't answer.
        """
        for local_rank in self._ranks:
            dp_rank = self._place.window.to_global(local_rank)
            number = local_rank if self._place.balancing == "independent" else dp_rank
            if number not in sources:
                raise EngineFailed(f"vLLM names KV event sources for its ranks {sorted(sources)}, none for {number}")
            deliver = partial(self._deliver, local_rank)
            self.streams.append(RankStream(dp_rank, sources[number], deliver, partial(self._lost, local_rank)))
        await asyncio.gather(*(stream.attach() for stream in self.streams))

    def start(self) -> None:
        """Read the streams from now on."""
        self.tasks = [asyncio.create_task(stream.run()) for stream in self.streams]

    async def close(self) -> None:
        """End all tasks and close the streams. Idempotent."""
        tasks = [*self.tasks, *self._repairs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in self.streams:
            stream.close()

    async def reset(self, local_rank: LocalRank | None) -> Sequence[LocalRank]:
        """`Engine.reset_prefix_cache`."""
        ranks = self._ranks if local_rank is None else [local_rank]
        async with self._resetting:
            done = await self._reset(ranks)
            # Only after the caller has announced the clear, which it does at once.
            asyncio.get_running_loop().call_soon(self._release, ranks, done)
        return done

    def _deliver(self, local_rank: LocalRank, events: Sequence[EngineEvent]) -> None:
        if allowed := self._fences[local_rank].filter(events):
            self._sink.kv_events(local_rank, allowed)

    def _lost(self, local_rank: LocalRank, reason: str) -> None:
        dp_rank = self._place.window.to_global(local_rank)
        log.warning("KV events lost: the rank counts as empty until its cache is reset", dp_rank=dp_rank, reason=reason)
        self._sink.kv_lost(local_rank)
        if local_rank not in self._repairs:
            task = asyncio.create_task(self._repair(local_rank))
            self._repairs[local_rank] = task
            task.add_done_callback(lambda _task: self._repairs.pop(local_rank))

    async def _repair(self, local_rank: LocalRank) -> None:
        """Reset the rank's cache as soon as nothing uses it, so that what is known of it and what it holds agree again.

        Until then less is known than it holds, never more.
        """
        while True:
            async with self._resetting:
                done = await self._reset([local_rank])
                if done:
                    self._sink.kv_events(local_rank, [AllBlocksCleared()])
                self._release([local_rank], done)
            if done:
                log.info("prefix cache reset after lost events", dp_rank=self._place.window.to_global(local_rank))
                return
            await asyncio.sleep(RESET_RETRY_S)

    async def _reset(self, ranks: Sequence[LocalRank]) -> list[LocalRank]:
        """Empty the ranks' caches and keep their events back until `_release`; returns the ranks where vLLM did it."""
        for rank in ranks:
            self._fences[rank].hold()
        answers = await asyncio.gather(*map(self._reset_rank, ranks), return_exceptions=True)
        done = [rank for rank, answer in zip(ranks, answers, strict=True) if answer is True]
        for error in answers:
            if isinstance(error, BaseException):
                self._release(ranks, done)
                raise EngineFailed(f"vLLM couldn't reset its prefix cache: {type(error).__name__}: {error}") from error
        return done

    def _release(self, ranks: Sequence[LocalRank], done: Sequence[LocalRank]) -> None:
        for rank in ranks:
            if kept := self._fences[rank].release(cleared=rank in done):
                self._sink.kv_events(rank, kept)
