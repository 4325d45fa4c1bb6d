"""A worker that does what a test says: the real Attach protocol over real gRPC, no engine."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from harness.fleet import a_record

from rankway.blocks import pack_tokens, unpack_tokens
from rankway.registry.records import Record, to_proto
from rankway.v1 import types_pb2, worker_pb2, worker_pb2_grpc

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


class Seen:
    """One Start that a worker has got, and the ways to answer it."""

    def __init__(self, start: worker_pb2.Start, outbox: asyncio.Queue[worker_pb2.AttachResponse | None]) -> None:
        self.start = start
        self.aborted = asyncio.Event()
        self._outbox = outbox

    @property
    def prompt(self) -> array[int]:
        return unpack_tokens(self.start.prompt)

    @property
    def resume(self) -> array[int]:
        return unpack_tokens(self.start.resume)

    def delta(
        self,
        tokens: Sequence[int] = (),
        text: str | None = None,
        *,
        index: int = 0,
        finish: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED,
        cached: int | None = None,
    ) -> None:
        """Send new tokens; their text is one letter each unless given."""
        spelled = "".join(letter(token) for token in tokens) if text is None else text
        message = worker_pb2.StepDelta(
            stream=self.start.stream, index=index, tokens=pack_tokens(list(tokens)), text=spelled, finish_reason=finish
        )
        if cached is not None:
            message.cached_tokens = cached
        self._send(message)

    def burst(self, tokens: Sequence[int], finish: types_pb2.FinishReason.ValueType) -> None:
        """One Step with a delta for each token, as when the worker had to wait before it could write."""
        deltas = [
            worker_pb2.StepDelta(stream=self.start.stream, tokens=pack_tokens([token]), text=letter(token)) for token in tokens
        ]
        deltas[-1].finish_reason = finish
        self._outbox.put_nowait(worker_pb2.AttachResponse(step=worker_pb2.Step(deltas=deltas)))

    def nonsense(self, **fields: Any) -> None:
        """A delta with what no worker means."""
        self._send(worker_pb2.StepDelta(stream=self.start.stream, **fields))

    def fail(self, code: grpc.StatusCode, text: str = "broken") -> None:
        error = worker_pb2.StreamError(code=code.value[0], message=text)
        self._send(worker_pb2.StepDelta(stream=self.start.stream, error=error))

    def _send(self, delta: worker_pb2.StepDelta) -> None:
        self._outbox.put_nowait(worker_pb2.AttachResponse(step=worker_pb2.Step(deltas=[delta])))


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Serves Attach. `on_start` answers by itself; without it the test answers what `next_start` returns."""

    def __init__(self, record: Record | None = None, on_start: Callable[[Seen], None] | None = None) -> None:
        self.record = record or a_record()
        self.on_start = on_start
        self.started: asyncio.Queue[Seen] = asyncio.Queue()
        self.seen: dict[int, Seen] = {}
        self.hellos: list[worker_pb2.Hello] = []
        self.attached = 0
        self.greeting = worker_pb2.AttachResponse(welcome=worker_pb2.Welcome(record=to_proto(self.record)))
        """What Hello is answered with."""
        self._server: grpc.aio.Server | None = None

    @property
    def serving(self) -> bool:
        return self._server is not None

    async def serve(self) -> Record:
        """Listen; returns the record with the endpoint in it."""
        port = await self._listen("127.0.0.1:0")
        self.record = replace(self.record, endpoint=f"127.0.0.1:{port}")
        return self.record

    async def serve_again(self) -> None:
        """Listen where it did before."""
        await self._listen(self.record.endpoint)

    async def _listen(self, address: str) -> int:
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)  # type: ignore[arg-type]
        port = self._server.add_insecure_port(address)
        await self._server.start()
        return port

    async def kill(self) -> None:
        """Gone at once: every stream breaks."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def next_start(self) -> Seen:
        return await asyncio.wait_for(self.started.get(), 5)

    async def Snapshot(self, request: worker_pb2.SnapshotRequest, context: Any) -> AsyncIterator[worker_pb2.SnapshotResponse]:
        """No rank holds anything."""
        yield worker_pb2.SnapshotResponse(epoch=self.record.epoch)

    async def Attach(
        self, requests: AsyncIterator[worker_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[worker_pb2.AttachResponse]:
        outbox: asyncio.Queue[worker_pb2.AttachResponse | None] = asyncio.Queue()
        self.attached += 1
        reading = asyncio.create_task(self._read(requests, outbox))
        try:
            while (message := await outbox.get()) is not None:
                yield message
        finally:
            self.attached -= 1
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(
        self, requests: AsyncIterator[worker_pb2.AttachRequest], outbox: asyncio.Queue[worker_pb2.AttachResponse | None]
    ) -> None:
        mine: list[Seen] = []
        try:
            async for request in requests:
                kind = request.WhichOneof("message")
                if kind == "hello":
                    self.hellos.append(request.hello)
                    outbox.put_nowait(self.greeting)
                elif kind == "start":
                    seen = Seen(request.start, outbox)
                    self.seen[request.start.stream] = seen
                    mine.append(seen)
                    if self.on_start is not None:
                        self.on_start(seen)
                    self.started.put_nowait(seen)
                else:
                    self.seen[request.abort.stream].aborted.set()
        finally:
            for seen in mine:
                seen.aborted.set()
            outbox.put_nowait(None)


def letter(token: int) -> str:
    """The text of a token: one character."""
    return chr(ord("a") + token % 26)


def next_token(tokens: Sequence[int]) -> int:
    """What a deterministic model generates after `tokens`, whoever computes it."""
    return (sum(tokens) * 31 + len(tokens)) % 500


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens of the deterministic model."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]
