"""One bidirectional gRPC call on a connection of its own, straight on an asyncio transport: the client's side of Attach.

Why not grpc.aio: reading a message there takes a task switch and a wake-up across threads, 100 µs and more when messages come
one by one, and a router reads one per engine step of every rank. Here a message is a frame cut out of what the socket gave.
"""

from __future__ import annotations

import asyncio
import struct
import urllib.parse
from collections import deque
from collections.abc import Callable
from typing import cast

import grpc
import hpack
from hpack.exceptions import HPACKError

from rankway.errors import RankwayError
from rankway.router import http2
from rankway.router.grpc_wire import MessageReader, framed
from rankway.rpc import MAX_MESSAGE_BYTES

_FRAME = struct.Struct(">HBBBI")
_SETTING = struct.Struct(">HI")
_STREAM = 1
_WINDOW = 16 * 2**20
"""Bytes that the server may send before it hears of their arrival, on the stream and on the connection."""
_MAX_HEADER_BLOCK = 64 * 2**10
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}

KEEPALIVE_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0


class CallFailed(Exception):
    """The call ended, or couldn't begin; the message is why."""


class BidiCall(asyncio.Protocol):
    """The call. Made by `open`; ends by itself when the connection or the server's side of the stream does.

    Args:
        path: /package.Service/Method.
        authority: the server, host:port.
        on_message: called with each message, as it comes, until `close`. It must not raise.
    """

    def __init__(self, path: str, authority: str, on_message: Callable[[bytes], None]) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the call ended."""
        self.waiting: deque[memoryview] = deque()
        """Messages, or the rest of one, that the server gives no room for."""
        self._path = path
        self._authority = authority
        self._on_message = on_message
        self._transport: asyncio.Transport
        self._buffer = b""
        self._messages = MessageReader(MAX_MESSAGE_BYTES)
        self._headers = hpack.Decoder(max_header_list_size=_MAX_HEADER_BLOCK)
        self._block: bytearray | None = None
        self._block_ends_stream = False
        self._connection_room = http2.DEFAULT_WINDOW
        self._stream_room = http2.DEFAULT_WINDOW
        self._initial_room = http2.DEFAULT_WINDOW
        self._frame_bytes = http2.FRAME_BYTES
        self._paused = False
        self._unacknowledged = 0
        self._keepalive: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, endpoint: str, path: str, on_message: Callable[[bytes], None]) -> BidiCall:
        """Connect to host:port and begin the call. Raises CallFailed."""
        host, _, port = endpoint.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            _, call = await loop.create_connection(lambda: cls(path, endpoint, on_message), host.strip("[]"), int(port))
        except (OSError, ValueError) as error:
            raise CallFailed(f"can't connect to {endpoint}: {error}") from None
        return call

    def send(self, message: bytes) -> None:
        """Send a message; never blocks. What the server has no room for is in `waiting`."""
        if not self.ended.done():
            self.waiting.append(memoryview(framed(message)))
            self._flush()

    def close(self, reason: str = "closed") -> None:
        """Cancel the call and close the connection; `on_message` is called no more."""
        if not self.ended.done():
            self._write_frame(http2.RST_STREAM, 0, _STREAM, struct.pack(">I", http2.CANCEL))
            self._end(reason)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(http2.PREFACE)
        self._write_frame(http2.SETTINGS, 0, 0, _SETTING.pack(http2.INITIAL_WINDOW_SIZE, _WINDOW))
        self._write_frame(http2.WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW - http2.DEFAULT_WINDOW))
        block = hpack.Encoder().encode(
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", self._path),
                (":authority", self._authority),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "rankway"),
            ]
        )
        self._write_frame(http2.HEADERS, http2.END_HEADERS, _STREAM, block)
        self._keepalive = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._ping)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"connection lost: {error}" if error else "the server closed the connection")

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        at, size = 0, len(buffer)
        try:
            while size - at >= 9 and not self.ended.done():
                high, low, kind, flags, stream_id = _FRAME.unpack_from(buffer, at)
                begin = at + 9
                end = begin + (high << 8 | low)
                if end - begin > http2.FRAME_BYTES:
                    raise CallFailed(f"a frame of {end - begin} bytes")
                if end > size:
                    break
                at = end
                self._on_frame(kind, flags, stream_id & 0x7FFF_FFFF, buffer[begin:end])
        except (CallFailed, RankwayError, HPACKError, struct.error, IndexError) as error:
            self._end(f"broken protocol: {error}")
        self._buffer = buffer[at:]

    # Frames

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == http2.DATA:
            self._on_data(flags, payload)
        elif kind == http2.HEADERS:
            self._block = bytearray(_unpadded_headers(flags, payload))
            self._block_ends_stream = bool(flags & http2.END_STREAM)
            self._on_block(flags)
        elif kind == http2.CONTINUATION:
            if self._block is None or len(self._block) > _MAX_HEADER_BLOCK:
                raise CallFailed("a header block out of place or without end")
            self._block += payload
            self._on_block(flags)
        elif kind == http2.WINDOW_UPDATE:
            (more,) = struct.unpack(">I", payload)
            if stream_id:
                self._stream_room += more & 0x7FFF_FFFF
            else:
                self._connection_room += more & 0x7FFF_FFFF
            self._flush()
        elif kind == http2.SETTINGS and not flags & http2.ACK:
            self._on_settings(payload)
        elif kind == http2.PING:
            self._on_ping(flags, payload)
        elif kind == http2.RST_STREAM:
            self._end(f"the server reset the stream, HTTP/2 code {struct.unpack('>I', payload)[0]}")
        elif kind == http2.GOAWAY:
            last, code = struct.unpack(">II", payload[:8])
            if code or last & 0x7FFF_FFFF < _STREAM:
                reason = payload[8:].decode("utf-8", "replace")[:200]
                self._end(f"the server sent GOAWAY, HTTP/2 code {code} {reason}".rstrip())

    def _on_data(self, flags: int, payload: bytes) -> None:
        self._unacknowledged += len(payload)
        if self._unacknowledged > _WINDOW // 4:
            more = struct.pack(">I", self._unacknowledged)
            self._write_frame(http2.WINDOW_UPDATE, 0, 0, more)
            self._write_frame(http2.WINDOW_UPDATE, 0, _STREAM, more)
            self._unacknowledged = 0
        if flags & http2.PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        for message in self._messages.feed(payload):
            self._on_message(message)
            if self.ended.done():
                return
        if flags & http2.END_STREAM:
            self._end("the server ended the stream without a status")

    def _on_block(self, flags: int) -> None:
        if not flags & http2.END_HEADERS or self._block is None:
            return
        headers = {str(name): str(value) for name, value in self._headers.decode(bytes(self._block))}
        self._block = None
        if "grpc-status" in headers:
            status = headers["grpc-status"]
            name = _CODES.get(int(status), status) if status.isdigit() else status
            message = urllib.parse.unquote(headers.get("grpc-message", ""))
            self._end("the stream has ended" if name == "OK" else f"{name}: {message}")
        elif self._block_ends_stream or headers.get(":status", "200") != "200":
            self._end(f"the server answered HTTP status {headers.get(':status')}")

    def _on_settings(self, payload: bytes) -> None:
        for at in range(0, len(payload), 6):
            name, value = _SETTING.unpack_from(payload, at)
            if name == http2.INITIAL_WINDOW_SIZE:
                self._stream_room += value - self._initial_room
                self._initial_room = value
            elif name == http2.MAX_FRAME_SIZE:
                self._frame_bytes = min(value, 2**20)
        self._write_frame(http2.SETTINGS, http2.ACK, 0)
        self._flush()

    def _on_ping(self, flags: int, payload: bytes) -> None:
        if not flags & http2.ACK:
            self._write_frame(http2.PING, http2.ACK, 0, payload)
            return
        self._set_keepalive(KEEPALIVE_S, self._ping)

    def _ping(self) -> None:
        self._write_frame(http2.PING, 0, 0, b"rankway\0")
        self._set_keepalive(KEEPALIVE_TIMEOUT_S, self._no_pong)

    def _no_pong(self) -> None:
        self._end(f"no answer to a ping within {KEEPALIVE_TIMEOUT_S:.0f} s")

    def _set_keepalive(self, after_s: float, then: Callable[[], None]) -> None:
        if self._keepalive is not None:
            self._keepalive.cancel()
        if not self.ended.done():
            self._keepalive = asyncio.get_running_loop().call_later(after_s, then)

    def _flush(self) -> None:
        """Write what there is room for."""
        waiting = self.waiting
        while waiting and not self._paused:
            room = min(self._connection_room, self._stream_room, self._frame_bytes)
            if room <= 0:
                return
            data = waiting[0]
            part = data[:room]
            self._connection_room -= len(part)
            self._stream_room -= len(part)
            self._write_frame(http2.DATA, 0, _STREAM, bytes(part))
            if len(part) == len(data):
                waiting.popleft()
            else:
                waiting[0] = data[len(part) :]

    def _write_frame(self, kind: int, flags: int, stream_id: int, payload: bytes = b"") -> None:
        size = len(payload)
        self._transport.write(_FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload)

    def _end(self, reason: str) -> None:
        if self._keepalive is not None:
            self._keepalive.cancel()
        self.waiting.clear()
        if not self.ended.done():
            self.ended.set_result(reason)
        self._transport.close()


def _unpadded_headers(flags: int, payload: bytes) -> bytes:
    begin, end = 0, len(payload)
    if flags & http2.PADDED:
        begin, end = 1, end - payload[0]
    return payload[begin + 5 if flags & http2.HAS_PRIORITY else begin : end]
