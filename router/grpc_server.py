"""The router's gRPC server: the calls of every request straight on the transport, all others relayed to grpcio's own server.

Generate, Route and Release are answered here, without a task or a queue per call. Whatever else a gRPC server has (health,
reflection, Explain) lives in an ordinary grpcio server on a loopback port of its own, to which those calls are passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import grpc
import grpc.aio

from rankway import logs, rpc
from rankway.errors import EngineFailed, InvalidField, Overloaded, RankwayError, Unavailable, Unsupported
from rankway.router import grpc_wire, header_blocks
from rankway.router.header_blocks import Headers
from rankway.router.http2 import CLOSE_S, HEADER_BYTES, Connection, Http2Limits, Http2State, Receiver, Stream

log = logs.get("grpc")

RELAY_QUEUE = 64
"""Messages of a relayed call that may wait on their way in; a client that sends more is cut off."""

HELD_BYTES = 512 * 2**20
"""What a server holds of request messages that aren't complete, of all calls together; beyond, the call that grows is refused."""

_NOT_PASSED_ON = frozenset(("content-type", "te", "user-agent", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding"))

Method = Callable[["Call", bytes], None]
"""Called with the request's message. It must answer sooner or later and may raise RankwayError at once."""


class Call:
    """One call of a method with a single request message, and the ways to answer it."""

    __slots__ = ("_held", "_method", "_reader", "_server", "_started", "_stream", "deadline", "on_gone", "over", "task")

    def __init__(self, server: GrpcServer, stream: Stream, method: Method, deadline: float | None) -> None:
        self.deadline = deadline
        """Event loop time, None: no deadline."""
        self.on_gone: Callable[[], None] | None = None
        """Called once if the client leaves before the end."""
        self.over = False
        self.task: asyncio.Task[None] | None = None
        self._server = server
        self._stream = stream
        self._method = method
        self._reader: grpc_wire.MessageReader | None = grpc_wire.MessageReader(rpc.MAX_MESSAGE_BYTES)
        self._held = 0
        self._started = False

    def send(self, framed: bytes) -> None:
        """Send a message (`grpc_wire.framed`)."""
        if not self._started:
            self._started = True
            self._stream.send_headers(grpc_wire.HEADERS)
        self._stream.send(framed)

    def finish(self, error: RankwayError | None = None) -> None:
        """End the call. Idempotent."""
        if self.over:
            return
        self.over = True
        self._release()
        self._server.forget(self)
        block = grpc_wire.TRAILERS_OK if error is None else grpc_wire.trailers(error)
        self._stream.end(block if self._started else grpc_wire.HEADERS + block)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what takes longer than a moment; it is cancelled when the client leaves."""
        self.task = asyncio.create_task(self._guarded(work))
        self._server.tasks.add(self.task)
        self.task.add_done_callback(self._server.forget)

    def on_data(self, data: bytes, end: bool) -> None:
        """`http2.Receiver`."""
        if self._reader is None or self.over:
            return
        try:
            messages = self._reader.feed(data)
            self._stream.consumed(len(data))
            if messages:
                self._reader = None
                self._release()
                self._method(self, messages[0])
            elif end:
                raise InvalidField("message", "absent", "the call ended before its request message")
            else:
                self._held = self._server.hold(self._held, self._reader.held)
        except RankwayError as error:
            self.finish(error)
        except Exception:
            log.exception("call failed")
            self.finish(EngineFailed("internal error"))

    def on_reset(self) -> None:
        """`http2.Receiver`."""
        if not self.over:
            self.over = True
            self._release()
            self._server.forget(self)
            self._leave()

    def on_unread(self) -> None:
        """`http2.Receiver`."""
        self.abandon(Overloaded("the client doesn't read its stream"))

    def abandon(self, error: RankwayError) -> None:
        """End it early, with an error."""
        if not self.over:
            self._leave()
            self.finish(error)

    def _release(self) -> None:
        if self._held:
            self._held = self._server.hold(self._held, 0)

    def _leave(self) -> None:
        if self.task is not None:
            self.task.cancel()
        if self.on_gone is not None:
            self.on_gone()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except RankwayError as error:
            self.finish(error)
        except Exception:
            log.exception("call failed")
            self.finish(EngineFailed("internal error"))


class RelayedCall:
    """A call that the inner server answers, message by message in both directions.

    While a message waits for the inner server, the client gets no room for more than what it may send at once.
    """

    def __init__(self, server: GrpcServer, stream: Stream, path: str, headers: Headers, deadline: float | None) -> None:
        self._server = server
        self._stream = stream
        self._reader = grpc_wire.MessageReader(rpc.MAX_MESSAGE_BYTES)
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue(RELAY_QUEUE)
        self._owed = 0
        """Bytes of which the client hasn't heard that they were taken."""
        self._held = 0
        self._started = False
        self._task = asyncio.create_task(self._guarded(path, headers, deadline))
        server.tasks.add(self._task)
        self._task.add_done_callback(self._ended)

    def on_data(self, data: bytes, end: bool) -> None:
        self._owed += len(data)
        try:
            for message in self._reader.feed(data):
                self._requests.put_nowait(message)
            if end:
                self._requests.put_nowait(None)
            self._held = self._server.hold(self._held, self._reader.held)
        except RankwayError as error:
            self._refuse(error)
        except asyncio.QueueFull:
            self._refuse(Overloaded(f"more than {RELAY_QUEUE} messages at once"))
        else:
            self._pay()

    def on_reset(self) -> None:
        self._task.cancel()

    def on_unread(self) -> None:
        self._refuse(Overloaded("the client doesn't read its stream"))

    async def _guarded(self, path: str, headers: Headers, deadline: float | None) -> None:
        try:
            await self._relay(path, headers, deadline)
        except grpc.aio.AioRpcError as error:
            trailing = list(error.trailing_metadata() or ())
            self._end(grpc_wire.raw_trailers(error.code().value[0], error.details() or "", trailing))
        except RankwayError as error:
            self._end(grpc_wire.trailers(error))
        except Exception:
            log.exception("relayed call failed", path=path)
            self._end(grpc_wire.trailers(EngineFailed("internal error")))

    async def _relay(self, path: str, headers: Headers, deadline: float | None) -> None:
        passed_on = [(name, value) for name, value in headers if name[:1] != ":" and name not in _NOT_PASSED_ON]
        metadata = [pair for name, value in passed_on for pair in grpc_wire.metadata(name, value)]
        timeout_s = None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
        method: Any = self._server.inner.stream_stream(path)
        call = method(self._taken(), timeout=timeout_s, metadata=metadata)
        try:
            async for message in call:
                self._begin()
                self._stream.send(grpc_wire.framed(message))
            trailing = list(await call.trailing_metadata() or ())
            self._end(grpc_wire.raw_trailers(0, "", trailing))
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

    def _begin(self) -> None:
        if not self._started:
            self._started = True
            self._stream.send_headers(grpc_wire.HEADERS)

    def _end(self, block: bytes) -> None:
        self._stream.end(block if self._started else grpc_wire.HEADERS + block)

    def _refuse(self, error: RankwayError) -> None:
        self._task.cancel()
        self._end(grpc_wire.trailers(error))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._held = self._server.hold(self._held, 0)
        self._server.forget(task)


class _Deaf:
    """Hears what comes on a stream that has been answered already."""

    def on_data(self, data: bytes, end: bool) -> None:
        pass

    def on_reset(self) -> None:
        pass

    def on_unread(self) -> None:
        pass


class GrpcServer:
    """Serves `methods` itself and passes everything else on to `inner`.

    Args:
        methods: by path, "/package.Service/Method".
        inner: channel to the inner server.
    """

    def __init__(self, methods: Mapping[str, Method], inner: grpc.aio.Channel, limits: Http2Limits) -> None:
        self.inner = inner
        self.calls: set[Call] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.state = Http2State(self._accept, limits, on_empty=self._look_whether_empty)
        self.held = 0
        """Bytes of request messages that aren't complete."""
        self._methods = methods
        self._server: asyncio.Server | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    async def start(self, listen: str, *, reuse_port: bool = False) -> int:
        """Listen on host:port (port 0: any free one) and return the port.

        Raises:
            OSError: the address can't be had.
        """
        host, _, port = listen.rpartition(":")
        try:
            self._server = await self._loop.create_server(
                lambda: Connection(self.state), host.strip("[]"), int(port), backlog=2048, reuse_port=reuse_port or None
            )
        except (OSError, ValueError) as error:
            raise OSError(f"can't listen on {listen}: {error}") from None
        self._keeper = asyncio.create_task(self._keep_alive(), name="grpc keepalive")
        return int(self._server.sockets[0].getsockname()[1])

    def drain(self) -> None:
        """Accept nothing new; connections close when their calls have ended."""
        if self._server is not None:
            self._server.close()
        self.state.draining = True
        for connection in list(self.state.connections):
            connection.drain()

    async def stop(self, grace_s: float) -> None:
        """Drain; after `grace_s` end what is left. Returns when no call, task and connection is left. Idempotent."""
        self.drain()
        if self.calls or self.tasks or self.state.connections:
            await self._ended(grace_s)
        for call in list(self.calls):
            call.abandon(Unavailable("the router has stopped"))
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for connection in list(self.state.connections):
            connection.cut()
        if self.state.connections:
            await self._ended(2 * CLOSE_S)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        if self._server is not None:
            await self._server.wait_closed()

    async def _ended(self, timeout_s: float) -> None:
        self._emptied = self._loop.create_future()
        await asyncio.wait([self._emptied], timeout=timeout_s)

    def forget(self, ended: Call | asyncio.Task[None]) -> None:
        """A call or a task has ended."""
        if isinstance(ended, Call):
            self.calls.discard(ended)
        else:
            self.tasks.discard(ended)
        self._look_whether_empty()

    def _look_whether_empty(self) -> None:
        if self._emptied is None or self._emptied.done():
            return
        if not self.calls and not self.tasks and not self.state.connections:
            self._emptied.set_result(None)

    def hold(self, before: int, now: int) -> int:
        """A call holds `now` bytes of an incomplete message instead of `before`; returns `now`.

        Raises:
            Overloaded: together with all others that is too much; `before` is still counted.
        """
        held = self.held + now - before
        if now > before and held > HELD_BYTES:
            raise Overloaded(f"{self.held} bytes of request messages are under way already")
        self.held = held
        return now

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self.state.limits.keepalive_s / 2)
            for connection in list(self.state.connections):
                connection.keep_alive()

    def _accept(self, stream: Stream, headers: Headers) -> Receiver:
        fields = dict(headers)
        if fields.get(":method") != "POST":
            return self._refuse(stream, 405)
        if not grpc_wire.is_grpc(fields.get("content-type", "")):
            return self._refuse(stream, 415)
        path = fields.get(":path", "")
        deadline = None
        try:
            _check_headers(headers, fields)
            if "grpc-timeout" in fields:
                deadline = self._loop.time() + grpc_wire.timeout_s(fields["grpc-timeout"])
        except RankwayError as error:
            stream.end(grpc_wire.HEADERS + grpc_wire.trailers(error))
            return _Deaf()
        method = self._methods.get(path)
        if method is None:
            return RelayedCall(self, stream, path, headers, deadline)
        call = Call(self, stream, method, deadline)
        self.calls.add(call)
        return call

    def _refuse(self, stream: Stream, http_status: int) -> Receiver:
        stream.end(grpc_wire.refusal(http_status))
        return _Deaf()


def _check_headers(headers: Headers, fields: Mapping[str, str]) -> None:
    if fields.get("grpc-encoding", "identity") != "identity":
        raise Unsupported("grpc-encoding", f"{fields['grpc-encoding'][:40]!r} isn't taken here, only identity")
    size = header_blocks.size(headers)
    if size > HEADER_BYTES:
        error = RankwayError(f"{size} bytes of headers, at most {HEADER_BYTES} are taken")
        error.code = grpc.StatusCode.RESOURCE_EXHAUSTED
        raise error
