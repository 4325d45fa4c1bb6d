"""One request under way: the state between its attempts, and what happens with each of its deltas."""

from __future__ import annotations

import asyncio
import enum
from typing import Protocol

import grpc

from rankway.errors import DeadlineExceeded, EngineFailed, RankwayError, Unavailable, from_status
from rankway.router.admission import Entry
from rankway.router.attach import Link
from rankway.router.eligibility import Query
from rankway.router.ledger import Booking
from rankway.router.policy import Decision
from rankway.router.requests import Outcome, Routed, RouterRequest, Sink
from rankway.router.steps import Pipe, open_pipe
from rankway.router.targets import Place
from rankway.sampling import to_proto
from rankway.v1 import types_pb2, worker_pb2

TRY_ELSEWHERE = frozenset(
    code.value[0]
    for code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DATA_LOSS,
    )
)
"""Codes of a worker's StreamError that another worker may not share. The others are the request's own fault."""

ENGINE_BROKE = frozenset(code.value[0] for code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS))
"""Codes after which the worker is set aside for everybody for a moment."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}

_NEVER = 2**62


class Stage(enum.Enum):
    """Where a request is."""

    NEW = "new"
    WAITING = "waiting"
    SENT = "sent"
    ENDED = "ended"


class Owner(Protocol):
    """What a flight needs of its dispatcher."""

    def place(self, flight: Flight) -> bool:
        """Find a target and send the request there, or fail it. False: it has to wait."""

    def wait(self, flight: Flight, error: RankwayError) -> None:
        """Put it into the queue; when it can't wait, it fails with `error`."""

    def stop_waiting(self, flight: Flight) -> None: ...

    def release(self, booking: Booking) -> None: ...

    def answered(self, flight: Flight, cached_tokens: int | None) -> None:
        """The first delta of an attempt is there."""

    def grown(self, booking: Booking, output_blocks: int) -> None: ...

    def failed_at(self, flight: Flight, error: RankwayError, *, engine_broke: bool) -> bool:
        """An attempt has failed. Returns whether there may be another one."""

    def moves(self, flight: Flight) -> None:
        """There will be another attempt."""

    def ended(self, flight: Flight, error: RankwayError | None) -> None: ...


class Flight:
    """One request. It is the client's `Dispatch` and the link's `Receiver`.

    Generated tokens are only appended as bytes: they matter when the request has to move.
    """

    __slots__ = (
        "_owner", "_sink", "_start_sampling", "answered_once", "arrived", "attempts", "booking", "cached_tokens",
        "chars", "decision", "entry", "error", "failure", "fresh", "generated", "grow_at", "left", "link", "migrations",
        "pipe", "reasons", "request", "resumable", "resumed", "stage", "stream", "timer", "tried", "waiting_for",
    )  # fmt: skip

    def __init__(self, owner: Owner, request: RouterRequest, sink: Sink, now: float) -> None:
        self._owner = owner
        self._sink = sink
        self._start_sampling = to_proto(request.sampling)
        self.request = request
        self.arrived = now
        self.stage = Stage.NEW
        self.attempts = 0
        self.migrations = 0
        self.tried: tuple[Place, ...] = ()
        """Targets that have failed it."""
        self.generated = bytearray()
        """Output tokens so far, packed."""
        self.chars = 0
        """Code points of output text so far."""
        self.resumable = request.sampling.n == 1 and not request.sampling.guided_json
        self.reasons: list[types_pb2.FinishReason.ValueType] = [types_pb2.FINISH_REASON_UNSPECIFIED] * request.sampling.n
        self.left = request.sampling.n
        self.cached_tokens: int | None = None
        self.answered_once = False
        """Whether the client has had a delta."""
        self.fresh = True
        """Whether the attempt's first delta is still to come."""
        self.resumed = 0
        """Bytes of `generated` that the attempt began with."""
        self.grow_at = _NEVER
        self.link: Link | None = None
        self.stream = 0
        self.pipe: Pipe | None = None
        """Stands in at the link for what is plain; counts its characters itself."""
        self.booking: Booking | None = None
        self.decision: Decision | None = None
        self.entry: Entry[Flight] | None = None
        self.waiting_for: tuple[int, float] | None = None
        """(slot, blocks) of the full target that it waits for."""
        self.timer: asyncio.TimerHandle | None = None
        self.error: RankwayError | None = None
        """Why it waits."""
        self.failure: RankwayError | None = None
        """What its last attempt failed with."""

    @property
    def query(self) -> Query:
        """What it asks of its target."""
        request = self.request
        return Query(request.model, request.lora, request.dp_group, request.worker_id, request.dp_rank, self.tried)

    @property
    def tokens(self) -> bytes:
        """What the next attempt has to prefill: the prompt and the output so far."""
        return self.request.prompt + bytes(self.generated) if self.generated else self.request.prompt

    def place(self) -> bool:
        """Find a target and go there, or fail. False: it has to wait."""
        return self._owner.place(self)

    def cancel(self) -> None:
        """`Dispatch.cancel`."""
        if self.stage is not Stage.ENDED:
            self._leave_engine()
            self._end(None)

    def expire(self) -> None:
        """Its deadline has passed."""
        self.abandon(DeadlineExceeded(f"the request's deadline passed while it was {self.stage.value}"))

    def abandon(self, error: RankwayError) -> None:
        """End it with an error; the engine is told."""
        self._leave_engine()
        self.fail(error)

    def fail(self, error: RankwayError) -> None:
        """End it with an error."""
        if self.stage is not Stage.ENDED:
            self._end(error)
            self._sink.failed(error)

    def send(self, link: Link, decision: Decision, booking: Booking, timeout_ms: int) -> None:
        """Send it to a target that has been chosen and booked. Raises what `Link.start` raises; then nothing was sent."""
        request = self.request
        start = worker_pb2.Start(
            request_id=request.request_id,
            prompt=request.prompt,
            resume=bytes(self.generated),
            resume_chars=self.chars,
            sampling=self._start_sampling,
            dp_rank=decision.place.target.dp_rank,
            lora=request.lora,
            cache_salt=request.cache_salt,
            priority=request.priority,
            timeout_ms=timeout_ms,
        )
        self.stream = link.start(start, self)
        self.link, self.decision, self.booking = link, decision, booking
        self.stage = Stage.SENT
        self.attempts += 1
        self.fresh = True
        self.error = None
        self.resumed = len(self.generated)
        self._set_growth(decision.block_size)
        if not self.answered_once:
            self._sink.routed(Routed(decision.place.target, decision.overlap_blocks, decision.cost))
        if self.resumable:
            self._open_pipe()

    def on_delta(self, delta: worker_pb2.StepDelta) -> None:
        """`attach.Receiver.on_delta`: the path of every token."""
        if delta.HasField("error"):
            self._refused(delta.error)
            return
        if delta.index >= len(self.reasons) or len(delta.tokens) % 4:
            self._broken(delta)
            return
        self.generated += delta.tokens
        if self.resumable:
            self.chars += len(delta.text)
        self._sink.delta(delta)
        if self.fresh:  # the client first: the books can wait
            self._first(delta.cached_tokens if delta.HasField("cached_tokens") else None)
            if self.pipe is not None:
                self.pipe.begun = True
        if delta.finish_reason:
            self._choice_ended(delta.index, delta.finish_reason)
        elif len(self.generated) >= self.grow_at:
            self.grow()

    def on_lost(self, error: RankwayError) -> None:
        """`attach.Receiver.on_lost`."""
        if self.stage is Stage.SENT:
            self.link = None
            self._again(error, engine_broke=False)

    def on_first(self, cached_tokens: int | None) -> None:
        """The attempt's first delta has gone through the pipe."""
        self._first(cached_tokens)

    def on_end(self, reason: types_pb2.FinishReason.ValueType) -> None:
        """The last delta has gone through the pipe."""
        self._choice_ended(0, reason)

    def _first(self, cached_tokens: int | None) -> None:
        self.fresh = False
        self._owner.answered(self, cached_tokens)
        if not self.answered_once:
            self.answered_once = True
            self.cached_tokens = cached_tokens

    def _open_pipe(self) -> None:
        """Let plain deltas take the short way, where there is one."""
        events = self._sink.plain_events()
        if events is not None and self.link is not None:
            self.pipe = open_pipe(self, events)
            if self.pipe is not None:
                self.link.hand_over(self.stream, self.pipe)

    def _close_pipe(self) -> None:
        if self.pipe is not None:
            pipe, self.pipe = self.pipe, None
            pipe.closed = True
            self.chars += pipe.chars

    def _refused(self, error: worker_pb2.StreamError) -> None:
        if self.stage is not Stage.SENT:
            return
        if self.link is not None:
            self.link.forget(self.stream)
            self.link = None
        cause = from_status(_CODES.get(error.code, grpc.StatusCode.UNKNOWN), error.message)
        if error.code in TRY_ELSEWHERE:
            if self.decision is not None:
                self.tried = (*self.tried, self.decision.place)
            self._again(cause, engine_broke=error.code in ENGINE_BROKE)
        else:
            self._release()
            self.fail(cause)

    def _broken(self, delta: worker_pb2.StepDelta) -> None:
        """The worker says something that can't be: nothing it says about the request counts any more."""
        if self.stage is Stage.SENT and self.decision is not None:
            self._leave_engine()
            self.tried = (*self.tried, self.decision.place)
            what = f"a delta of choice {delta.index} of {len(self.reasons)} with {len(delta.tokens)} bytes of tokens"
            worker_id = self.decision.place.target.worker_id
            self._again(EngineFailed(f"worker {worker_id} sent {what}"), engine_broke=True)

    def _again(self, error: RankwayError, *, engine_broke: bool) -> None:
        """The attempt has failed: another target, if that can be done without the client noticing."""
        self._close_pipe()
        self._release()
        more = self._owner.failed_at(self, error, engine_broke=engine_broke)
        if self.answered_once and not self.resumable:
            why = "n > 1" if self.request.sampling.n > 1 else "guided_json"
            self.fail(Unavailable(f"{error.message}; a request with {why} can't be moved once its output has begun"))
        elif not more:
            self.fail(Unavailable(f"gave up after {self.attempts} attempts; the last: {error.message}"))
        else:
            self.stage = Stage.NEW
            self.failure = error
            self.migrations += self.answered_once
            self._owner.moves(self)
            if not self._owner.place(self):
                self._owner.wait(self, error)

    def _choice_ended(self, index: int, reason: types_pb2.FinishReason.ValueType) -> None:
        if self.stage is not Stage.SENT or index >= len(self.reasons) or self.reasons[index]:
            return
        self.reasons[index] = reason
        self.left -= 1
        if self.left == 0:
            if self.link is not None:
                self.link.forget(self.stream)
                self.link = None
            self.stage = Stage.ENDED  # whatever the sink does, the request can't be cancelled any more
            self._sink.finished(
                Outcome(
                    reasons=self.reasons,
                    prompt_tokens=self.request.prompt_tokens,
                    completion_tokens=len(self.generated) // 4,
                    cached_tokens=self.cached_tokens or 0,
                    migrations=self.migrations,
                )
            )
            self._end(None)

    def _set_growth(self, block_size: int) -> None:
        prompt_bytes = len(self.request.prompt)
        stride = 4 * block_size
        started = prompt_bytes + self.resumed
        self.grow_at = (started // stride + 1) * stride - prompt_bytes

    def grow(self) -> None:
        """The output has filled another block."""
        if self.booking is None or self.decision is None:
            return
        stride = 4 * self.decision.block_size
        prompt_bytes = len(self.request.prompt)
        blocks = (prompt_bytes + len(self.generated)) // stride
        self._owner.grown(self.booking, blocks - (prompt_bytes + self.resumed) // stride)
        self.grow_at = (blocks + 1) * stride - prompt_bytes
        if self.pipe is not None:
            self.pipe.grow_at = self.grow_at

    def _leave_engine(self) -> None:
        if self.link is not None:
            self.link.abort(self.stream)
            self.link = None

    def _release(self) -> None:
        if self.booking is not None:
            booking, self.booking = self.booking, None
            self._owner.release(booking)

    def _end(self, error: RankwayError | None) -> None:
        if self.stage is Stage.WAITING:
            self._owner.stop_waiting(self)
        self.stage = Stage.ENDED
        self._close_pipe()
        self._release()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self._owner.ended(self, error)
