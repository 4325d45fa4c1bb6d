"""Workers with real vLLM engines whose services run in the test's process, so that vLLM's own counters can be read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from harness.vllm_engines import QUICK_FLAGS

from rankway import rpc
from rankway.ranks import DpRange
from rankway.v1 import generate_pb2_grpc, worker_pb2_grpc
from rankway.worker import service
from rankway.worker.settings import WorkerSettings

START_TIMEOUT_S = 150.0


class VllmService:
    """One worker as a task. `stop` ends it as SIGTERM does."""

    def __init__(self, flags: Sequence[str], **settings: Any) -> None:
        self.worker_id: str = settings["worker_id"]
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
        configured = WorkerSettings(engine="vllm", **settings)
        argv = [*QUICK_FLAGS, *flags]
        self.task = asyncio.create_task(service.run(configured, ready=self._ready.set_result, stop=self._stop, engine_argv=argv))

    async def wait_ready(self) -> VllmService:
        """Return once it serves; raises what it ended with before."""
        await asyncio.wait({self.task, self._ready}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            self.task.result()
        assert self._ready.done(), f"{self.worker_id} isn't ready after {START_TIMEOUT_S} s"
        self.channel = rpc.open_channel(self._ready.result()["grpc"])
        self.generation = generate_pb2_grpc.GenerationStub(self.channel)
        self.admin = worker_pb2_grpc.WorkerStub(self.channel)
        return self

    async def stop(self) -> BaseException | None:
        """Idempotent; returns what it ended with."""
        self._stop.set()
        await asyncio.wait({self.task})
        if self._ready.done():
            await self.channel.close()
        return None if self.task.cancelled() else self.task.exception()


class Group:
    """The workers of one DP group, each with its window."""

    def __init__(self, name: str, finished: Counter[int], forks: list[str]) -> None:
        self.name = name
        self.finished = finished
        """Finished requests by global rank, as vLLM counts them."""
        self.forks = forks
        """The stacks that forked this process."""
        self.workers: list[tuple[VllmService, DpRange]] = []

    def owner(self, dp_rank: int) -> VllmService:
        """The worker whose window has the rank."""
        return next(worker for worker, window in self.workers if dp_rank in window)

    async def stop(self) -> list[BaseException | None]:
        """Stop all at once; what each ended with."""
        return list(await asyncio.gather(*(worker.stop() for worker, _ in self.workers)))
