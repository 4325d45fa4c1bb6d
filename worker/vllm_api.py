"""Everything that is asked of vLLM's own modules. The only module that imports vLLM: import it late, it takes seconds.

Written against vLLM 0.32. What isn't public API there stands in this file alone: the engine's processes, the reset of a single
rank, and the shape of its statistics.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.transformers_utils.repo_utils import get_non_weight_snapshot_path
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.network_utils import get_ip
from vllm.utils.system_utils import kill_process_tree
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from rankway import logs
from rankway.errors import EngineFailed, InvalidField, Overloaded, RankwayError
from rankway.ranks import LocalRank
from rankway.worker.engine import EngineInfo, EngineRequest
from rankway.worker.vllm_flags import Assigned, DpConfig, DpFlags, Placement, placement
from rankway.worker.vllm_loads import RankLoads
from rankway.worker.vllm_sampling import sampling_arguments
from rankway.worker.vllm_stream import EventSource

log = logs.get("worker.vllm")

CPU_BLOCK_SIZE = 32
"""Tokens; vLLM's CPU attention takes multiples of 32, and its own default of 128 would cache only long prefixes."""
CPU_KV_SPACE_GIB = 1
ANY_PORT = "tcp://*:0"


@dataclass(frozen=True, slots=True)
class Configured:
    """vLLM's normalised configuration, and what it means to Rankway."""

    config: Any
    place: Placement
    lora_requests: dict[str, LoRARequest]

    @property
    def address(self) -> str:
        """Where the processes of a DP group find each other."""
        parallel = self.config.parallel_config
        return f"{parallel.data_parallel_master_ip}:{parallel.data_parallel_rpc_port}"


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is untyped here
    def error(self, message: str) -> NoReturn:
        raise InvalidField("engine flags", message, "vLLM doesn't take them")


def configure(model: str, argv: Sequence[str], assigned: Assigned) -> Configured:
    """Read vLLM's flags, add what Rankway needs, let vLLM normalise them, and read the window. Blocking.

    Raises:
        InvalidField: flags that vLLM refuses or would drop in silence.
        Mismatch: the worker's window is another one than vLLM's.
        EngineFailed: vLLM can't make a configuration of them.
    """
    parser = AsyncEngineArgs.add_cli_args(_Parser(prog="engine flags", add_help=False))
    parser.add_argument("--lora-modules", nargs="+", default=[], metavar="NAME=PATH")
    namespace = parser.parse_args(["--model", model, *argv])
    lora_requests = _lora_requests(namespace)
    flags = DpFlags(
        size=namespace.data_parallel_size,
        size_local=namespace.data_parallel_size_local,
        start_rank=namespace.data_parallel_start_rank,
        rank=namespace.data_parallel_rank,
        hybrid_lb=namespace.data_parallel_hybrid_lb,
    )
    if namespace.enable_prefix_caching is False:
        raise InvalidField("--enable-prefix-caching", False, "without prefix caching there is nothing to route by")
    namespace.enable_prefix_caching = True
    namespace.disable_log_stats = False
    _publish_events(namespace)
    if current_platform.is_cpu():
        _prepare_cpu(namespace)
    try:
        config = AsyncEngineArgs.from_cli_args(namespace).create_engine_config()
    except (ValueError, AssertionError, OSError) as error:
        raise EngineFailed(f"vLLM refuses its configuration: {error}") from error
    parallel = config.parallel_config
    place = placement(
        flags,
        DpConfig(
            size=parallel.data_parallel_size,
            size_local=parallel.data_parallel_size_local,
            rank=parallel.data_parallel_rank,
            hybrid_lb=parallel.data_parallel_hybrid_lb,
            external_lb=parallel.data_parallel_external_lb,
            is_moe=config.model_config.is_moe,
        ),
        assigned,
    )
    return Configured(config, place, lora_requests)


def _publish_events(namespace: argparse.Namespace) -> None:
    """KV events with replay, each socket on a port of the system's choice: no two ranks of a host can collide."""
    events = namespace.kv_events_config
    if events is None:
        events = vllm.config.KVEventsConfig()
    events.enable_kv_cache_events = True
    events.publisher = "zmq"
    events.endpoint = events.replay_endpoint = ANY_PORT
    namespace.kv_events_config = events
    if get_ip() in ("0.0.0.0", "::"):  # no route to anywhere: all is on this host
        os.environ["VLLM_HOST_IP"] = "127.0.0.1"


def _prepare_cpu(namespace: argparse.Namespace) -> None:
    """Defaults that let several ranks live on one machine without GPUs; the operator's flags and environment win."""
    if namespace.block_size is None:
        namespace.block_size = CPU_BLOCK_SIZE
    if namespace.kv_cache_memory_bytes is None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CPU_KV_SPACE_GIB))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // namespace.data_parallel_size)))


def _lora_requests(namespace: argparse.Namespace) -> dict[str, LoRARequest]:
    requests: dict[str, LoRARequest] = {}
    for module in namespace.lora_modules:
        name, separator, path = module.partition("=")
        if not (name and separator and path):
            raise InvalidField("--lora-modules", module, "must be name=path")
        requests[name] = LoRARequest(name, len(requests) + 1, path)
    if requests:
        namespace.enable_lora = True
    return requests


def launch(configured: Configured, loads: RankLoads, stepped: Callable[[LocalRank], None]) -> AsyncLLM:
    """Start the engine's processes and wait until they answer. Blocking; never on the event loop.

    Args:
        loads: takes the engine's reports.
        stepped: called on the event loop after each of a rank's steps, with its local rank.
    """
    first = configured.place.window.start_rank if configured.place.balancing != "independent" else 0

    class RankLogger(StatLoggerBase):  # type: ignore[misc]
        """vLLM makes one for each rank it manages, and tells the global rank."""

        def __init__(self, vllm_config: Any, engine_index: int = 0, *_args: Any, **_kwargs: Any) -> None:
            self._rank = LocalRank(engine_index - first)

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_args: Any, **_kwargs: Any) -> None:
            if iteration_stats is not None:
                times = [request.queued_time for request in iteration_stats.finished_requests]
                loads.iterated(self._rank, iteration_stats.num_preempted_reqs, times)
            if scheduler_stats is not None:
                loads.reported(
                    self._rank,
                    scheduler_stats.num_running_reqs,
                    scheduler_stats.num_waiting_reqs,
                    scheduler_stats.num_skipped_waiting_reqs,
                    scheduler_stats.kv_cache_usage,
                )
                stepped(self._rank)

        def log_engine_initialized(self) -> None:
            pass

    return AsyncLLM.from_vllm_config(configured.config, stat_loggers=[RankLogger])


def describe(configured: Configured, llm: AsyncLLM, name: str) -> EngineInfo:
    """What the started engine is. `name`: the model's canonical name."""
    config, place = configured.config, configured.place
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    # num_gpu_blocks is the sum over this process's engines; one block of each is vLLM's null block.
    engines = len(llm.engine_core.engine_ranks_managed)
    return EngineInfo(
        name="vllm",
        version=vllm.__version__,
        model=name,
        window=place.window,
        data_parallel_size=place.data_parallel_size,
        block_size=cache.effective_attention_block_size or cache.block_size,
        total_kv_blocks=cache.num_gpu_blocks // engines - 1,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        eos_token_ids=_eos_token_ids(model, llm),
        lora_adapters=tuple(configured.lora_requests),
        unsupported=frozenset({"guided_json"} if model.skip_tokenizer_init else ()),
        tokenizer_directory=_tokenizer_directory(model),
    )


def _eos_token_ids(model: Any, llm: AsyncLLM) -> tuple[int, ...]:
    """The ids that end a sequence: the tokenizer's, then those of the generation config."""
    found = model.try_get_generation_config().get("eos_token_id")
    ids = [found] if isinstance(found, int) else list(found or ())
    if llm.tokenizer is not None and llm.tokenizer.eos_token_id is not None:
        ids.insert(0, llm.tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ids))


def _tokenizer_directory(model: Any) -> str:
    """Where the tokenizer's files are on this machine: of a hub model, in the hub's cache."""
    if model.skip_tokenizer_init:
        return ""
    if Path(model.tokenizer).is_dir():
        return str(Path(model.tokenizer).resolve())
    return str(get_non_weight_snapshot_path(model.tokenizer, model.tokenizer_revision) or "")


def event_sources(llm: AsyncLLM) -> dict[int, EventSource]:
    """By vLLM's own number of the rank. Raises EngineFailed where this vLLM can't tell."""
    if not hasattr(llm, "get_kv_event_sources"):
        raise EngineFailed(f"vLLM {vllm.__version__} has no AsyncLLM.get_kv_event_sources: 0.32 or newer is needed")
    return {rank: EventSource(source.endpoint, source.replay_endpoint) for rank, source in llm.get_kv_event_sources().items()}


def generate(llm: AsyncLLM, request: EngineRequest, lora: LoRARequest | None) -> Any:
    """vLLM's stream of RequestOutput for a request: new tokens only, no text."""
    structured = request.sampling.guided_json
    params = SamplingParams(
        **sampling_arguments(request),
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(json=structured) if structured else None,
        skip_clone=True,
    )
    return llm.generate(
        tokens_input(request.tokens.tolist(), cache_salt=request.cache_salt or None),
        params,
        request.request_id,
        lora_request=lora,
        priority=request.priority,
        data_parallel_rank=request.local_rank,
    )


def to_error(error: Exception, cause: str) -> RankwayError:
    """What a request's exception means to its client. `cause`: why the engine died, where it has."""
    if isinstance(error, EngineDeadError):
        return EngineFailed(cause or "vLLM's engine died")
    if isinstance(error, GracefulHTTPError):
        return Overloaded(f"vLLM's queue: {error}")
    if isinstance(error, VLLMClientError | ValueError):
        return InvalidField(getattr(error, "parameter", None) or "request", getattr(error, "value", None), str(error))
    detail = error.__cause__ or error
    return EngineFailed(f"vLLM failed on the request: {type(detail).__name__}: {detail}")


async def reset_prefix_cache(llm: AsyncLLM, local_rank: int) -> bool:
    """Empty one rank's prefix cache. False: vLLM won't while requests use blocks. AsyncLLM itself offers all ranks only."""
    core = llm.engine_core
    return bool(await core._call_utility_async("reset_prefix_cache", False, False, engine=core.core_engines[local_rank]))


def dead_process(llm: AsyncLLM) -> str:
    """Which of the engine's processes has ended, in words; "": none."""
    manager = llm.engine_core.resources.engine_manager
    for process in getattr(manager, "processes", ()):
        if process.exitcode is not None:
            how = f"exit code {process.exitcode}" if process.exitcode >= 0 else f"signal {-process.exitcode}"
            return f"vLLM's process {process.name} (pid {process.pid}) ended with {how}"
    return "vLLM's engine died: the cause is in its log lines above" if llm.errored else ""


async def end_output_handler(llm: AsyncLLM) -> None:
    """End vLLM's reader of outputs before its engines: it would take their orderly end for a failure and log a traceback."""
    if llm.output_handler is not None:
        llm.output_handler.cancel()
        await asyncio.gather(llm.output_handler, return_exceptions=True)


def end_children() -> None:
    """Kill every process that this process's multiprocessing started, with what those started."""
    for child in multiprocessing.active_children():
        if child.pid is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                kill_process_tree(child.pid)
        child.join(timeout=1)
