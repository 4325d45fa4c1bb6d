"""The calls of a gRPC server: those that are answered here, and those that are passed on to grpcio's own server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

import grpc.aio
from google.protobuf.message import Message

from rankway import logs, rpc
from rankway.errors import EngineFailed, InvalidField, Overloaded, RankwayError
from rankway.h2 import messages
from rankway.h2.headers import CONTENT_LENGTH, Headers
from rankway.h2.streams import Stream

if TYPE_CHECKING:
    from rankway.h2.server import GrpcServer

log = logs.get("grpc")

RELAY_QUEUE = 64
"""Messages of a relayed call that may wait on their way in; a client that sends more is cut off."""

_NOT_PASSED_ON = frozenset(
    ("content-type", CONTENT_LENGTH, "te", "user-agent", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding")
)


class Call:
    """A call, and the ways to answer it. `streams.Receiver` of its stream."""

    __slots__ = (
        "_held", "_reader", "_server", "_started", "_stream", "_woken",
        "deadline", "on_gone", "on_room", "opened", "over", "task",
    )  # fmt: skip

    def __init__(self, server: GrpcServer, stream: Stream, deadline: float | None) -> None:
        self.opened = asyncio.get_running_loop().time()
        """Event loop time."""
        self.deadline = deadline
        """Event loop time, None: no deadline."""
        self.on_gone: Callable[[], None] | None = None
        """Called once if the client leaves, or the call is abandoned, before the end."""
        self.on_room: Callable[[], None] | None = None
        """Called when what had to wait for the client has been sent, and after `wake`; not once the call is over."""
        self.over = False
        self.task: asyncio.Task[None] | None = None
        self._server = server
        self._stream = stream
        self._reader: messages.MessageReader | None = messages.MessageReader(rpc.MAX_MESSAGE_BYTES)
        self._held = 0
        self._started = False
        self._woken = False

    @property
    def clear(self) -> bool:
        """Whether nothing waits for the client to read; otherwise `on_room` will be called."""
        return self._stream.clear

    @property
    def unheard(self) -> bool:
        """Whether the client still owes the call's only message. How long a stream may be silent is its method's business."""
        return False

    def begin(self) -> None:
        """Send the headers, with the first message at the latest."""
        if not self._started:
            self._started = True
            self._stream.send_headers(messages.HEADERS)

    def send(self, framed: bytes, *, now: bool = False) -> None:
        """Send a message (`messages.framed`). `now`: not at the end of this turn of the event loop, for who sends last in it."""
        if not self._started:
            self.begin()
        self._stream.send(framed, now)

    def send_message(self, message: Message) -> None:
        """Send a message at the end of this turn of the event loop."""
        self.send(messages.framed(message.SerializeToString()))

    def wake(self) -> None:
        """There is more to send: `on_room` is called at the end of this turn, or when there is room again."""
        if not self._woken and self.clear:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._wake)

    def finish(self, error: RankwayError | None = None) -> None:
        """End the call. Idempotent."""
        self._end(messages.TRAILERS_OK if error is None else messages.trailers(error))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what takes longer than a moment; it is cancelled when the client leaves."""
        self.task = asyncio.create_task(self._guarded(work))
        self._server.tasks.add(self.task)
        self.task.add_done_callback(self._server.forget)
        # A client that leaves at once cancels the task before its first step, which would leave the work never awaited.
        self.task.add_done_callback(lambda _: work.close())

    def on_data(self, data: bytes, end: bool) -> None:
        if self._reader is None or self.over:
            return
        try:
            complete = self._reader.feed(data)
            self._came(len(data))
            self._take(complete, end)
            if self._reader is not None and not self.over:
                self._held = self._server.hold(self._held, self._reader.held)
        except RankwayError as error:
            self.abandon(error)
        except Exception:
            log.exception("call failed")
            self.abandon(EngineFailed("internal error"))

    def on_reset(self) -> None:
        if not self.over:
            self.over = True
            self._release()
            self._server.forget(self)
            self._leave()

    def on_unread(self) -> None:
        self.abandon(Overloaded("the client doesn't read its stream"))

    def on_flushed(self) -> None:
        if self.on_room is not None:
            self.on_room()

    def _wake(self) -> None:
        self._woken = False
        if self.on_room is not None and not self.over:
            self.on_room()

    def abandon(self, error: RankwayError) -> None:
        """End it early, with an error."""
        if not self.over:
            self._leave()
            self.finish(error)

    def _end(self, block: bytes) -> None:
        if self.over:
            return
        self.over = True
        self._release()
        self._server.forget(self)
        self._stream.end(block if self._started else messages.HEADERS + block)
        # They lead back here in a circle.
        self.on_gone = self.on_room = None

    def _came(self, size: int) -> None:
        """So many bytes have come: give the client room for as many."""
        self._stream.consumed(size)

    def _take(self, complete: list[bytes], end: bool) -> None:
        """Take in the messages that have come; `end`: the client sends no more. May raise RankwayError."""
        raise NotImplementedError

    def _release(self) -> None:
        if self._held:
            self._held = self._server.hold(self._held, 0)

    def _leave(self) -> None:
        if self.task is not None:
            self.task.cancel()
        if self.on_gone is not None:
            on_gone, self.on_gone = self.on_gone, None
            on_gone()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except RankwayError as error:
            self.finish(error)
        except Exception:
            log.exception("call failed")
            self.finish(EngineFailed("internal error"))


Method = Callable[[Call, bytes], None]
"""Called with the request's message. It must answer sooner or later and may raise RankwayError at once."""


class SingleCall(Call):
    """A call of a method with a single request message."""

    __slots__ = ("_method",)

    def __init__(self, server: GrpcServer, stream: Stream, method: Method, deadline: float | None) -> None:
        super().__init__(server, stream, deadline)
        self._method = method

    @property
    def unheard(self) -> bool:
        return self._reader is not None

    def _take(self, complete: list[bytes], end: bool) -> None:
        if complete:
            self._reader = None
            self._release()
            self._method(self, complete[0])
        elif end:
            raise InvalidField("message", "absent", "the call ended before its request message")


class Talk(Protocol):
    """What hears the client's side of a `StreamedCall`. Methods don't block; they may raise RankwayError, which ends the call."""

    def on_message(self, message: bytes) -> None:
        """The next message."""

    def on_end(self) -> None:
        """The client sends no more."""


StreamedMethod = Callable[[Call], Talk]
"""Called with each call of a method whose requests are a stream. It must finish the call sooner or later."""


class StreamedCall(Call):
    """A call with any number of request messages."""

    __slots__ = ("_talk",)

    def __init__(self, server: GrpcServer, stream: Stream, method: StreamedMethod, deadline: float | None) -> None:
        super().__init__(server, stream, deadline)
        self._talk = method(self)

    def _take(self, complete: list[bytes], end: bool) -> None:
        for message in complete:
            if self.over:
                return
            self._talk.on_message(message)
        if end and not self.over:
            self._talk.on_end()


class RelayedCall(Call):
    """A call that the inner server answers, message by message in both directions.

    While a message waits for the inner server, the client gets no room for more than what it may send at once; while one waits
    for the client, no more is taken from the inner server.
    """

    __slots__ = ("_flushed", "_owed", "_requests")

    def __init__(self, server: GrpcServer, stream: Stream, path: str, headers: Headers, deadline: float | None) -> None:
        super().__init__(server, stream, deadline)
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue(RELAY_QUEUE)
        self._owed = 0
        """Bytes of which the client hasn't heard that they were taken."""
        self._flushed = asyncio.Event()
        self.on_room = self._flushed.set
        self.spawn(self._relay(path, headers))

    def _came(self, size: int) -> None:
        self._owed += size

    def _take(self, complete: list[bytes], end: bool) -> None:
        try:
            for message in complete:
                self._requests.put_nowait(message)
            if end:
                self._requests.put_nowait(None)
        except asyncio.QueueFull:
            raise Overloaded(f"more than {RELAY_QUEUE} messages at once") from None
        self._pay()

    async def _relay(self, path: str, headers: Headers) -> None:
        passed_on = [(name, value) for name, value in headers if name[:1] != ":" and name not in _NOT_PASSED_ON]
        metadata = [pair for name, value in passed_on for pair in messages.metadata(name, value)]
        timeout_s = None if self.deadline is None else max(0.0, self.deadline - asyncio.get_running_loop().time())
        method: Any = self._server.inner.stream_stream(path)
        call = method(self._taken(), timeout=timeout_s, metadata=metadata)
        try:
            async for message in call:
                self._flushed.clear()
                self.send(messages.framed(message))
                if not self.clear:
                    await self._flushed.wait()
            self._end(messages.raw_trailers(0, "", list(await call.trailing_metadata() or ())))
        except grpc.aio.AioRpcError as error:
            trailing = list(error.trailing_metadata() or ())
            self._end(messages.raw_trailers(error.code().value[0], error.details() or "", trailing))
        finally:
            call.cancel()

    async def _taken(self) -> AsyncIterator[bytes]:
        while (message := await self._requests.get()) is not None:
            self._pay()
            yield message

    def _pay(self) -> None:
        if self._requests.empty():
            self._stream.consumed(self._owed)
            self._owed = 0


class Deaf:
    """Hears what comes on a stream that has been answered already."""

    def on_data(self, data: bytes, end: bool) -> None:
        pass

    def on_reset(self) -> None:
        pass

    def on_unread(self) -> None:
        pass

    def on_flushed(self) -> None:
        pass
