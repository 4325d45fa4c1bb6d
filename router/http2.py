"""HTTP/2 for gRPC (RFC 9113), the server's side: frames, header blocks, flow control. No TLS, no upgrade: prior knowledge only.

Why not a library: what costs a router is the work per message. Here a message is one frame header and an append: what all
streams of a connection write in one turn of the event loop goes out in one system call. Header blocks are read by `hpack`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import hpack

from rankway.router.header_blocks import HeaderBlocks

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 0x3, 0x4, 0x5, 0x6
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED = 0x0, 0x1, 0x3, 0x5
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 0x6, 0x7, 0x8, 0x9, 0xB

DEFAULT_WINDOW = 65_535
MAX_WINDOW = 2**31 - 1
FRAME_BYTES = 16_384
"""Largest frame that we take, and send unless the peer takes larger ones."""

HEADER_BYTES = 32 * 2**10
"""Largest header block."""

RECEIVE_WINDOW = 4 * 2**20
"""Bytes that a peer may send on a stream before it hears of their arrival."""

PENDING_BYTES = 4 * 2**20
"""Bytes of one stream that the peer may leave unread; beyond, the stream's receiver is told."""

MAX_RESETS = 1_000
"""Streams that a peer may reset before their answer within one keepalive interval; beyond, the connection is cut."""

_HEADER = struct.Struct(">HBBBI")

Headers = list[tuple[str, str]]


class ConnectionError_(Exception):  # noqa: N801  # ConnectionError is Python's own, of another meaning
    """The peer broke the protocol: the connection ends with this code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Receiver(Protocol):
    """What a stream's owner hears. Methods must neither raise nor block."""

    def on_data(self, data: bytes, end: bool) -> None:
        """Part of the request's body; `end`: the last one (perhaps empty)."""

    def on_reset(self) -> None:
        """The peer has reset the stream or is gone. Nothing may be sent any more."""

    def on_unread(self) -> None:
        """The peer leaves more than PENDING_BYTES unread."""


Acceptor = Callable[["Stream", Headers], Receiver]
"""Called with each new stream; the receiver hears the rest."""


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """Sizes and times."""

    concurrent_streams: int = 4096
    keepalive_s: float = 10.0
    """A connection that was silent for so long is pinged, and cut when it stays so."""


@dataclass(slots=True)
class Http2State:
    """What the connections of a server share."""

    accept: Acceptor
    limits: Http2Limits
    connections: set[Connection] = field(default_factory=set)
    draining: bool = False
    protocol_errors: int = 0
    unread: int = 0
    """Streams whose peer didn't read."""


class Stream:
    """One request and its answer."""

    __slots__ = ("_connection", "_end_block", "_pending", "ended", "id", "receiver", "remote_ended", "unacked", "window")

    def __init__(self, connection: Connection, stream_id: int, window: int) -> None:
        self.id = stream_id
        self.window = window
        self.receiver: Receiver | None = None
        self.remote_ended = False
        self.ended = False
        """Our side is closed, or will be when what is pending has gone."""
        self.unacked = 0
        self._connection = connection
        self._pending = bytearray()
        self._end_block: bytes | None = None

    def send_headers(self, block: bytes) -> None:
        """Send a header block (HPACK)."""
        if not self.ended:
            self._connection.write_frame(HEADERS, END_HEADERS, self.id, block)

    def send(self, data: bytes) -> None:
        """Send part of the body as soon as the peer's windows allow."""
        if self.ended:
            return
        connection = self._connection
        size = len(data)
        if (
            size <= self.window
            and size <= connection.window
            and size <= connection.frame_bytes
            and not self._pending
            and not connection.blocked
        ):
            self.window -= size
            connection.window -= size
            connection.write(_HEADER.pack(size >> 8, size & 0xFF, DATA, 0, self.id) + data)
            return
        self._pending += data
        self.flush()
        if len(self._pending) > PENDING_BYTES and self.receiver is not None:
            self._pending.clear()
            connection.state.unread += 1
            self.receiver.on_unread()

    def end(self, block: bytes) -> None:
        """Send the trailers after what is pending: our side is over."""
        if self.ended:
            return
        self.ended = True
        self._end_block = block
        self.flush()

    def flush(self) -> bool:
        """Send what the windows allow; returns whether nothing is left."""
        connection = self._connection
        while self._pending:
            size = min(len(self._pending), self.window, connection.window, connection.frame_bytes)
            if size <= 0 or connection.blocked:
                connection.waiting[self.id] = self
                return False
            self.window -= size
            connection.window -= size
            connection.write_frame(DATA, 0, self.id, bytes(self._pending[:size]))
            del self._pending[:size]
        if self._end_block is not None:
            connection.write_frame(HEADERS, END_HEADERS | END_STREAM, self.id, self._end_block)
            self._end_block = None
            connection.stream_ended(self)
        return True

    def consumed(self, size: int) -> None:
        """The receiver has taken so many bytes: the peer may send more."""
        self.unacked += size
        if self.unacked > RECEIVE_WINDOW // 2 and not self.remote_ended:
            self._connection.write_frame(WINDOW_UPDATE, 0, self.id, self.unacked.to_bytes(4, "big"))
            self.unacked = 0


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, state: Http2State) -> None:
        self.state = state
        self.window = DEFAULT_WINDOW
        self.frame_bytes = FRAME_BYTES
        self.blocked = False
        """The transport's buffer is full."""
        self.waiting: dict[int, Stream] = {}
        """Streams with something pending."""
        self.streams: dict[int, Stream] = {}
        self.quiet_for = 0
        """Keepalive intervals without a byte from the peer."""
        self.resets = 0
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._greeted = False
        self._peer_window = DEFAULT_WINDOW
        self._unacked = 0
        self._last_id = 0
        self._going = False
        self._headers_of: tuple[int, int, bytearray] | None = None
        """(stream, flags, block so far) of a header block that goes on in CONTINUATIONs."""
        self._blocks = HeaderBlocks(HEADER_BYTES)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.state.connections.add(self)
        settings = (
            (MAX_CONCURRENT_STREAMS, self.state.limits.concurrent_streams),
            (INITIAL_WINDOW_SIZE, RECEIVE_WINDOW),
            (MAX_HEADER_LIST_SIZE, HEADER_BYTES),
        )
        self.write_frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in settings))
        self.write_frame(WINDOW_UPDATE, 0, 0, (8 * RECEIVE_WINDOW).to_bytes(4, "big"))

    def data_received(self, data: bytes) -> None:
        self.quiet_for = 0
        try:
            self._parse(data)
        except ConnectionError_ as error:
            self.state.protocol_errors += 1
            self._go_away(error.code, str(error))
            self.cut()

    def pause_writing(self) -> None:
        self.blocked = True

    def resume_writing(self) -> None:
        self.blocked = False
        self._flush_waiting()

    def connection_lost(self, error: Exception | None) -> None:
        self.state.connections.discard(self)
        self.blocked = True
        self._out.clear()
        streams = list(self.streams.values())
        self.streams.clear()
        self.waiting.clear()
        for stream in streams:
            self._gone(stream)

    # For streams and the server

    def write(self, data: bytes) -> None:
        """Write at the end of this turn of the event loop, with all else that is written in it."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)

    def write_frame(self, kind: int, flags: int, stream_id: int, payload: bytes = b"") -> None:
        size = len(payload)
        self.write(_HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload)

    def stream_ended(self, stream: Stream) -> None:
        """Our side of a stream is closed; what the peer still sends is of no use."""
        self.waiting.pop(stream.id, None)
        if self.streams.pop(stream.id, None) is not None and not stream.remote_ended:
            self.write_frame(RST_STREAM, 0, stream.id, NO_ERROR.to_bytes(4, "big"))
        if self._going and not self.streams:
            self._close()

    def drain(self) -> None:
        """Take no new streams; close when the running ones have ended."""
        if not self._going:
            self._going = True
            self._go_away(NO_ERROR, "")
        if not self.streams:
            self._close()

    def keep_alive(self) -> None:
        """Called every keepalive interval: ask a silent peer, cut one that didn't answer."""
        self.quiet_for += 1
        self.resets = 0
        if self.quiet_for > 2:
            self.cut()
        elif self.quiet_for == 2:
            self.write_frame(PING, 0, 0, b"rankway.")

    def cut(self) -> None:
        """Close now, with what has been written."""
        self._close()

    # Frames

    def _parse(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        at = 0
        if not self._greeted:
            if len(buffer) < len(PREFACE) and PREFACE.startswith(buffer):
                self._buffer = buffer
                return
            if not buffer.startswith(PREFACE):
                raise ConnectionError_(PROTOCOL_ERROR, "this port speaks HTTP/2 (gRPC) only")
            self._greeted = True
            at = len(PREFACE)
        while len(buffer) - at >= 9:
            high, low, kind, flags, stream_id = _HEADER.unpack_from(buffer, at)
            size = (high << 8) | low
            if size > FRAME_BYTES:
                raise ConnectionError_(FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            if len(buffer) - at - 9 < size:
                break
            payload = buffer[at + 9 : at + 9 + size]
            at += 9 + size
            self._frame(kind, flags, stream_id & 0x7FFF_FFFF, payload)
        self._buffer = buffer[at:] if at else buffer

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._headers_of is not None and kind != CONTINUATION:
            raise ConnectionError_(PROTOCOL_ERROR, "a header block was not finished")
        if kind == DATA:
            self._on_data(flags, stream_id, payload)
        elif kind == HEADERS:
            self._on_headers(flags, stream_id, payload)
        elif kind == WINDOW_UPDATE:
            self._on_window_update(stream_id, payload)
        elif kind == RST_STREAM:
            self._on_reset(stream_id, payload)
        elif kind == SETTINGS:
            self._on_settings(flags, stream_id, payload)
        elif kind == PING:
            self._on_ping(flags, payload)
        elif kind == CONTINUATION:
            self._on_continuation(flags, stream_id, payload)
        elif kind == PUSH_PROMISE:
            raise ConnectionError_(PROTOCOL_ERROR, "clients don't push")
        # PRIORITY, GOAWAY and unknown kinds ask nothing of a server.

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._unacked += size
        if self._unacked > RECEIVE_WINDOW:
            self.write_frame(WINDOW_UPDATE, 0, 0, self._unacked.to_bytes(4, "big"))
            self._unacked = 0
        stream = self.streams.get(stream_id)
        if stream is None or stream.remote_ended:
            if stream_id == 0 or stream_id > self._last_id:
                raise ConnectionError_(PROTOCOL_ERROR, f"data on stream {stream_id}, which nobody has opened")
            return  # it has ended on our side
        if size > RECEIVE_WINDOW:
            raise ConnectionError_(FLOW_CONTROL_ERROR, "more data than the window allows")
        end = bool(flags & END_STREAM)
        stream.remote_ended = end
        if stream.receiver is not None:
            stream.receiver.on_data(_unpadded(flags, payload), end)

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = _unpadded(flags, payload)
        if flags & HAS_PRIORITY:
            block = block[5:]
        if flags & END_HEADERS:
            self._open(stream_id, flags, block)
        else:
            self._headers_of = (stream_id, flags, bytearray(block))

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._headers_of is None or self._headers_of[0] != stream_id:
            raise ConnectionError_(PROTOCOL_ERROR, "a continuation of nothing")
        _, first_flags, block = self._headers_of
        block += payload
        if len(block) > HEADER_BYTES:
            raise ConnectionError_(ENHANCE_YOUR_CALM, "a header block without end")
        if flags & END_HEADERS:
            self._headers_of = None
            self._open(stream_id, first_flags, bytes(block))

    def _open(self, stream_id: int, flags: int, block: bytes) -> None:
        try:
            # Every block must be decoded, also of streams that are refused: the decoder's table goes on from it.
            headers = self._blocks.decode(block)
        except (hpack.HPACKError, UnicodeDecodeError) as error:
            raise ConnectionError_(COMPRESSION_ERROR, f"header block: {error}") from None
        known = self.streams.get(stream_id)
        if known is not None:  # trailers of a request mean nothing in gRPC
            known.remote_ended = True
            if known.receiver is not None:
                known.receiver.on_data(b"", True)
            return
        if stream_id % 2 == 0 or stream_id <= self._last_id:
            raise ConnectionError_(PROTOCOL_ERROR, f"stream {stream_id} after stream {self._last_id}")
        self._last_id = stream_id
        if self._going or len(self.streams) >= self.state.limits.concurrent_streams:
            self.write_frame(RST_STREAM, 0, stream_id, REFUSED_STREAM.to_bytes(4, "big"))
            return
        stream = Stream(self, stream_id, self._peer_window)
        self.streams[stream_id] = stream
        stream.receiver = self.state.accept(stream, headers)
        if flags & END_STREAM:
            stream.remote_ended = True
            stream.receiver.on_data(b"", True)

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4 or stream_id == 0:
            raise ConnectionError_(FRAME_SIZE_ERROR, "RST_STREAM")
        stream = self.streams.pop(stream_id, None)
        if stream is None:
            return
        self.resets += 1
        if self.resets > MAX_RESETS + len(self.streams):
            raise ConnectionError_(ENHANCE_YOUR_CALM, "streams are opened and reset in masses")
        self.waiting.pop(stream_id, None)
        self._gone(stream)
        if self._going and not self.streams:
            self._close()

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionError_(FRAME_SIZE_ERROR, "SETTINGS")
        if flags & ACK:
            return
        for key, value in struct.iter_unpack(">HI", payload):
            if key == INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise ConnectionError_(FLOW_CONTROL_ERROR, f"a window of {value}")
                for stream in self.streams.values():
                    stream.window += value - self._peer_window
                self._peer_window = value
            elif key == MAX_FRAME_SIZE:
                if not FRAME_BYTES <= value < 2**24:
                    raise ConnectionError_(PROTOCOL_ERROR, f"a frame size of {value}")
                self.frame_bytes = value
        self.write_frame(SETTINGS, ACK, 0)
        self._flush_waiting()

    def _on_ping(self, flags: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise ConnectionError_(FRAME_SIZE_ERROR, "PING")
        if not flags & ACK:
            self.write_frame(PING, ACK, 0, payload)

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionError_(FRAME_SIZE_ERROR, "WINDOW_UPDATE")
        more = int.from_bytes(payload, "big") & MAX_WINDOW
        if more == 0:
            raise ConnectionError_(PROTOCOL_ERROR, "a window update of 0")
        if stream_id:
            stream = self.streams.get(stream_id)
            if stream is not None:
                stream.window += more
                if stream.window > MAX_WINDOW:
                    raise ConnectionError_(FLOW_CONTROL_ERROR, "a stream's window overflows")
                if stream_id in self.waiting:
                    self._flush_waiting()
            return
        self.window += more
        if self.window > MAX_WINDOW:
            raise ConnectionError_(FLOW_CONTROL_ERROR, "the connection's window overflows")
        self._flush_waiting()

    def _flush_waiting(self) -> None:
        """Let every stream that waits send what it may: in turn, each a frame's worth at least."""
        for stream_id, stream in list(self.waiting.items()):
            if self.blocked or self.window <= 0:
                return
            del self.waiting[stream_id]
            stream.flush()

    def _gone(self, stream: Stream) -> None:
        stream.ended = True
        if stream.receiver is not None:
            stream.receiver.on_reset()

    def _go_away(self, code: int, reason: str) -> None:
        self.write_frame(GOAWAY, 0, 0, struct.pack(">II", self._last_id, code) + reason.encode())

    def _flush(self) -> None:
        if self._out and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def _close(self) -> None:
        self._flush()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionError_(PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]
