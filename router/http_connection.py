"""One HTTP/1.1 connection: httptools parses what comes, an `Exchange` writes what goes.

Requests on one connection are answered in order; while one runs, a few pipelined ones wait, and more end the connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

import httptools
import msgspec

from rankway.router.http_error import error_body
from rankway.router.http_exchange import STATUS_LINES, Exchange, ServerState
from rankway.router.steps import Socket

_LINGER_S = 3.0
_NEVER = float("inf")

MAX_PIPELINED = 16
"""Requests that may wait behind a running one."""


class Connection(asyncio.Protocol):
    """Parses requests and hands them over one at a time. The names without underscore are httptools' and asyncio's."""

    __slots__ = (
        "_body", "_body_bytes", "_closing", "_complete", "_current", "_fed_bytes", "_head_bytes", "_headers", "_in_body",
        "_last_request", "_parser", "_paused", "_refusal", "_target", "_transport", "_waiting", "deadline", "socket", "state",
    )  # fmt: skip

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self.deadline = _NEVER
        """Event loop time after which `expire` is called."""
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self.socket: Socket
        self._current: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._paused = False
        self._closing = False
        self._last_request = False
        self._refusal: tuple[int, str] | None = None
        self._in_body = False
        self._head_bytes = 0  # of the current head, as the parser told them; 0 outside of a head
        self._fed_bytes = 0  # of the current head; not those that came together with the end of another request
        self._complete = 0  # requests that the parser has seen the end of
        self._body_bytes = 0
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.socket = Socket.of(self._transport)
        state = self.state
        state.accepted += 1
        state.connections.add(self)
        state.all_closed.clear()
        self._transport.set_write_buffer_limits(high=state.limits.write_buffer_bytes)
        self.deadline = state.now + state.limits.header_timeout_s
        if len(state.connections) > state.limits.connections:
            state.refused_connections += 1
            self._refuse(503, f"there are {state.limits.connections} connections already")

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._leave()
        self.state.connections.discard(self)
        if not self.state.connections:
            self.state.all_closed.set()

    def data_received(self, data: bytes) -> None:
        if self._closing or self._last_request:
            return
        complete_before = self._complete
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay_with_http(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self.state.malformed += 1
            self._refusal = self._refusal or (400, f"malformed HTTP: {error}")
        if self._head_bytes and complete_before == self._complete:
            # All of the data was this head's. A header that never ends reaches no callback.
            self._fed_bytes += len(data)
            self._check_head_bytes(self._fed_bytes)
        if self._refusal is not None:
            self._refuse(*self._refusal)

    def eof_received(self) -> bool:
        return False  # a client that says no more is gone: HTTP clients don't half-close

    def pause_writing(self) -> None:
        self._paused = True
        if self._current is not None and not self._current.done:
            # A stream whose reader is a whole buffer behind. Not from here: we are inside its sink.
            self.state.slow_readers += 1
            asyncio.get_running_loop().call_soon(self.cut)
        else:
            self.deadline = self.state.now + self.state.limits.write_timeout_s

    def resume_writing(self) -> None:
        self._paused = False
        self._advance()

    # httptools

    def on_message_begin(self) -> None:
        self._head_bytes = 1
        self._fed_bytes = 0
        self._headers = {}
        self._body = []
        self._body_bytes = 0
        self._target = b""
        if self._current is None:
            self.deadline = self.state.now + self.state.limits.header_timeout_s

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._head_bytes += len(url)
        self._check_head_bytes(self._head_bytes)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        self._check_head_bytes(self._head_bytes)
        if self._refusal is None:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._head_bytes = 0
        limit = self.state.limits.body_bytes
        length = self._headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            self._refusal = self._refusal or (413, f"the body has {int(length)} bytes, the limit is {limit}")
        elif b"expect" in self._headers and self._headers[b"expect"].lower() == b"100-continue" and self._current is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._current is None:
            self.deadline = self.state.now + self.state.limits.body_timeout_s

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self.state.limits.body_bytes:
            self._refusal = self._refusal or (413, f"the body passes the limit of {self.state.limits.body_bytes} bytes")
            self._body = []
        if self._refusal is None:
            self._body.append(body)
        if self._current is None:
            self.deadline = self.state.now + self.state.limits.body_timeout_s

    def on_message_complete(self) -> None:
        self._complete += 1
        self._in_body = False
        parser = self._parser
        if self._refusal is not None or self._closing or parser.should_upgrade():
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        http10 = parser.get_http_version() == "1.0"
        method = parser.get_method().decode("latin-1")
        exchange = Exchange(self, method, self._target, self._headers, body, http10=http10)
        exchange.keep_alive = not http10 and parser.should_keep_alive()
        self._body = []
        self._waiting.append(exchange)
        held = sum(len(waiting.body) for waiting in self._waiting)
        if len(self._waiting) > MAX_PIPELINED or (len(self._waiting) > 1 and held > self.state.limits.body_bytes):
            self.state.malformed += 1
            self.cut()
            return
        self._advance()

    # for the exchange and the server

    def answered(self, exchange: Exchange) -> None:
        """The exchange is complete: close, or go on with the next."""
        self._current = None
        limits = self.state.limits
        if not exchange.keep_alive or self.state.draining:
            self._waiting.clear()
            self._close()
            return
        self.deadline = self.state.now + (limits.write_timeout_s if self._paused else limits.idle_timeout_s)
        if self._waiting:
            # Not from here: answers that come at once would nest.
            asyncio.get_running_loop().call_soon(self._advance)

    def close_if_idle(self) -> None:
        if self._current is None and not self._waiting:
            self._close()

    def expire(self) -> None:
        """The time limit has passed: a slow request is told so; a client that reads nothing is cut off."""
        if self._closing or self._transport.get_write_buffer_size():
            self.cut()
        elif self._head_bytes or self._in_body:
            self._refuse(408, "the request didn't arrive in time")
        else:
            self._close()

    def cut(self) -> None:
        """End the connection now; whatever runs on it is cancelled."""
        self._closing = True
        self._leave()
        self._transport.abort()

    def _leave(self) -> None:
        exchange, self._current = self._current, None
        self._waiting.clear()
        if exchange is not None and not exchange.done:
            self.state.client_gone += 1
            exchange.gone()

    def _advance(self) -> None:
        """Start the next request if none runs."""
        if self._current is None and self._waiting and not self._paused and not self._closing:
            exchange = self._waiting.popleft()
            self._current = exchange
            self.deadline = _NEVER
            self.state.handle(exchange)

    def _stay_with_http(self, rest: bytes) -> None:
        """The client offers another protocol after its request's head: read the request again as if it didn't."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refusal = (405, "this is no proxy")
            return
        headers = {name: value for name, value in self._headers.items() if name not in (b"upgrade", b"connection")}
        lines = [b"%b: %b\r\n" % header for header in headers.items()]
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, self._target, b"".join(lines), rest))

    def _check_head_bytes(self, seen: int) -> None:
        limit = self.state.limits.header_bytes
        if seen > limit:
            self._refusal = self._refusal or (431, f"the request's head passes the limit of {limit} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Answer a request that can't be handed over, and close. Behind a running one: no answer, the close says it."""
        if self._closing:
            return
        if self._current is not None or self._waiting:
            self._last_request = True
            for exchange in (self._current, *self._waiting):
                if exchange is not None:
                    exchange.keep_alive = False
            return
        body = msgspec.json.encode(error_body(status, message))
        head = b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n"
        self._transport.write(head % (STATUS_LINES[status], len(body), self.state.date_header) + body)
        # What the client still sends is read and thrown away for a while: closing on unread data resets the connection,
        # and the client would never see the answer.
        self._closing = True
        self.deadline = self.state.now + _LINGER_S
        self._transport.write_eof()

    def _close(self) -> None:
        self._closing = True
        self.deadline = self.state.now + self.state.limits.write_timeout_s
        self._transport.close()
