"""What a handler gets of a connection: a request and the way to answer it; and what the connections of a server share.

Answers go straight to the transport: no task, queue or timer per request or per chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankway.router.http_connection import Connection

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes in bytes, times in seconds."""

    header_bytes: int = 32 * 2**10
    body_bytes: int = 16 * 2**20
    connections: int = 8192
    write_buffer_bytes: int = 2**20
    """Bytes of a stream that the client may leave unread; beyond, the request is cancelled."""
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    """Longest pause within a request's body."""
    idle_timeout_s: float = 75.0
    """Between requests."""
    write_timeout_s: float = 30.0
    """For the client to take the rest of a whole answer."""


@dataclass(slots=True)
class ServerState:
    """What the connections of one server share."""

    handle: Callable[[Exchange], None]
    limits: HttpLimits
    draining: bool = False
    now: float = 0.0
    """Event loop time, one second coarse."""
    date_header: bytes = b""
    connections: set[Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    all_closed: asyncio.Event = field(default_factory=asyncio.Event)
    accepted: int = 0
    refused_connections: int = 0
    malformed: int = 0
    slow_readers: int = 0
    client_gone: int = 0
    """Requests whose client left before the end of the answer."""

    def __post_init__(self) -> None:
        self.all_closed.set()


class Exchange:
    """A request and the way to answer it, once.

    Either `respond` or `whole_stream`, or `open_stream` and then `end_stream` or `break_off`.
    """

    __slots__ = (
        "_connection", "body", "chunked", "done", "headers", "keep_alive", "method", "on_gone", "path", "query",
        "socket", "started", "task", "write_raw",
    )  # fmt: skip

    def __init__(
        self, connection: Connection, method: str, target: bytes, headers: dict[bytes, bytes], body: bytes, *, http10: bool
    ) -> None:
        path, _, query = target.partition(b"?")
        self.method = method
        self.path = path.decode("latin-1")
        self.query = query.decode("latin-1")
        self.headers = headers
        """Names in lower case; of a repeated header the last."""
        self.body = body
        self.keep_alive = True
        self.started = False
        """Whether the head of the answer is written."""
        self.done = False
        self.on_gone: Callable[[], None] | None = None
        """Called once if the client leaves before the answer is complete; nothing may be written after that."""
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self.socket = connection.socket
        self.write_raw = connection.socket.write
        """Bytes to the socket as they are; no call of ours in between."""
        self.chunked = not http10
        """Whether a stream is framed as chunks."""

    def header(self, name: bytes) -> str:
        """A header's value, "" if it isn't there."""
        return self.headers.get(name, b"").decode("latin-1")

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the handler's slow part as a task; it is cancelled when the client leaves."""
        task = asyncio.get_running_loop().create_task(work)
        self.task = task
        tasks = self._connection.state.tasks
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def respond(
        self, status: int, body: bytes, content_type: bytes = b"application/json", headers: bytes = b"", *, close: bool = False
    ) -> None:
        """The whole answer. `headers`: complete further lines, each with its CR LF. `close`: the connection ends with it."""
        if self.done:
            return
        if close:
            self.keep_alive = False
        head = b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
            STATUS_LINES[status],
            content_type,
            len(body),
            self._common_headers(),
            headers,
        )
        self.started = self.done = True
        self.write_raw(head if self.method == "HEAD" else head + body)
        self._end()

    def stream_head(self, headers: bytes) -> bytes:
        """What a stream begins with: status 200 and `headers` (complete lines)."""
        framing = b"transfer-encoding: chunked\r\n" if self.chunked else b""
        return b"%b%b%b%b\r\n" % (STATUS_LINES[200], framing, self._common_headers(), headers)

    def open_stream(self, head: bytes, first: bytes) -> None:
        """The head (`stream_head`) and the first part, maybe empty, of a body of unknown length."""
        self.started = True
        self.write_raw(head + self._framed(first) if first else head)

    def stream_opened(self) -> None:
        """The head, and maybe more, was written straight to `socket`."""
        self.started = True

    def write(self, data: bytes) -> None:
        """The next part of a stream, not empty."""
        self.write_raw(self._framed(data))

    def end_stream(self, last: bytes) -> None:
        """The last part of a stream, and its regular end."""
        self.done = True
        self.write_raw(self._framed(last) + self._stream_end())
        self._end()

    def whole_stream(self, head: bytes, body: bytes) -> None:
        """A stream of one part, not empty."""
        self.started = self.done = True
        self.write_raw(head + self._framed(body) + self._stream_end())
        self._end()

    def break_off(self, last: bytes) -> None:
        """The last part of a stream that failed: the connection closes without the body's regular end."""
        self.done = True
        self.keep_alive = False
        self.write(last)
        self._end()

    def gone(self) -> None:
        """The client has left."""
        if self.done:
            return
        self.done = True
        if self.task is not None:
            self.task.cancel()
        if self.on_gone is not None:
            self.on_gone()

    def _end(self) -> None:
        self.on_gone = None
        self._connection.answered(self)

    def _framed(self, part: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(part), part) if self.chunked else part

    def _stream_end(self) -> bytes:
        return b"0\r\n\r\n" if self.chunked else b""

    def _common_headers(self) -> bytes:
        state = self._connection.state
        if state.draining:
            self.keep_alive = False
        return state.date_header if self.keep_alive else state.date_header + b"connection: close\r\n"
