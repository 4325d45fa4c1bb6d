"""The simulator as an engine: one task steps all local ranks in real time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import rankway
from rankway.ranks import DpRange, LocalRank
from rankway.worker.engine import EngineInfo, EngineLoad, EngineOutput, EngineRequest, EngineSink
from rankway.worker.sim_tokens import NO_EOS, Vocabulary
from rankway.worker.simulator import SimConfig, SimRequest, Simulator

_LATE_S = 0.05
"""A step that starts this much late still counts from when it was due, so that the mean rate holds."""


_EARLY_S = 0.001
"""A step that is due within this is taken now: the event loop's timers are no finer, and may fire early by half of it."""


class SimEngine:
    """`Engine` over one `Simulator` a rank.

    The simulator never ends a sequence by itself before max_tokens unless its vocabulary has an eos_probability.
    Sampling parameters that only shape probabilities (temperature, top_p, penalties, logit_bias …) change nothing.
    """

    def __init__(
        self,
        model: str,
        window: DpRange,
        data_parallel_size: int,
        config: SimConfig,
        vocabulary: Vocabulary,
        lora_adapters: Sequence[str] = (),
    ) -> None:
        self._ranks = [Simulator(config, vocabulary) for _ in range(window.size)]
        self._info = EngineInfo(
            name="sim",
            version=rankway.__version__,
            model=model,
            window=window,
            data_parallel_size=data_parallel_size,
            block_size=config.block_size,
            total_kv_blocks=config.total_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            vocab_size=vocabulary.vocab_size,
            eos_token_ids=() if vocabulary.eos_token_id == NO_EOS else (vocabulary.eos_token_id,),
            lora_adapters=tuple(lora_adapters),
            unsupported=frozenset({"guided_json"}),
        )
        self._requests: dict[str, tuple[int, Callable[[EngineOutput], None]]] = {}
        self._wake = asyncio.Event()
        self._stopping = False
        self._sink: EngineSink | None = None

    @property
    def ranks(self) -> Sequence[Simulator]:
        """For tests that compare what the caches hold with what the index says."""
        return self._ranks

    async def start(self, sink: EngineSink) -> EngineInfo:
        self._sink = sink
        return self._info

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping:
            self._wake.clear()
            now = loop.time()
            soon = now + _EARLY_S
            due = math.inf
            for local_rank, simulator in enumerate(self._ranks):
                if simulator.idle and simulator.due is None:
                    continue
                if simulator.due is None or simulator.due <= soon:
                    self._step(LocalRank(local_rank), now)
                if simulator.due is not None:
                    due = min(due, simulator.due)
            if due <= soon:
                await asyncio.sleep(0)
            else:
                await self._sleep_until(loop, due)

    def submit(self, request: EngineRequest) -> None:
        local_rank = self._balance() if request.local_rank is None else request.local_rank
        self._requests[request.request_id] = (local_rank, request.emit)
        simulated = SimRequest(
            request_id=request.request_id,
            tokens=request.tokens,
            prompt_len=request.prompt_len,
            sampling=request.sampling,
            lora=request.lora,
            cache_salt=request.cache_salt,
            priority=request.priority,
            index=request.index,
        )
        self._ranks[local_rank].submit(simulated, asyncio.get_running_loop().time())
        self._wake.set()

    def abort(self, request_id: str) -> None:
        entry = self._requests.pop(request_id, None)
        if entry is not None:
            local_rank, _ = entry
            self._ranks[local_rank].abort(request_id)
            self._report(LocalRank(local_rank))

    def loads(self) -> Sequence[EngineLoad]:
        return [simulator.load() for simulator in self._ranks]

    async def reset_prefix_cache(self, local_rank: LocalRank | None) -> Sequence[LocalRank]:
        chosen = [LocalRank(rank) for rank in range(len(self._ranks))] if local_rank is None else [local_rank]
        for rank in chosen:
            self._ranks[rank].reset_prefix_cache()
            # Told now: an idle rank takes no step that would tell it.
            self._tell_events(rank)
        return chosen

    async def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def _step(self, local_rank: LocalRank, now: float) -> None:
        simulator = self._ranks[local_rank]
        due = simulator.due
        result = simulator.step(due if due is not None and now - due < _LATE_S else now)
        if result.events and self._sink is not None:
            self._sink.kv_events(local_rank, result.events)
        for request_id, output in result.outputs:
            entry = self._requests.get(request_id)
            if entry is None:
                continue  # aborted by what an output before it led to
            if output.finish is not None:
                del self._requests[request_id]
            entry[1](output)
        self._report(local_rank)

    def _tell_events(self, local_rank: LocalRank) -> None:
        cache = self._ranks[local_rank].cache
        events, cache.events = cache.events, []
        if events and self._sink is not None:
            self._sink.kv_events(local_rank, events)

    def _report(self, local_rank: LocalRank) -> None:
        if self._sink is not None:
            self._sink.stepped(local_rank)

    def _balance(self) -> int:
        """The rank with the least queued, waiting ones weighing four times, as vLLM's own balancer has it."""
        queued = [simulator.queued() for simulator in self._ranks]
        return min(range(len(queued)), key=lambda rank: (4 * queued[rank][0] + queued[rank][1], rank))

    async def _sleep_until(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        """Until `due` or until something is submitted."""
        timer = loop.call_at(due, self._wake.set) if math.isfinite(due) else None
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()
