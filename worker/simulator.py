"""One simulated engine rank: vLLM's scheduler rules over a paged KV cache, and a timing model. Pure: time is an argument.

A step ends the batch that was running (its tokens come out) and starts the next one. The rules are those of vLLM's v1
scheduler: running requests first, then waiting ones by (priority, arrival) while there are places (max_num_seqs), tokens
(max_num_batched_tokens; a longer prompt is prefilled in chunks) and blocks; when a running request needs a block and none is
left, the one that matters least is preempted: it gives up its blocks and computes its tokens again later.

The same class serves behind `sim_engine` in real time, and in virtual time for studies with thousands of ranks.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from rankway.errors import InvalidField
from rankway.sampling import Sampling
from rankway.worker.engine import EngineEvent, EngineLoad, EngineOutput, Finish, Logprob
from rankway.worker.sim_cache import BlockChain, PagedCache
from rankway.worker.sim_tokens import TokenSource, Vocabulary


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Limits and speed of one rank. Raises InvalidField for one that could never serve its longest request."""

    block_size: int = 16
    total_blocks: int = 16_384
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    max_model_len: int = 131_072
    prefill_tokens_per_s: float = 20_000.0
    decode_ms: float = 10.0
    """Duration of a step in which requests decode, on top of the time of its prefill tokens."""
    speedup: float = 1.0
    """Divides every duration; `inf`: steps take no time."""

    def __post_init__(self) -> None:
        for name in ("block_size", "total_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise InvalidField(name, getattr(self, name), "must be at least 1")
        if self.total_blocks * self.block_size < self.max_model_len:
            room = self.total_blocks * self.block_size
            reason = f"{self.total_blocks} KV blocks of {self.block_size} tokens hold {room} only"
            raise InvalidField("max_model_len", self.max_model_len, reason)
        if not self.prefill_tokens_per_s > 0:
            raise InvalidField("prefill_tokens_per_s", self.prefill_tokens_per_s, "must be above 0")
        if not self.decode_ms >= 0:
            raise InvalidField("decode_ms", self.decode_ms, "must not be negative")
        if not self.speedup > 0:
            raise InvalidField("speedup", self.speedup, "must be above 0")


@dataclass(slots=True)
class SimRequest:
    """A request as the simulator sees it; `tokens` grows with the output."""

    request_id: str
    tokens: array[int]
    prompt_len: int
    sampling: Sampling
    lora: str = ""
    cache_salt: str = ""
    priority: int = 0
    index: int = 0


@dataclass(slots=True)
class StepResult:
    outputs: list[tuple[str, EngineOutput]] = field(default_factory=list)
    """(request_id, output), in the order of the batch."""
    events: Sequence[EngineEvent] = ()
    next_due: float | None = None
    """When the batch that has just started ends: the time of the next step. None: nothing to do."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """Scheduling state of a request."""

    request: SimRequest
    chain: BlockChain
    source: TokenSource
    order: tuple[int, int]
    """(priority, arrival): what matters least is largest."""
    arrived: float
    end: int
    """Number of tokens at which max_tokens or max_model_len is reached."""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is computed, those of the batch in flight included."""
    cached: int | None = None
    """Prompt tokens that the first scheduling found in the cache; None: never scheduled."""
    told_cached: bool = False
    live: bool = True
    """False once it finished or was aborted."""
    running: bool = False
    cacheable: bool = True
    """False once the cache was reset under the request: children of forgotten blocks are of no use to anybody."""

    def __lt__(self, other: _Sequence) -> bool:
        return self.order < other.order


class Simulator:
    """One rank. Call `step` when something was submitted and nothing is in flight, and then at each `next_due`."""

    def __init__(self, config: SimConfig, vocabulary: Vocabulary) -> None:
        self.config = config
        self.cache = PagedCache(config.total_blocks, config.block_size)
        self._vocabulary = vocabulary
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: list[_Sequence] = []  # a heap; aborted ones stay until they come up
        self._waiting_count = 0
        self._running: list[_Sequence] = []
        self._in_flight: list[_Sequence] = []
        self._due: float | None = None
        self._arrivals = 0
        self._preemptions = 0
        self._queue_times: list[float] = []

    @property
    def due(self) -> float | None:
        """When the batch in flight ends; None: none is in flight."""
        return self._due

    @property
    def idle(self) -> bool:
        return not self._sequences

    def submit(self, request: SimRequest, now: float) -> None:
        """Queue a request of at least one and fewer than max_model_len tokens.

        Raises:
            ValueError: the request_id is in use.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request_id={request.request_id!r} is in use")
        sampling = request.sampling
        limit = self.config.max_model_len
        self._arrivals += 1
        sequence = _Sequence(
            request=request,
            chain=BlockChain(request.tokens, self.config.block_size, request.lora, request.cache_salt),
            source=TokenSource(
                self._vocabulary,
                request.tokens,
                request.prompt_len,
                request.index if sampling.seed is None else sampling.seed,
            ),
            order=(request.priority, self._arrivals),
            arrived=now,
            end=limit if sampling.max_tokens is None else min(limit, request.prompt_len + sampling.max_tokens),
        )
        self._sequences[request.request_id] = sequence
        self._wait(sequence)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks at once; nothing of it comes out any more. False: unknown."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        sequence.live = False
        if sequence.running:
            self._leave(sequence)
        else:
            self._waiting_count -= 1
        return True

    def reset_prefix_cache(self) -> None:
        """Forget what is cached. Running requests keep their blocks, and cache no more of them."""
        for sequence in self._running:
            sequence.cacheable = False
        self.cache.reset()

    def step(self, now: float) -> StepResult:
        """End the batch in flight, start the next. `now` is not before `due`."""
        result = StepResult()
        for sequence in self._in_flight:
            if sequence.live and sequence.computed == len(sequence.request.tokens):
                result.outputs.append((sequence.request.request_id, self._sample(sequence)))
        self._in_flight = []
        prefill_tokens, decodes = self._schedule(now)
        self._due = None
        if self._in_flight:
            seconds = prefill_tokens / self.config.prefill_tokens_per_s + (self.config.decode_ms / 1000 if decodes else 0.0)
            self._due = now + seconds / self.config.speedup
        result.next_due = self._due
        result.events, self.cache.events = self.cache.events, []
        return result

    def load(self) -> EngineLoad:
        """The rank's load now; queue_time_ms covers the requests that left the queue since the last call."""
        queue_times, self._queue_times = self._queue_times, []
        return EngineLoad(
            running=len(self._running),
            waiting=self._waiting_count,
            used_blocks=self.cache.used_blocks,
            preemptions=self._preemptions,
            prefill_tokens=sum(
                len(s.request.tokens) - s.computed for s in self._sequences.values() if s.computed < s.request.prompt_len
            ),
            queue_time_ms=1000 * sum(queue_times) / len(queue_times) if queue_times else 0.0,
        )

    def queued(self) -> tuple[int, int]:
        """(waiting, running)."""
        return self._waiting_count, len(self._running)

    def _wait(self, sequence: _Sequence) -> None:
        heapq.heappush(self._waiting, sequence)
        self._waiting_count += 1

    def _sample(self, sequence: _Sequence) -> EngineOutput:
        """The sequence's next token, and what it means."""
        request, sampling = sequence.request, sequence.request.sampling
        generated = len(request.tokens) - request.prompt_len + 1
        past_minimum = generated > sampling.min_tokens
        may_end = past_minimum and not sampling.ignore_eos
        token = sequence.source.next(may_end)
        request.tokens.append(token)
        sequence.chain.extend(request.tokens)
        finish = None
        if (may_end and token == self._vocabulary.eos_token_id) or (past_minimum and token in sampling.stop_token_ids):
            finish = Finish.STOP
        elif len(request.tokens) >= sequence.end:
            finish = Finish.LENGTH
        logprobs: tuple[Logprob, ...] = ()
        if sampling.logprobs is not None:
            logprobs = (sequence.source.logprob(token, sampling.logprobs),)
        cached = None if sequence.told_cached else sequence.cached
        sequence.told_cached = True
        if finish is not None:
            self._finish(sequence)
        return EngineOutput((token,), logprobs, finish, cached)

    def _finish(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        sequence.live = False
        self._leave(sequence)

    def _leave(self, sequence: _Sequence) -> None:
        """Give up the place in the batch and the blocks."""
        sequence.running = False
        self._running.remove(sequence)
        self.cache.release(sequence.blocks)
        sequence.blocks = []

    def _schedule(self, now: float) -> tuple[int, int]:
        """Fill the next batch; returns (prefill tokens, decoding requests) in it."""
        budget = self.config.max_num_batched_tokens
        prefill_tokens = decodes = 0
        preempted = False
        for sequence in list(self._running):
            if budget == 0:
                break
            if not sequence.running:
                continue  # preempted for one before it
            new = min(len(sequence.request.tokens) - sequence.computed, budget)
            preempted |= self._make_room(sequence, new)
            if not sequence.running:
                continue  # nothing mattered less than itself
            decode = new == 1 and sequence.computed >= sequence.request.prompt_len
            self._grow(sequence, new)
            budget -= new
            decodes += decode
            prefill_tokens += 0 if decode else new
        if not preempted:
            prefill_tokens += self._admit(budget, now)
        return prefill_tokens, decodes

    def _make_room(self, sequence: _Sequence, new: int) -> bool:
        """Allocate the blocks for `new` tokens, preempting what matters least; True if anything was preempted."""
        fresh = self._blocks_for(sequence.computed + new) - len(sequence.blocks)
        if fresh <= 0:
            return False
        preempted = False
        while True:
            blocks = self.cache.allocate((), fresh)
            if blocks is not None:
                sequence.blocks += blocks
                return preempted
            least = max(self._running)
            preempted = True
            self._preempt(least)
            if least is sequence:
                return True

    def _preempt(self, sequence: _Sequence) -> None:
        self._leave(sequence)
        sequence.computed = 0
        self._preemptions += 1
        if sequence in self._in_flight:
            self._in_flight.remove(sequence)
        self._wait(sequence)

    def _admit(self, budget: int, now: float) -> int:
        """Start waiting requests while there is room; returns their prefill tokens in this batch."""
        tokens_in_batch = 0
        while self._waiting and budget > 0 and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            if not sequence.live:
                heapq.heappop(self._waiting)
                continue
            request = sequence.request
            # At least the last token is computed: its logits are wanted.
            hits = self.cache.match(sequence.chain.hashes, (len(request.tokens) - 1) // self.config.block_size)
            cached = len(hits) * self.config.block_size
            new = min(len(request.tokens) - cached, budget)
            fresh = self.cache.allocate(hits, self._blocks_for(cached + new) - len(hits))
            if fresh is None:
                break
            heapq.heappop(self._waiting)
            self._waiting_count -= 1
            sequence.blocks = hits + fresh
            sequence.computed = cached
            sequence.cacheable = True
            if sequence.cached is None:
                sequence.cached = cached
                self._queue_times.append(max(0.0, now - sequence.arrived))
            sequence.running = True
            self._running.append(sequence)
            self._grow(sequence, new)
            budget -= new
            tokens_in_batch += new
        return tokens_in_batch

    def _grow(self, sequence: _Sequence, new: int) -> None:
        """`new` tokens of the sequence are in the batch: its full blocks are cached from now on, as in vLLM."""
        before = sequence.computed // self.config.block_size
        sequence.computed += new
        full = sequence.computed // self.config.block_size
        if full > before and sequence.cacheable:
            self.cache.cache(sequence.blocks, sequence.chain, sequence.request.tokens, before, full)
        self._in_flight.append(sequence)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)
