"""HTTP/2 for gRPC (RFC 9113), the server's side: frames, header blocks, flow control. No TLS, no upgrade: prior knowledge only.

Why not a library: what costs a router is the work per message. Here a message is one frame header and an append: what all
streams of a connection write in one turn of the event loop goes out in one system call. Header blocks are read by `hpack`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import hpack

from rankway.h2.frames import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_BYTES,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADER,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    MAX_WINDOW,
    NO_ERROR,
    PING,
    PREFACE,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    ConnectionError_,
    StreamError,
    header_fragment,
    unpadded,
    widened,
)
from rankway.h2.headers import HeaderBlocks, Headers, announced, fault
from rankway.h2.streams import RECEIVE_WINDOW, Receiver, Stream

HEADER_BYTES = 32 * 2**10
"""Largest list of headers (names, values and 32 bytes each) of a call; a larger one is refused."""

HEADER_BLOCK_BYTES = 4 * HEADER_BYTES
"""Largest one that is decoded at all; beyond, the connection is cut. Between the two only the call suffers: a proxy's connection
carries the calls of many clients."""

MAX_CONTINUATIONS = 64
"""Frames that a header block may be cut into."""

TURN_BYTES = 2**20
"""Data that streams may write in one turn of the event loop; the rest waits for the transport to take it."""

UNSENT_BYTES = 16 * 2**20
"""What the transport may hold of frames outside flow control (acknowledgements, headers, trailers); beyond, the peer doesn't read
and the connection is cut."""

MAX_RESETS = 1_000
"""Streams that a peer may make us give up within half a keepalive interval, beside as many as were answered; beyond, the
connection is cut (rapid reset, CVE-2023-44487)."""

MAX_IDLE_FRAMES = 10_000
"""Frames that carry nothing forward (pings, settings, empty data, priorities, unknown kinds), likewise."""

MAX_LEFT = 1_024
"""Streams that we ended before the peer did, of which late frames are expected."""

CLOSE_S = 1.0
"""How long a peer may take to read the last frames, and to answer the ping that goes before the end of a drained connection."""

_TABLE_BYTES = 4096
_LAST_PING = b"goodbye."

Acceptor = Callable[[Stream, Headers], Receiver]
"""Called with each new stream; the receiver hears the rest."""


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """Sizes and times."""

    connections: int = 4096
    """One more is closed at once."""
    concurrent_streams: int = 4096
    """Of a connection."""
    keepalive_s: float = 10.0
    """A connection that was silent for so long is pinged, and cut when it stays so."""


@dataclass(slots=True)
class Http2State:
    """What the connections of a server share."""

    accept: Acceptor
    limits: Http2Limits
    connections: set[Connection] = field(default_factory=set)
    on_empty: Callable[[], None] | None = None
    """Called when the last connection has gone."""
    draining: bool = False
    protocol_errors: int = 0
    unread: int = 0
    """Streams whose peer didn't read."""


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, state: Http2State) -> None:
        self.state = state
        self.window = DEFAULT_WINDOW
        self.frame_bytes = FRAME_BYTES
        self.blocked = False
        """The transport's buffer is full, or this turn's share of it."""
        self.waiting: dict[int, Stream] = {}
        """Streams with something pending that their own windows allow."""
        self.pending = 0
        """Bytes that wait on all streams."""
        self.streams: dict[int, Stream] = {}
        self.quiet_for = 0
        """Keepalive intervals without a byte from the peer."""
        self.resets = 0
        self.idle_frames = 0
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._greeted = False
        self._peer_window = DEFAULT_WINDOW
        self._unacked = 0
        self._last_id = 0
        self._settled = False
        self._draining = False
        self._going = False
        self._left: dict[int, None] = {}
        """Streams that we ended before the peer did, oldest first."""
        self._table_update = b""
        """What the next header block begins with."""
        self._headers_of: tuple[int, int, bytearray] | None = None
        """(stream, flags, block so far) of a header block that goes on in CONTINUATIONs."""
        self._continuations = 0
        self._blocks = HeaderBlocks(HEADER_BLOCK_BYTES)

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
        if len(self.state.connections) > self.state.limits.connections:
            self.state.protocol_errors += 1
            self._go_away(ENHANCE_YOUR_CALM, f"{self.state.limits.connections} connections are open already")
            self.cut()

    def data_received(self, data: bytes) -> None:
        self.quiet_for = 0
        try:
            self._parse(data)
        except ConnectionError_ as error:
            self.state.protocol_errors += 1
            self._go_away(error.code, str(error))
            self.cut()

    def pause_writing(self) -> None:
        self.blocked = self._paused = True

    def resume_writing(self) -> None:
        self.blocked = self._paused = False
        self._flush_waiting()

    def connection_lost(self, error: Exception | None) -> None:
        self.state.connections.discard(self)
        self.blocked = self._paused = True
        self._out.clear()
        if self._timer is not None:
            self._timer.cancel()
        streams = list(self.streams.values())
        self.streams.clear()
        self.waiting.clear()
        for stream in streams:
            self._gone(stream)
        if not self.state.connections and self.state.on_empty is not None:
            self.state.on_empty()

    # For streams and the server

    def write(self, data: bytes) -> None:
        """Write at the end of this turn of the event loop, with all else that is written in it."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes > TURN_BYTES:
            self.blocked = True

    def write_now(self, data: bytes) -> None:
        """Write what waits for the end of this turn, and this after it."""
        if self._out or self._transport is None:
            self.write(data)
            self._flush()
        elif not self._transport.is_closing():
            self._transport.write(data)

    def write_frame(self, kind: int, flags: int, stream_id: int, payload: bytes = b"") -> None:
        size = len(payload)
        self.write(HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload)

    def write_headers(self, flags: int, stream_id: int, block: bytes) -> None:
        """Write a header block, cut into frames that the peer takes."""
        if self._table_update:
            block, self._table_update = self._table_update + block, b""
        most = self.frame_bytes
        if len(block) <= most:
            self.write_frame(HEADERS, flags | END_HEADERS, stream_id, block)
            return
        self.write_frame(HEADERS, flags, stream_id, block[:most])
        for at in range(most, len(block), most):
            last = at + most >= len(block)
            self.write_frame(CONTINUATION, END_HEADERS if last else 0, stream_id, block[at : at + most])

    def stream_ended(self, stream: Stream) -> None:
        """Our side of a stream is closed; what the peer still sends is of no use."""
        self.waiting.pop(stream.id, None)
        if self.streams.pop(stream.id, None) is not None:
            self.resets -= 1
            if not stream.remote_ended:
                self._reset(stream.id, NO_ERROR)
        if self._going and not self.streams:
            self._close()

    def drain(self) -> None:
        """Announce the end; close when the running streams have ended.

        In two steps (RFC 9113, 6.8), so that no stream is lost that the peer opens meanwhile: streams are taken until the peer
        has answered a ping, hence has read the announcement.
        """
        if self._draining:
            return
        self._draining = True
        if not self._greeted:
            self._close()
            return
        self._go_away(NO_ERROR, "", MAX_WINDOW)
        self.write_frame(PING, 0, 0, _LAST_PING)
        self._timer = self._loop.call_later(CLOSE_S, self._drained)

    def keep_alive(self) -> None:
        """Called twice every keepalive interval: ask a silent peer, cut one that didn't answer."""
        self.quiet_for += 1
        self.resets = self.idle_frames = 0
        if self.quiet_for > 2:
            self._abort()
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
            high, low, kind, flags, stream_id = HEADER.unpack_from(buffer, at)
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
        if not self._settled:
            if kind != SETTINGS:
                raise ConnectionError_(PROTOCOL_ERROR, "settings come first")
            self._settled = True
        try:
            self._dispatch(kind, flags, stream_id, payload)
        except StreamError as error:
            self._fail(stream_id, error.code)

    def _dispatch(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
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
            self._on_ping(flags, stream_id, payload)
        elif kind == CONTINUATION:
            self._on_continuation(flags, stream_id, payload)
        elif kind == PUSH_PROMISE:
            raise ConnectionError_(PROTOCOL_ERROR, "clients don't push")
        else:  # PRIORITY, GOAWAY and unknown kinds ask nothing of a server.
            self._count_idle()

    def _count_idle(self) -> None:
        self.idle_frames += 1
        if self.idle_frames > MAX_IDLE_FRAMES:
            raise ConnectionError_(ENHANCE_YOUR_CALM, "frames that say nothing, in masses")

    def _count_reset(self) -> None:
        self.resets += 1
        if self.resets > MAX_RESETS:
            raise ConnectionError_(ENHANCE_YOUR_CALM, "streams that come to nothing, in masses")

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._unacked += size
        if self._unacked > RECEIVE_WINDOW:
            self.write_frame(WINDOW_UPDATE, 0, 0, self._unacked.to_bytes(4, "big"))
            self._unacked = 0
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_opened(stream_id, "data")
            self._count_idle()
            return  # it has ended on our side
        if stream.remote_ended:
            raise StreamError(STREAM_CLOSED, "data after the end")
        stream.room -= size
        if stream.room < 0:
            raise StreamError(FLOW_CONTROL_ERROR, "more data than the window allows")
        data = unpadded(flags, payload)
        if len(data) < size:
            stream.consumed(size - len(data))
        end = bool(flags & END_STREAM)
        if not data and not end:
            self._count_idle()
        stream.came(len(data), end)
        if stream.receiver is not None:
            stream.receiver.on_data(data, end)

    def _check_opened(self, stream_id: int, what: str) -> None:
        if stream_id == 0 or stream_id > self._last_id or stream_id % 2 == 0:
            raise ConnectionError_(PROTOCOL_ERROR, f"{what} on stream {stream_id}, which nobody has opened")

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = header_fragment(flags, payload)
        if flags & END_HEADERS:
            self._open(stream_id, flags, block)
        else:
            self._headers_of = (stream_id, flags, bytearray(block))
            self._continuations = 0

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._headers_of is None or self._headers_of[0] != stream_id:
            raise ConnectionError_(PROTOCOL_ERROR, "a continuation of nothing")
        _, first_flags, block = self._headers_of
        block += payload
        self._continuations += 1
        if len(block) > HEADER_BLOCK_BYTES or self._continuations > MAX_CONTINUATIONS:
            raise ConnectionError_(ENHANCE_YOUR_CALM, "a header block without end")
        if flags & END_HEADERS:
            self._headers_of = None
            self._open(stream_id, first_flags, bytes(block))

    def _open(self, stream_id: int, flags: int, block: bytes) -> None:
        try:
            # Every block must be decoded, also of streams that are refused: the decoder's table goes on from it.
            headers = self._blocks.decode(block)
        except hpack.HPACKError as error:
            raise ConnectionError_(COMPRESSION_ERROR, f"header block: {error}") from None
        known = self.streams.get(stream_id)
        if known is not None:
            self._on_trailers(known, flags)
            return
        if stream_id in self._left:
            return  # trailers that were under way when we ended the stream
        if stream_id % 2 == 0 or stream_id <= self._last_id:
            raise ConnectionError_(PROTOCOL_ERROR, f"stream {stream_id} after stream {self._last_id}")
        self._last_id = stream_id
        if self._going or len(self.streams) >= self.state.limits.concurrent_streams:
            self._reset(stream_id, REFUSED_STREAM)
            self._count_reset()
            return
        stream = Stream(self, stream_id, self._peer_window)
        self.streams[stream_id] = stream
        wrong = fault(headers)
        if wrong:
            raise StreamError(PROTOCOL_ERROR, wrong)
        stream.owed = announced(headers)
        end = bool(flags & END_STREAM)
        stream.came(0, end)
        stream.receiver = self.state.accept(stream, headers)
        if end:
            stream.receiver.on_data(b"", True)

    def _on_trailers(self, stream: Stream, flags: int) -> None:
        """Trailers of a request mean nothing in gRPC but its end."""
        if stream.remote_ended:
            raise StreamError(STREAM_CLOSED, "headers after the end")
        if not flags & END_STREAM:
            raise StreamError(PROTOCOL_ERROR, "headers between data")
        stream.came(0, True)
        if stream.receiver is not None:
            stream.receiver.on_data(b"", True)

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionError_(FRAME_SIZE_ERROR, "RST_STREAM")
        self._check_opened(stream_id, "a reset")
        stream = self.streams.pop(stream_id, None)
        if stream is None:
            self._count_idle()
            return
        self._forget(stream)

    def _fail(self, stream_id: int, code: int) -> None:
        """End a stream on which the peer broke the protocol."""
        self._reset(stream_id, code)
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            self._forget(stream)

    def _reset(self, stream_id: int, code: int) -> None:
        self.write_frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))
        self._left[stream_id] = None
        if len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]

    def _forget(self, stream: Stream) -> None:
        """A stream was reset: its receiver hears of it."""
        self.waiting.pop(stream.id, None)
        self._gone(stream)
        self._count_reset()
        if self._going and not self.streams:
            self._close()

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionError_(PROTOCOL_ERROR, "SETTINGS of a stream")
        if len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionError_(FRAME_SIZE_ERROR, "SETTINGS")
        if flags & ACK:
            return
        self._count_idle()
        for key, value in struct.iter_unpack(">HI", payload):
            self._set(key, value)
        self.write_frame(SETTINGS, ACK, 0)
        for stream in list(self.streams.values()):
            stream.flush()

    def _set(self, key: int, value: int) -> None:
        if key == INITIAL_WINDOW_SIZE:
            if value > MAX_WINDOW:
                raise ConnectionError_(FLOW_CONTROL_ERROR, f"a window of {value}")
            for stream in self.streams.values():
                stream.window += value - self._peer_window
                if stream.window > MAX_WINDOW:
                    raise ConnectionError_(FLOW_CONTROL_ERROR, "a stream's window overflows")
            self._peer_window = value
        elif key == MAX_FRAME_SIZE:
            if not FRAME_BYTES <= value < 2**24:
                raise ConnectionError_(PROTOCOL_ERROR, f"a frame size of {value}")
            self.frame_bytes = value
        elif key == HEADER_TABLE_SIZE and value < _TABLE_BYTES:
            # Our blocks use no table, but a decoder with a smaller one must be told so (RFC 7541, 4.2).
            self._table_update = b"\x20"
        elif key == ENABLE_PUSH and value > 1:
            raise ConnectionError_(PROTOCOL_ERROR, f"ENABLE_PUSH={value}")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionError_(PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise ConnectionError_(FRAME_SIZE_ERROR, "PING")
        if not flags & ACK:
            self._count_idle()
            self.write_frame(PING, ACK, 0, payload)
        elif payload == _LAST_PING and self._draining:
            self._drained()

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionError_(FRAME_SIZE_ERROR, "WINDOW_UPDATE")
        more = int.from_bytes(payload, "big") & MAX_WINDOW
        if stream_id:
            self._widen(stream_id, more)
            return
        self.window = widened(self.window, more, ConnectionError_, "the connection's")
        self._flush_waiting()

    def _widen(self, stream_id: int, more: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_opened(stream_id, "a window update")
            self._count_idle()
            return
        stream.window = widened(stream.window, more, StreamError, "a stream's")
        stream.flush()

    def _flush_waiting(self) -> None:
        """Let the streams that wait send what they may, in turn."""
        while self.waiting and not self.blocked and self.window > 0:
            stream_id, stream = next(iter(self.waiting.items()))
            del self.waiting[stream_id]
            stream.flush()

    def _gone(self, stream: Stream) -> None:
        stream.ended = True
        stream.drop_pending()
        if stream.receiver is not None:
            stream.receiver.on_reset()

    def _go_away(self, code: int, reason: str, last_id: int | None = None) -> None:
        last = self._last_id if last_id is None else last_id
        self.write_frame(GOAWAY, 0, 0, struct.pack(">II", last, code) + reason.encode())

    def _drained(self) -> None:
        """The peer knows of the end: what it opens from now on it can send elsewhere."""
        if self._going:
            return
        self._going = True
        if self._timer is not None:
            self._timer.cancel()
        self._go_away(NO_ERROR, "")
        if not self.streams:
            self._close()

    def _flush(self) -> None:
        transport = self._transport
        if self._out and transport is not None and not transport.is_closing():
            transport.write(b"".join(self._out))
            if self._paused and transport.get_write_buffer_size() > UNSENT_BYTES + TURN_BYTES:
                self.state.protocol_errors += 1
                self._abort()
        self._out.clear()
        self._out_bytes = 0
        if self.blocked and not self._paused:
            self.blocked = False
            self._flush_waiting()

    def _close(self) -> None:
        self._flush()
        if self._transport is not None and not self._transport.is_closing():
            if self._timer is not None:
                self._timer.cancel()
            # A peer that doesn't read would keep a closing socket for ever.
            self._timer = self._loop.call_later(CLOSE_S, self._abort)
            self._transport.close()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
