"""Real vLLM engines in the test's process, and mirrors of what they say they hold."""

from __future__ import annotations

import asyncio
import os
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from harness.waiting import eventually

from rankway.blocks import root_hash, unpack_hashes
from rankway.native import hash_chain
from rankway.ranks import LocalRank
from rankway.sampling import Sampling
from rankway.worker.engine import BlockRemoved, EngineEvent, EngineInfo, EngineOutput, EngineRequest, Finish, Logprob
from rankway.worker.mirror import Mirror
from rankway.worker.vllm_engine import VllmEngine
from rankway.worker.vllm_flags import Assigned

MODEL_NAME = "tiny"

# One process a rank and no compilation: a start takes seconds.
QUICK_FLAGS = (
    "--enforce-eager",
    "--distributed-executor-backend=uni",
    "--block-size=32",
    "--max-model-len=1024",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=256",
)
QUICK_ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # what lets vLLM's CPU engine do without a worker process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

ONE_TOKEN = Sampling(max_tokens=1)

_ids = count()


@dataclass
class Sink:
    """An EngineSink with a mirror a rank."""

    mirrors: list[Mirror]
    events: list[tuple[int, EngineEvent]] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    steps: Counter[int] = field(default_factory=Counter)

    def kv_events(self, local_rank: LocalRank, events: Sequence[EngineEvent]) -> None:
        self.mirrors[local_rank].apply(events)
        self.events += [(local_rank, event) for event in events]

    def kv_lost(self, local_rank: LocalRank) -> None:
        self.mirrors[local_rank].clear()
        self.lost.append(local_rank)

    def stepped(self, local_rank: LocalRank) -> None:
        self.steps[local_rank] += 1

    def removed(self, local_rank: int) -> int:
        """Blocks that the rank said it evicted."""
        return sum(
            len(event.block_hashes) for rank, event in self.events if rank == local_rank and isinstance(event, BlockRemoved)
        )


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    cached: int | None = None
    finish: Finish | None = None
    error: Exception | None = None
    outputs: int = 0


@dataclass
class Live:
    """A started engine."""

    engine: VllmEngine
    sink: Sink
    info: EngineInfo
    running: asyncio.Task[None]

    def send(
        self,
        local_rank: int | None,
        tokens: Sequence[int],
        sampling: Sampling = ONE_TOKEN,
        *,
        lora: str = "",
        cache_salt: str = "",
        resume: Sequence[int] = (),
    ) -> tuple[str, Answer, asyncio.Event]:
        """(request id, its answer as it grows, set at its end)."""
        answer = Answer()
        ended = asyncio.Event()

        def emit(output: EngineOutput) -> None:
            answer.outputs += 1
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs
            answer.cached = output.cached_tokens if output.cached_tokens is not None else answer.cached
            answer.finish, answer.error = output.finish, output.error
            if output.finish or output.error:
                ended.set()

        request_id = f"request-{next(_ids)}"
        rank = None if local_rank is None else LocalRank(local_rank)
        prompt = array("I", [*tokens, *resume])
        self.engine.submit(EngineRequest(request_id, prompt, len(tokens), sampling, rank, emit, lora, cache_salt))
        return request_id, answer, ended

    async def ask(self, local_rank: int | None, tokens: Sequence[int], sampling: Sampling = ONE_TOKEN, **more: Any) -> Answer:
        """The whole answer to a request."""
        _, answer, ended = self.send(local_rank, tokens, sampling, **more)
        await asyncio.wait_for(ended.wait(), 60)
        return answer

    def chain(self, tokens: Sequence[int], lora: str = "", cache_salt: str = "") -> array[int]:
        """Canonical hashes of a prompt's full blocks."""
        return unpack_hashes(hash_chain(array("I", tokens), self.info.block_size, root_hash(self.info.model, lora, cache_salt)))

    def predicted(self, local_rank: int, tokens: Sequence[int], lora: str = "", cache_salt: str = "") -> int:
        """Tokens of a prompt that the rank has cached, by its mirror."""
        mirror = self.sink.mirrors[local_rank]
        chain = self.chain(tokens, lora, cache_salt)
        run = next((i for i, block in enumerate(chain) if block not in mirror), len(chain))
        return min(run, (len(tokens) - 1) // self.info.block_size) * self.info.block_size

    async def quiet(self) -> None:
        """Return once nothing runs and the event streams have said nothing for a while."""
        loop = asyncio.get_running_loop()
        last, since = -1, loop.time()

        def is_quiet() -> bool:
            nonlocal last, since
            if len(self.sink.events) != last or any(load.running or load.waiting for load in self.engine.loads()):
                last, since = len(self.sink.events), loop.time()
            return loop.time() - since > 0.25

        await eventually(is_quiet, timeout_s=30)


async def start(model: str, *flags: str, assigned: Assigned = Assigned()) -> Live:  # noqa: B008  # frozen
    """A started engine; the caller stops it."""
    engine = VllmEngine(model, MODEL_NAME, assigned, flags)
    sink = Sink([])
    # The window isn't known before the start: mirrors of more ranks than any test has.
    sink.mirrors = [Mirror(MODEL_NAME, 32) for _ in range(8)]
    info = await engine.start(sink)
    return Live(engine, sink, info, asyncio.create_task(engine.run()))


def watch_forks() -> list[str]:
    """Grows by a stack with every fork of this process that goes on in Python; vfork and exec (`Popen`, "spawn") isn't one."""
    forks: list[str] = []
    os.register_at_fork(before=lambda: forks.append("".join(traceback.format_stack())))
    return forks


def count_finished(finished: Counter[int], first: int = 0) -> Callable[[], None]:
    """Put a counter of finished requests by global rank in the place of vLLM's Prometheus logger; returns what undoes it.

    Two engines in one process would fight for the names of Prometheus' metrics.

    Args:
        first: global rank of the engines' rank 0, for engines that know of no other ranks.
    """
    from vllm.v1.metrics import loggers

    class FinishedCounter(loggers.AggregateStatLoggerBase):  # type: ignore[misc]
        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_args: Any, engine_idx: int = 0, **_kwargs: Any) -> None:
            if iteration_stats is not None:
                finished[first + engine_idx] += len(iteration_stats.finished_requests)

        def log_engine_initialized(self) -> None:
            pass

    original = loggers.PrometheusStatLogger
    loggers.PrometheusStatLogger = FinishedCounter

    def undo() -> None:
        loggers.PrometheusStatLogger = original

    return undo
