"""`Worker.Attach`: one stream per router, one message per engine step.

A session reads Start and Abort in one task and writes in another. Deltas go into the message that is being filled; the writer
takes it when the one before is on its way, so what one step of the engine (or one pass of the event loop) brings leaves together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio

from rankway import logs, sampling
from rankway.blocks import pack_tokens, unpack_tokens
from rankway.errors import EngineFailed, InvalidField, Mismatch, Overloaded, RankwayError
from rankway.tokenizer import Tokenizer
from rankway.v1 import registry_pb2, types_pb2, worker_pb2
from rankway.worker.engine import Finish, Logprob
from rankway.worker.requests import Order, Requests, Running

log = logs.get("attach")

HELLO_TIMEOUT_S = 10.0

MAX_PENDING_TOKENS = 262_144
"""Tokens that may wait for a router that doesn't read; beyond, it is cut off (its requests move to other targets)."""

Context = grpc.aio.ServicerContext[worker_pb2.AttachRequest, worker_pb2.AttachResponse]

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
    """The message under construction: the `Receiver` of a session's requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.filled = asyncio.Event()
        """Set while there is something to write."""
        self.overflowed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the router has fallen too far behind."""
        self.running: dict[int, Running] = {}
        """The session's requests by stream."""
        self._tokenizer = tokenizer
        self._message = worker_pb2.AttachResponse()
        self._deltas = self._message.step.deltas
        self._latest: dict[tuple[int, int], worker_pb2.StepDelta] = {}
        self._pending_tokens = 0

    def take(self) -> worker_pb2.AttachResponse:
        """The message, complete; a new one begins."""
        message = self._message
        self._message = worker_pb2.AttachResponse()
        self._deltas = self._message.step.deltas
        self._latest = {}
        self._pending_tokens = 0
        self.filled.clear()
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
            # The writer hasn't taken the choice's delta before: it grows.
            entry.tokens += packed
            entry.text += text
            if cached_tokens is not None:
                entry.cached_tokens = cached_tokens
        if logprobs:
            entry.logprobs.extend(logprobs_to_proto(logprobs, self._tokenizer))
        if finish is not None:
            entry.finish_reason = FINISH_REASONS[finish]
        self._pending_tokens += 1 + len(tokens)
        if self._pending_tokens > MAX_PENDING_TOKENS and not self.overflowed.done():
            self.overflowed.set_result(None)
        self.filled.set()

    def failed(self, stream: int, error: RankwayError) -> None:
        entry = self._deltas.add(stream=stream)
        entry.error.code = error.code.value[0]
        entry.error.message = error.message
        self.filled.set()

    def ended(self, stream: int) -> None:
        self.running.pop(stream, None)


class Session:
    """One Attach: a router's requests live and die with it."""

    def __init__(self, requests: Requests, record: registry_pb2.WorkerRecord) -> None:
        self._requests = requests
        self._record = record
        self._outbox = Outbox(requests.tokenizer)

    async def serve(self, context: Context) -> None:
        """Serve until the router ends its side.

        Raises:
            Mismatch: Hello names another epoch. InvalidField: no Hello. Overloaded: the router doesn't read.
        """
        router_id = await self._hello(context)
        await context.write(worker_pb2.AttachResponse(welcome=worker_pb2.Welcome(record=self._record)))
        log.info("router attached", router_id=router_id)
        tasks: list[asyncio.Task[None]] = [
            asyncio.create_task(self._read(context)),
            asyncio.create_task(self._write(context)),
        ]
        try:
            await asyncio.wait((*tasks, self._outbox.overflowed), return_when=asyncio.FIRST_COMPLETED)
            if self._outbox.overflowed.done():
                raise Overloaded(f"router {router_id} doesn't read its steps")
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            aborted = self._abort_all()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            log.info("router detached", router_id=router_id, aborted_requests=aborted)

    async def _hello(self, context: Context) -> str:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message = await context.read()
        except TimeoutError:
            raise InvalidField("hello", "nothing", f"no Hello within {HELLO_TIMEOUT_S:.0f} s") from None
        if not isinstance(message, worker_pb2.AttachRequest) or message.WhichOneof("message") != "hello":
            raise InvalidField("hello", "absent", "the first message of an Attach is Hello")
        if message.hello.epoch != self._record.epoch:
            raise Mismatch(f"epoch={message.hello.epoch}: this is worker {self._record.worker_id} of epoch {self._record.epoch}")
        return str(message.hello.router_id)

    async def _read(self, context: Context) -> None:
        while True:
            message = await context.read()
            if not isinstance(message, worker_pb2.AttachRequest):
                return  # the router has ended its side
            kind = message.WhichOneof("message")
            if kind == "start":
                self._start(message.start)
            elif kind == "abort":
                self._abort(message.abort.stream)
            else:
                raise InvalidField("message", kind, "only Start and Abort follow Hello")

    async def _write(self, context: Context) -> None:
        outbox = self._outbox
        while True:
            await outbox.filled.wait()
            await context.write(outbox.take())

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

    def _abort_all(self) -> int:
        alive = list(self._outbox.running.values())
        for running in alive:
            running.abort()
        return len(alive)


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
