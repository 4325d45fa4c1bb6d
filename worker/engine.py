"""What an engine is to a worker: the one interface that vLLM and the simulator implement.

Everything here is called on the worker's event loop. Ranks are local: the worker maps them (`rankway.ranks.DpRange`).
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rankway.errors import RankwayError
from rankway.ranks import DpRange, LocalRank
from rankway.sampling import Sampling


class Finish(enum.Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is, known once it has started. Numbers are per rank."""

    name: str
    version: str
    model: str
    window: DpRange
    data_parallel_size: int
    block_size: int
    total_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    lora_adapters: tuple[str, ...] = ()
    unsupported: frozenset[str] = frozenset()
    """Names of `Sampling` fields that this engine refuses when set away from their default."""
    tokenizer_directory: str = ""
    """Where the model's tokenizer.json is; empty: the worker's --model directory, or no model and the byte-level tokenizer."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithms; `top` is best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)  # not frozen: one is made for every token, and frozen ones take twice as long
class EngineOutput:
    """What one engine step did for one request. After one with `finish` or `error`, nothing more comes."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[Logprob] = ()
    finish: Finish | None = None
    cached_tokens: int | None = None
    """Prompt tokens taken from the prefix cache; on the first output."""
    error: RankwayError | None = None


@dataclass(slots=True)
class EngineRequest:
    """One choice of one request, already checked against the engine's limits."""

    request_id: str
    tokens: array[int]
    """Prompt, then the tokens that another instance has generated already (uint32)."""
    prompt_len: int
    """How many of `tokens` are the client's prompt."""
    sampling: Sampling
    """As the client gave it, with max_tokens set: max_tokens and min_tokens count from the end of the client's prompt.
    `stop` strings and `n` are the worker's business, not the engine's."""
    local_rank: LocalRank | None
    """None: the engine balances inside its window."""
    emit: Callable[[EngineOutput], None]
    lora: str = ""
    cache_salt: str = ""
    priority: int = 0
    index: int = 0
    """Which of the request's n choices. With a seed, choice i has been given seed + i already."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that entered the prefix cache, as vLLM's event of that name tells it. Hashes are the engine's own, opaque."""

    block_hashes: Sequence[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: Sequence[int]
    """len(block_hashes) * block_size of them."""
    block_size: int
    lora_name: str | None = None
    extra_keys: Sequence[Sequence[object] | None] | None = None
    """For each block what else entered the engine's hash, untagged (LoRA name, multimodal ids, cache salt), or None."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: Sequence[int | bytes]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of one rank now."""

    running: int = 0
    waiting: int = 0
    deferred: int = 0
    used_blocks: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    queue_time_ms: float = 0.0


class EngineSink(Protocol):
    """Where an engine reports what happens on its ranks."""

    def kv_events(self, local_rank: LocalRank, events: Sequence[EngineEvent]) -> None:
        """The rank's events of one engine step, in order."""

    def kv_lost(self, local_rank: LocalRank) -> None:
        """Events of the rank are lost for good: what is known of its cache is void."""

    def stepped(self, local_rank: LocalRank) -> None:
        """The rank took a step: its load may have changed."""


class Engine(Protocol):
    async def start(self, sink: EngineSink) -> EngineInfo:
        """Return once the engine answers and every rank's event stream is attached.

        Raises:
            RankwayError: the engine can't start; the message is the cause.
        """

    async def run(self) -> None:
        """Serve until `stop`. Raises EngineFailed with the cause if the engine dies."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; never blocks. What goes wrong comes as an output with `error`."""

    def abort(self, request_id: str) -> None:
        """Stop a request within a step; no output of it comes after. Unknown ids are ignored."""

    def loads(self) -> Sequence[EngineLoad]:
        """One per local rank."""

    async def reset_prefix_cache(self, local_rank: LocalRank | None) -> Sequence[LocalRank]:
        """Empty the prefix cache of one rank or of all; returns the ranks where that was done. The worker announces the
        clear itself, an engine need not."""

    async def stop(self) -> None:
        """End the engine and everything that it started. Idempotent."""
