"""A gRPC server whose frequent calls are answered straight on the transport; all others are relayed to grpcio's own server.

A call that is answered here needs no task and no queue. Whatever else a gRPC server has (health, reflection, rare methods) lives
in an ordinary grpcio server on a loopback port of its own, to which those calls are passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc
import grpc.aio

from rankway.errors import DeadlineExceeded, Overloaded, RankwayError, Unavailable, Unsupported
from rankway.h2 import messages
from rankway.h2.calls import Call, Deaf, Method, RelayedCall, SingleCall, StreamedCall, StreamedMethod
from rankway.h2.connection import CLOSE_S, HEADER_BYTES, Connection, Http2Limits, Http2State
from rankway.h2.headers import Headers
from rankway.h2.headers import size as headers_size
from rankway.h2.streams import Receiver, Stream

HELD_BYTES = 512 * 2**20
"""What a server holds of request messages that aren't complete, of all calls together; beyond, the call that grows is refused."""

MESSAGE_S = 60.0
"""How long a call may take to bring its request message; looked at twice every keepalive interval."""


class GrpcServer:
    """Answers the methods that `start` is given itself and passes everything else on.

    Args:
        inner: channel to the inner server.
    """

    def __init__(self, inner: grpc.aio.Channel, limits: Http2Limits) -> None:
        self.inner = inner
        self.calls: set[Call] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.state = Http2State(self._accept, limits, on_empty=self._look_whether_empty)
        self.held = 0
        """Bytes of request messages that aren't complete."""
        self._methods: Mapping[str, Method] = {}
        self._streamed: Mapping[str, StreamedMethod] = {}
        self._server: asyncio.Server | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    async def bind(self, listen: str, *, reuse_port: bool = False) -> int:
        """Take host:port (port 0: any free one) and return the port; connections are taken from `start` on.

        Raises:
            OSError: the address can't be had.
        """
        host, _, port = listen.rpartition(":")
        try:
            self._server = await self._loop.create_server(
                lambda: Connection(self.state),
                host.strip("[]"),
                int(port),
                backlog=2048,
                reuse_port=reuse_port or None,
                start_serving=False,
            )
        except (OSError, ValueError) as error:
            raise OSError(f"can't listen on {listen}: {error}") from None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self, methods: Mapping[str, Method], streamed: Mapping[str, StreamedMethod]) -> None:
        """Serve at the address that `bind` has taken.

        Args:
            methods: by path, "/package.Service/Method"; one request message each.
            streamed: likewise; a stream of request messages each.
        """
        self._methods, self._streamed = methods, streamed
        if self._server is not None:
            await self._server.start_serving()
            self._keeper = asyncio.create_task(self._keep_alive(), name="grpc keepalive")

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
            call.abandon(Unavailable("the server has stopped"))
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
            self.sweep()

    def sweep(self) -> None:
        """Twice every keepalive interval: ask silent clients whether they are there, end calls without a message."""
        for connection in list(self.state.connections):
            connection.keep_alive()
        now = self._loop.time()
        for call in [call for call in self.calls if call.unheard and now - call.opened > MESSAGE_S]:
            call.abandon(DeadlineExceeded(f"no request message within {MESSAGE_S:.0f} s"))

    def _accept(self, stream: Stream, headers: Headers) -> Receiver:
        fields = dict(headers)
        if fields.get(":method") != "POST":
            return self._refuse(stream, 405)
        if not messages.is_grpc(fields.get("content-type", "")):
            return self._refuse(stream, 415)
        path = fields.get(":path", "")
        deadline = None
        try:
            _check_headers(headers, fields)
            if "grpc-timeout" in fields:
                deadline = self._loop.time() + messages.timeout_s(fields["grpc-timeout"])
        except RankwayError as error:
            stream.end(messages.HEADERS + messages.trailers(error))
            return Deaf()
        call: Call
        if method := self._methods.get(path):
            call = SingleCall(self, stream, method, deadline)
        elif streamed := self._streamed.get(path):
            call = StreamedCall(self, stream, streamed, deadline)
        else:
            call = RelayedCall(self, stream, path, headers, deadline)
        self.calls.add(call)
        return call

    def _refuse(self, stream: Stream, http_status: int) -> Receiver:
        stream.end(messages.refusal(http_status))
        return Deaf()


def _check_headers(headers: Headers, fields: Mapping[str, str]) -> None:
    if fields.get("grpc-encoding", "identity") != "identity":
        raise Unsupported("grpc-encoding", f"{fields['grpc-encoding'][:40]!r} isn't taken here, only identity")
    size = headers_size(headers)
    if size > HEADER_BYTES:
        error = RankwayError(f"{size} bytes of headers, at most {HEADER_BYTES} are taken")
        error.code = grpc.StatusCode.RESOURCE_EXHAUSTED
        raise error
