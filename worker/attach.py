"""`Worker.Attach`: one stream per router, one message per engine step.

A session answers on the transport itself, without a task. Deltas go into the message that is being filled, which is sent at the
end of the turn of the event loop: what one step of the engine brings leaves together. While the router doesn't read, the message
grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rankway import logs, sampling
from rankway.blocks import pack_tokens, unpack_tokens
from rankway.errors import EngineFailed, InvalidField, Mismatch, Overloaded, RankwayError
from rankway.h2.calls import Call
from rankway.h2.messages import framed, parsed
from rankway.tokenizer import Tokenizer
from rankway.v1 import registry_pb2, types_pb2, worker_pb2
from rankway.worker.engine import Finish, Logprob
from rankway.worker.requests import Order, Requests, Running

log = logs.get("attach")

HELLO_TIMEOUT_S = 10.0

MAX_PENDING_TOKENS = 262_144
"""Tokens that may wait for a router that doesn't read; beyond, it is cut off (its requests move to other targets)."""

FINISH_REASONS = {
    Finish.STOP: types_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    Finish.ABORT: types_pb2.FINISH_REASON_ABORT,
}


def logprobs_to_proto(logprobs: Sequence[Logprob], tokenizer: Tokenizer) -> list[types_pb2.TokenLogprob]:
    token_bytes = tokenizer.token_bytes
    return [
        types_pb2.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            token=token_bytes(entry.token_id),
            top=[types_pb2.TopLogprob(token_id=id_, logprob=value, token=token_bytes(id_)) for id_, value in entry.top],
        )
        for entry in logprobs
    ]


class Outbox:
    """The message under construction: the `Receiver` of a session's requests.

    Args:
        filled: called whenever there is something more to send.
    """

    def __init__(self, tokenizer: Tokenizer, filled: Callable[[], None]) -> None:
        self.running: dict[int, Running] = {}
        """The session's requests by stream."""
        self.pending_tokens = 0
        """What has come since `take`, log probabilities counted like tokens, with one more for each delta or refusal."""
        self._tokenizer = tokenizer
        self._filled = filled
        self._message = worker_pb2.AttachResponse()
        self._deltas = self._message.step.deltas
        self._latest: dict[tuple[int, int], worker_pb2.StepDelta] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return len(self._deltas) > 0

    def take(self) -> bytes:
        """The message, complete; a new one begins."""
        message = self._message.SerializeToString()
        self._message = worker_pb2.AttachResponse()
        self._deltas = self._message.step.deltas
        self._latest = {}
        self.pending_tokens = 0
        return message

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
        packed = tokens[0].to_bytes(4, "little") if len(tokens) == 1 else pack_tokens(tokens)
        entry = self._latest.get((stream, index))
        if entry is None:
            entry = self._deltas.add(stream=stream, index=index, tokens=packed, text=text)
            self._latest[stream, index] = entry
            if cached_tokens is not None:
                entry.cached_tokens = cached_tokens
        else:
            # The choice's delta before hasn't been sent: it grows.
            entry.tokens += packed
            entry.text += text
            if cached_tokens is not None:
                entry.cached_tokens = cached_tokens
        if logprobs:
            entry.logprobs.extend(logprobs_to_proto(logprobs, self._tokenizer))
        if finish is not None:
            entry.finish_reason = FINISH_REASONS[finish]
        self.pending_tokens += 1 + len(tokens) + sum(len(logprob.top) + 1 for logprob in logprobs)
        self._filled()

    def failed(self, stream: int, error: RankwayError) -> None:
        entry = self._deltas.add(stream=stream)
        entry.error.code = error.code.value[0]
        entry.error.message = error.message
        self.pending_tokens += 1
        self._filled()

    def ended(self, stream: int) -> None:
        self.running.pop(stream, None)


class Session:
    """One Attach: a router's requests live and die with it. Ends when the router ends its side.

    The call ends with Mismatch when Hello names another epoch, with InvalidField without a Hello, with Overloaded when the router
    doesn't read.
    """

    def __init__(self, call: Call, requests: Requests, record: registry_pb2.WorkerRecord) -> None:
        self._call = call
        self._requests = requests
        self._record = record
        self._outbox = Outbox(requests.tokenizer, self._filled)
        self._router_id: str | None = None
        self._loop = asyncio.get_running_loop()
        self._hello_timer = self._loop.call_later(HELLO_TIMEOUT_S, self._no_hello)
        call.on_gone = self._detach
        call.on_room = self._write
        call.begin()

    def on_message(self, message: bytes) -> None:
        request = parsed(worker_pb2.AttachRequest, message)
        kind = request.WhichOneof("message")
        if self._router_id is None:
            self._greet(request)
        elif kind == "start":
            self._start(request.start)
        elif kind == "abort":
            self._abort(request.abort.stream)
        else:
            raise InvalidField("message", kind, "only Start and Abort follow Hello")

    def on_end(self) -> None:
        self._detach()
        self._call.finish()

    def _greet(self, request: worker_pb2.AttachRequest) -> None:
        if request.WhichOneof("message") != "hello":
            raise InvalidField("hello", "absent", "the first message of an Attach is Hello")
        hello = request.hello
        if hello.epoch != self._record.epoch:
            raise Mismatch(f"epoch={hello.epoch}: this is worker {self._record.worker_id} of epoch {self._record.epoch}")
        self._hello_timer.cancel()
        self._router_id = hello.router_id
        self._call.send_message(worker_pb2.AttachResponse(welcome=worker_pb2.Welcome(record=self._record)))
        log.info("router attached", router_id=self._router_id)

    def _no_hello(self) -> None:
        self._call.abandon(InvalidField("hello", "nothing", f"no Hello within {HELLO_TIMEOUT_S:.0f} s"))

    def _filled(self) -> None:
        self._call.wake()
        if self._outbox.pending_tokens > MAX_PENDING_TOKENS and not self._call.clear:
            # Not at once: requests can't be aborted in the middle of their delta.
            self._loop.call_soon(self._cut_off)

    def _write(self) -> None:
        if self._outbox:
            self._call.send(framed(self._outbox.take()), now=True)

    def _cut_off(self) -> None:
        self._call.abandon(Overloaded(f"router {self._router_id} doesn't read its steps"))

    def _start(self, start: worker_pb2.Start) -> None:
        try:
            if start.stream in self._outbox.running:
                raise InvalidField("stream", start.stream, "is in use")
            running = self._requests.start(order_from_start(start), self._outbox)
        except RankwayError as error:
            self._outbox.failed(start.stream, error)
        except Exception:
            # One bad request must not take the router's others with it.
            log.exception("start failed", request_id=start.request_id)
            self._outbox.failed(start.stream, EngineFailed("internal error in Start"))
        else:
            if running.alive:
                self._outbox.running[start.stream] = running

    def _abort(self, stream: int) -> None:
        running = self._outbox.running.get(stream)
        if running is not None:
            running.abort()

    def _detach(self) -> None:
        """The router has gone or is given up: nobody waits for its requests."""
        self._hello_timer.cancel()
        alive = list(self._outbox.running.values())
        for running in alive:
            running.abort()
        if self._router_id is not None:
            log.info("router detached", router_id=self._router_id, aborted_requests=len(alive))


def order_from_start(start: worker_pb2.Start) -> Order:
    """Raises InvalidField: packed tokens of a length that is no multiple of 4, or a sampling value out of its range."""
    try:
        prompt, resume = unpack_tokens(start.prompt), unpack_tokens(start.resume)
    except ValueError as error:
        raise InvalidField("prompt", f"{len(start.prompt)} bytes", str(error)) from None
    return Order(
        stream=start.stream,
        request_id=start.request_id,
        prompt=prompt,
        sampling=sampling.from_proto(start.sampling),
        dp_rank=start.dp_rank if start.HasField("dp_rank") else None,
        lora=start.lora,
        cache_salt=start.cache_salt,
        priority=start.priority,
        resume=resume,
        resume_chars=start.resume_chars,
        timeout_s=start.timeout_ms / 1000 if start.timeout_ms else None,
    )
