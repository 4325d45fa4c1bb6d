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
from rankway.h2 import frames
from rankway.h2.messages import MessageReader, framed
from rankway.router import steps
from rankway.rpc import MAX_MESSAGE_BYTES

_SETTING = struct.Struct(">HI")
_STREAM = 1
_WINDOW = 16 * 2**20
"""Bytes that the server may send before it hears of their arrival, on the stream and on the connection."""
_MAX_HEADER_BLOCK = 64 * 2**10
_MAX_REASON = 500
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}

KEEPALIVE_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0

CLOSE_S = 1.0
"""How long a server may take to read the last frames; then the connection is cut."""

MAX_WAITING_BYTES = 256 * 2**20
"""What may wait for a server that gives no room; beyond, the call ends."""


class CallFailed(Exception):
    """The call ended, or couldn't begin; the message is why."""


class BidiCall(asyncio.Protocol):
    """The call. Made by `open`; ends by itself when the connection or the server's side of the stream does.

    Args:
        path: /package.Service/Method.
        authority: the server, host:port.
        on_message: called with each message, as it comes, until `close`. It may raise `steps.MALFORMED`, which ends the call.
    """

    def __init__(self, path: str, authority: str, on_message: Callable[[bytes], None]) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the call ended."""
        self.waiting: deque[memoryview] = deque()
        """Messages, or the rest of one, that the server gives no room for."""
        self.short_way: Callable[[bytes], int] | None = None
        """`steps.frame_dispatcher`: takes what is nothing but whole messages in place of `on_message`, and may raise the same."""
        self._path = path
        self._authority = authority
        self._on_message = on_message
        self._transport: asyncio.Transport
        self._buffer = b""
        self._within = False
        """Whether a frame, a header block or a message has begun and isn't complete."""
        self._messages = MessageReader(MAX_MESSAGE_BYTES)
        self._headers = hpack.Decoder(max_header_list_size=_MAX_HEADER_BLOCK)
        self._block: bytearray | None = None
        self._block_ends_stream = False
        self._connection_room = frames.DEFAULT_WINDOW
        self._stream_room = frames.DEFAULT_WINDOW
        self._initial_room = frames.DEFAULT_WINDOW
        self._frame_bytes = frames.FRAME_BYTES
        self._paused = False
        self._waiting_bytes = 0
        self._unacknowledged = 0
        self._heard = False
        """Whether anything has come since the last ping."""
        self._keepalive: asyncio.TimerHandle | None = None
        self._closing: asyncio.TimerHandle | None = None

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
            self._waiting_bytes += len(message) + 5
            self._flush()
            if self._waiting_bytes > MAX_WAITING_BYTES:
                self.close(f"the server doesn't read: {self._waiting_bytes} bytes wait")

    def close(self, reason: str = "closed") -> None:
        """Cancel the call and close the connection; `on_message` is called no more."""
        if not self.ended.done():
            self._write_frame(frames.RST_STREAM, 0, _STREAM, struct.pack(">I", frames.CANCEL))
            self._end(reason)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(frames.PREFACE)
        self._write_frame(frames.SETTINGS, 0, 0, _SETTING.pack(frames.INITIAL_WINDOW_SIZE, _WINDOW))
        self._write_frame(frames.WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW - frames.DEFAULT_WINDOW))
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
        self._write_frame(frames.HEADERS, frames.END_HEADERS, _STREAM, block)
        self._keepalive = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._ping)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"connection lost: {error}" if error else "the server closed the connection")
        if self._closing is not None:
            self._closing.cancel()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            taken = self.short_way(data) if self.short_way is not None and not self._within else 0
            if taken:
                self._acknowledge(taken)
            else:
                self._take_frames(data)
        except steps.MALFORMED as error:
            # Tokens may be lost with it: the requests have to move.
            self.close(f"a message is no AttachResponse: {error}")

    # Frames

    def _take_frames(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        at, size = 0, len(buffer)
        try:
            while size - at >= 9 and not self.ended.done():
                high, low, kind, flags, stream_id = frames.HEADER.unpack_from(buffer, at)
                begin = at + 9
                end = begin + (high << 8 | low)
                if end - begin > frames.FRAME_BYTES:
                    raise CallFailed(f"a frame of {end - begin} bytes")
                if end > size:
                    break
                at = end
                self._on_frame(kind, flags, stream_id & 0x7FFF_FFFF, buffer[begin:end])
        except (CallFailed, RankwayError, frames.ConnectionError_, HPACKError, struct.error) as error:
            self._end(f"broken protocol: {error}")
        self._buffer = buffer[at:]
        self._within = bool(self._buffer) or self._block is not None or self._messages.held > 0

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None and kind != frames.CONTINUATION:
            raise CallFailed("a header block was not finished")
        if stream_id not in (0, _STREAM) or (stream_id == 0 and kind in (frames.DATA, frames.HEADERS, frames.RST_STREAM)):
            raise CallFailed(f"a frame of kind {kind} on stream {stream_id}")
        if kind == frames.DATA:
            self._on_data(flags, payload)
        elif kind == frames.HEADERS:
            self._block = bytearray(frames.header_fragment(flags, payload))
            self._block_ends_stream = bool(flags & frames.END_STREAM)
            self._on_block(flags)
        elif kind == frames.CONTINUATION:
            if self._block is None or len(self._block) > _MAX_HEADER_BLOCK:
                raise CallFailed("a header block out of place or without end")
            self._block += payload
            self._on_block(flags)
        elif kind == frames.WINDOW_UPDATE:
            (more,) = struct.unpack(">I", payload)
            if stream_id:
                self._stream_room += more & 0x7FFF_FFFF
            else:
                self._connection_room += more & 0x7FFF_FFFF
            if max(self._stream_room, self._connection_room) > frames.MAX_WINDOW:
                raise CallFailed("a window overflows")
            self._flush()
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._on_settings(payload)
        elif kind == frames.PING:
            self._on_ping(flags, payload)
        elif kind == frames.RST_STREAM:
            self._end(f"the server reset the stream, HTTP/2 code {struct.unpack('>I', payload)[0]}")
        elif kind == frames.GOAWAY:
            # With code 0 the server drains: what runs on this stream ends there, in its time.
            last, code = struct.unpack(">II", payload[:8])
            if code or last & 0x7FFF_FFFF < _STREAM:
                reason = payload[8:].decode("utf-8", "replace")[:_MAX_REASON]
                self._end(f"the server sent GOAWAY, HTTP/2 code {code} {reason}".rstrip())

    def _on_data(self, flags: int, payload: bytes) -> None:
        self._acknowledge(len(payload))
        for message in self._messages.feed(frames.unpadded(flags, payload)):
            self._on_message(message)
            if self.ended.done():
                return
        if flags & frames.END_STREAM:
            self._end("the server ended the stream without a status")

    def _acknowledge(self, size: int) -> None:
        """Give the server room again, now and then."""
        self._unacknowledged += size
        if self._unacknowledged > _WINDOW // 4:
            more = struct.pack(">I", self._unacknowledged)
            self._write_frame(frames.WINDOW_UPDATE, 0, 0, more)
            self._write_frame(frames.WINDOW_UPDATE, 0, _STREAM, more)
            self._unacknowledged = 0

    def _on_block(self, flags: int) -> None:
        if not flags & frames.END_HEADERS or self._block is None:
            return
        pairs = self._headers.decode(bytes(self._block), raw=True)
        headers = {str(name, "latin-1"): str(value, "latin-1") for name, value in pairs}
        self._block = None
        if headers.get(":status", "").startswith("1"):
            return  # an interim answer
        if "grpc-status" in headers:
            status = headers["grpc-status"]
            name = _CODES.get(int(status), status) if status.isdecimal() else status
            message = urllib.parse.unquote(headers.get("grpc-message", ""))[:_MAX_REASON]
            self._end("the stream has ended" if name == "OK" else f"{name}: {message}")
        elif self._block_ends_stream or headers.get(":status", "200") != "200":
            self._end(f"the server answered HTTP status {headers.get(':status')}")

    def _on_settings(self, payload: bytes) -> None:
        for at in range(0, len(payload), 6):
            name, value = _SETTING.unpack_from(payload, at)
            if name == frames.INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW:
                    raise CallFailed(f"a window of {value}")
                self._stream_room += value - self._initial_room
                self._initial_room = value
            elif name == frames.MAX_FRAME_SIZE:
                if value < frames.FRAME_BYTES:
                    raise CallFailed(f"a frame size of {value}")
                self._frame_bytes = min(value, 2**20)
        self._write_frame(frames.SETTINGS, frames.ACK, 0)
        self._flush()

    def _on_ping(self, flags: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise CallFailed("a ping that is none")
        if not flags & frames.ACK:
            self._write_frame(frames.PING, frames.ACK, 0, payload)
            return
        self._set_keepalive(KEEPALIVE_S, self._ping)

    def _ping(self) -> None:
        self._heard = False
        self._write_frame(frames.PING, 0, 0, b"rankway\0")
        self._set_keepalive(KEEPALIVE_TIMEOUT_S, self._no_pong)

    def _no_pong(self) -> None:
        if self._heard:  # the answer may stand behind megabytes of something else
            self._heard = False
            self._set_keepalive(KEEPALIVE_TIMEOUT_S, self._no_pong)
            return
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
            self._waiting_bytes -= len(part)
            self._write_frame(frames.DATA, 0, _STREAM, bytes(part))
            if len(part) == len(data):
                waiting.popleft()
            else:
                waiting[0] = data[len(part) :]

    def _write_frame(self, kind: int, flags: int, stream_id: int, payload: bytes = b"") -> None:
        size = len(payload)
        self._transport.write(frames.HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload)

    def _end(self, reason: str) -> None:
        if self._keepalive is not None:
            self._keepalive.cancel()
        self.short_way = None
        self.waiting.clear()
        self._waiting_bytes = 0
        if not self.ended.done():
            self.ended.set_result(reason)
        if not self._transport.is_closing():
            # A server that doesn't read would keep a closing socket for ever.
            self._closing = asyncio.get_running_loop().call_later(CLOSE_S, self._transport.abort)
            self._transport.close()
