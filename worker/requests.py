"""The requests that run on this worker, whoever sent them: start, deltas, abort, timeout, end.

This is the path of every token: nothing here makes a task, a log line or a metric call per token.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from rankway import logs
from rankway.errors import DeadlineExceeded, InvalidField, Overloaded, RankwayError, Unavailable
from rankway.ranks import GlobalRank
from rankway.sampling import Sampling
from rankway.tokenizer import Tokenizer
from rankway.worker.engine import Engine, EngineOutput, EngineRequest, Finish, Logprob
from rankway.worker.intake import Limits
from rankway.worker.text import OutputText

log = logs.get("requests")

MAX_SEED = 2**63 - 1


class Receiver(Protocol):
    """Who gets a request's output. Methods must neither raise nor block."""

    def delta(
        self,
        stream: int,
        index: int,
        tokens: Sequence[int],
        text: str,
        logprobs: Sequence[Logprob],
        finish: Finish | None,
        cached_tokens: int | None,
    ) -> None:
        """New output of choice `index`; `finish` on its last. `cached_tokens` on its first."""

    def failed(self, stream: int, error: RankwayError) -> None:
        """The request ended badly; nothing more comes of any choice."""

    def ended(self, stream: int) -> None:
        """The request is over, in whatever way: the last call, after the last delta or `failed`, or after an abort."""


@dataclass(slots=True)
class Order:
    """A request as it arrives. `stream` is its receiver's name for it."""

    stream: int
    request_id: str
    prompt: array[int]
    sampling: Sampling
    dp_rank: int | None = None
    lora: str = ""
    cache_salt: str = ""
    priority: int = 0
    resume: array[int] = field(default_factory=lambda: array("I"))
    """Output tokens that another instance has generated."""
    resume_chars: int = 0
    timeout_s: float | None = None
    default_max_tokens: int | None = 16
    """Where the client gave no max_tokens; None: all that fits."""


@dataclass(slots=True)
class RankCounts:
    """What requests did on one rank since the start."""

    requests: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0
    """Requests beyond `max_requests`."""
    running: int = 0


class Requests:
    """All running requests of the worker. Everything happens on its event loop.

    Args:
        max_requests: most requests at once, running and waiting in the engine: its own queue has no bound.
    """

    def __init__(self, engine: Engine, limits: Limits, tokenizer: Tokenizer, max_requests: int) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.engine = engine
        self.counts: dict[GlobalRank | None, RankCounts] = {None: RankCounts()}
        """By global rank; None: requests that the engine balanced."""
        self.counts.update({rank: RankCounts() for rank in limits.info.window.ranks()})
        self.draining = False
        self.draining_ranks: set[GlobalRank] = set()
        self._max_requests = max_requests
        self._running: set[Running] = set()
        self._serial = itertools.count(1)
        self._dead = ""
        self._idle_waiters: list[asyncio.Future[None]] = []

    def start(self, order: Order, receiver: Receiver) -> Running:
        """Check a request and hand it to the engine.

        Raises:
            RankwayError: the request is refused (see `Limits`), the worker is full, it or the rank drains, or the engine is
                dead. The engine is untouched.
        """
        if self._dead:
            raise Unavailable(self._dead)
        if self.draining:
            raise Unavailable(f"worker {self.limits.worker_id} is draining")
        rank = self._rank_of(order)
        if len(self._running) >= self._max_requests:
            self.counts[rank].refused += 1
            raise Overloaded(f"worker {self.limits.worker_id} has max_requests={self._max_requests} requests")
        self.limits.check_prompt(order.prompt)
        self.limits.check_lora(order.lora)
        order.sampling = self.limits.check_sampling(order.sampling, len(order.prompt), order.default_max_tokens)
        self._check_resume(order)
        running = Running(self, order, receiver, self.counts[rank])
        self._running.add(running)
        try:
            running.submit(next(self._serial))
        except BaseException:
            running.abort()
            raise
        return running

    def count(self, dp_rank: GlobalRank | None = None) -> int:
        """Running requests, of one rank or of all."""
        return len(self._running) if dp_rank is None else self.counts[dp_rank].running

    async def idle(self) -> None:
        """Return once nothing runs."""
        while self._running:
            waiter = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(waiter)
            await waiter

    def close(self, reason: str) -> None:
        """End every running request with UNAVAILABLE, and refuse every later one so. Idempotent: the first reason stays."""
        self._dead = self._dead or reason
        for running in list(self._running):
            running.fail(Unavailable(self._dead))

    def ended(self, running: Running) -> None:
        self._running.discard(running)
        if not self._running:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle_waiters.clear()

    def _rank_of(self, order: Order) -> GlobalRank | None:
        """The rank that the request is for; None: the engine balances."""
        window = self.limits.info.window
        if order.dp_rank is not None:
            self.limits.local_rank(order.dp_rank)
            rank = GlobalRank(order.dp_rank)
            if rank in self.draining_ranks:
                raise Unavailable(f"dp_rank {rank} of worker {self.limits.worker_id} is draining")
            return rank
        if not self.draining_ranks:
            log.info("no dp_rank: the engine balances inside the window", request_id=order.request_id, window=str(window))
            return None
        # The engine knows nothing of draining ranks: the worker balances in its place.
        open_ranks = [rank for rank in window.ranks() if rank not in self.draining_ranks]
        if not open_ranks:
            raise Unavailable(f"every rank of worker {self.limits.worker_id} is draining")
        order.dp_rank = rank = min(open_ranks, key=lambda rank: self.counts[rank].running)
        log.info("no dp_rank and ranks that drain: the worker balances", request_id=order.request_id, dp_rank=rank)
        return rank

    def _check_resume(self, order: Order) -> None:
        if not order.resume:
            if order.resume_chars:
                raise InvalidField("resume_chars", order.resume_chars, "there are no resume tokens")
            return
        if order.sampling.n != 1:
            raise InvalidField("resume", len(order.resume), f"a request of n={order.sampling.n} choices can't be resumed")
        if max(order.resume) >= self.limits.info.vocab_size:
            raise InvalidField("resume", max(order.resume), f"token ids are 0 … {self.limits.info.vocab_size - 1}")


class Running:
    """One running request: its choices, its timeout, its end."""

    __slots__ = ("_choices", "_counts", "_left", "_order", "_receiver", "_requests", "_timer")

    def __init__(self, requests: Requests, order: Order, receiver: Receiver, counts: RankCounts) -> None:
        self._requests = requests
        self._order = order
        self._receiver = receiver
        self._counts = counts
        self._choices: list[_Choice] = []
        self._left = order.sampling.n
        self._timer: asyncio.TimerHandle | None = None

    @property
    def alive(self) -> bool:
        return self._left > 0

    def submit(self, serial: int) -> None:
        """Hand every choice to the engine."""
        order = self._order
        self._counts.requests += 1
        self._counts.running += 1
        self._counts.prompt_tokens += len(order.prompt)
        if order.timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(order.timeout_s, self._expire)
        self._choices = [self._choice(index, serial) for index in range(order.sampling.n)]
        for choice in self._choices:
            if self._left and not (order.resume and choice.resume(order.resume, order.sampling)):
                self._requests.engine.submit(self._engine_request(choice))

    def abort(self) -> None:
        """Nobody waits for it any more: the engine drops it, the receiver hears nothing more of it. Idempotent."""
        if self._left:
            self._counts.aborted += 1
            self._stop()

    def fail(self, error: RankwayError) -> None:
        """End it with an error. Idempotent."""
        if self._left:
            self._counts.failed += 1
            self._stop(error)

    def choice_ended(self) -> None:
        self._left -= 1
        if not self._left:
            self._end()

    def _expire(self) -> None:
        self.fail(DeadlineExceeded(f"request {self._order.request_id}: its time of {self._order.timeout_s:.3f} s has passed"))

    def _stop(self, error: RankwayError | None = None) -> None:
        for choice in self._choices:
            choice.abort()
        self._left = 0
        if error is not None:
            self._receiver.failed(self._order.stream, error)
        self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._counts.running -= 1
        self._requests.ended(self)
        self._receiver.ended(self._order.stream)

    def _choice(self, index: int, serial: int) -> _Choice:
        order, requests = self._order, self._requests
        text = OutputText(requests.tokenizer.stream(), order.sampling.stop, order.sampling.min_tokens, order.resume_chars)
        deliver = partial(self._receiver.delta, order.stream, index)
        return _Choice(self, f"{order.request_id}.{serial}.{index}", index, text, deliver, self._counts, len(order.prompt))

    def _engine_request(self, choice: _Choice) -> EngineRequest:
        order, sampling = self._order, self._order.sampling
        if sampling.n > 1:
            seed = None if sampling.seed is None else min(sampling.seed + choice.index, MAX_SEED)
            sampling = sampling.changed(n=1, seed=seed)
        return EngineRequest(
            request_id=choice.engine_id,
            tokens=order.prompt + order.resume,
            prompt_len=len(order.prompt),
            sampling=sampling,
            local_rank=None if order.dp_rank is None else self._requests.limits.local_rank(order.dp_rank),
            emit=choice.emit,
            lora=order.lora,
            cache_salt=order.cache_salt,
            priority=order.priority,
            index=choice.index,
        )

    def abort_choice(self, choice: _Choice) -> None:
        """The engine need not go on with a choice."""
        self._requests.engine.abort(choice.engine_id)


class _Choice:
    """One of a request's n choices. `deliver` is the receiver's `delta` with stream and index filled in."""

    __slots__ = ("_counts", "_deliver", "_done", "_prompt_len", "_running", "_text", "engine_id", "index")

    def __init__(
        self,
        running: Running,
        engine_id: str,
        index: int,
        text: OutputText,
        deliver: Callable[..., None],
        counts: RankCounts,
        prompt_len: int,
    ) -> None:
        self.engine_id = engine_id
        self.index = index
        self._running = running
        self._text = text
        self._deliver = deliver
        self._counts = counts
        self._prompt_len = prompt_len
        self._done = False

    def resume(self, tokens: array[int], sampling: Sampling) -> bool:
        """Take in the output made elsewhere; True if that was all of it (the choice is ended then)."""
        text, _, stopped = self._text.push(tokens)
        finish = None
        if stopped:
            finish = Finish.STOP
        elif len(tokens) >= (sampling.max_tokens or 0):
            finish = Finish.LENGTH
            text += self._text.finish()
        if text or finish is not None:
            self._deliver((), text, (), finish, None)
        if finish is None:
            return False
        self._done = True
        self._running.choice_ended()
        return True

    def abort(self) -> None:
        if not self._done:
            self._done = True
            self._running.abort_choice(self)

    def emit(self, output: EngineOutput) -> None:
        """What an engine step did for this choice."""
        if self._done:
            return
        if output.error is not None:
            self._done = True
            self._running.fail(output.error)
            return
        tokens, logprobs, finish = output.tokens, output.logprobs, output.finish
        # The token that stopped it (end of sequence, a stop token) is one of the tokens, but not of the text.
        text, count, stopped = self._text.push(tokens[:-1] if finish is Finish.STOP else tokens)
        if stopped:
            tokens, logprobs = tokens[:count], logprobs[:count]
            if finish is None:
                self.abort()
            finish = Finish.STOP
        elif finish is not None:
            text += self._text.finish()
        self._counts.output_tokens += len(tokens)
        cached = output.cached_tokens
        if cached is not None:
            # A resumed request may find generated tokens in the cache too.
            cached = min(cached, self._prompt_len)
            self._counts.cached_tokens += cached
        self._deliver(tokens, text, logprobs, finish, cached)
        if finish is not None:
            self._done = True
            self._running.choice_ended()
