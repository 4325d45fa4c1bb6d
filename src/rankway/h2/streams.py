"""One stream of an HTTP/2 connection, the server's side: what is sent, and what waits for the peer's windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rankway.h2.frames import DATA, END_STREAM, HEADER, PROTOCOL_ERROR, WINDOW_UPDATE, StreamError

if TYPE_CHECKING:
    from rankway.h2.connection import Connection

RECEIVE_WINDOW = 4 * 2**20
"""Bytes that a peer may send on a stream before it hears of their arrival."""

PENDING_BYTES = 4 * 2**20
"""Bytes of one stream that may wait for the peer; what would come on top of more is dropped, and the stream's receiver told."""

CONNECTION_PENDING_BYTES = 64 * 2**20
"""The same for all streams of a connection."""


class Receiver(Protocol):
    """What a stream's owner hears. Methods must neither raise nor block."""

    def on_data(self, data: bytes, end: bool) -> None:
        """Part of the request's body; `end`: the last one (perhaps empty)."""

    def on_reset(self) -> None:
        """The peer has reset the stream or is gone. Nothing may be sent any more."""

    def on_unread(self) -> None:
        """The peer leaves more than PENDING_BYTES unread."""

    def on_flushed(self) -> None:
        """What had to wait for the peer's windows has been sent."""


class Stream:
    """One request and its answer."""

    __slots__ = (
        "_connection", "_end_block", "_pending",
        "ended", "id", "owed", "receiver", "remote_ended", "room", "unacked", "window",
    )  # fmt: skip

    def __init__(self, connection: Connection, stream_id: int, window: int) -> None:
        self.id = stream_id
        self.window = window
        self.owed: int | None = None
        """Bytes of the body that are still to come, if the peer has announced its length."""
        self.receiver: Receiver | None = None
        self.remote_ended = False
        self.ended = False
        """Our side is closed, or will be when what is pending has gone."""
        self.unacked = 0
        self.room = RECEIVE_WINDOW
        """Bytes that the peer may still send."""
        self._connection = connection
        self._pending = bytearray()
        self._end_block: bytes | None = None

    @property
    def clear(self) -> bool:
        """Whether nothing waits for the peer's windows; otherwise `on_flushed` will tell."""
        return not self._pending

    def came(self, size: int, end: bool) -> None:
        """So many bytes of the body have come; `end`: the last ones. Raises StreamError: another length was announced."""
        self.remote_ended = end
        if self.owed is not None:
            self.owed -= size
            if self.owed < 0 or (end and self.owed):
                raise StreamError(PROTOCOL_ERROR, "the body isn't as long as its content-length says")

    def send_headers(self, block: bytes) -> None:
        """Send a header block (HPACK)."""
        if not self.ended:
            self._connection.write_headers(0, self.id, block)

    def send(self, data: bytes, now: bool = False) -> None:
        """Send part of the body as soon as the peer's windows allow. `now`: without waiting for the end of this turn."""
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
            frame = HEADER.pack(size >> 8, size & 0xFF, DATA, 0, self.id) + data
            connection.write_now(frame) if now else connection.write(frame)
            return
        if len(self._pending) > PENDING_BYTES or connection.pending > CONNECTION_PENDING_BYTES:
            self.drop_pending()
            connection.state.unread += 1
            if self.receiver is not None:
                self.receiver.on_unread()
            return
        self._pending += data
        connection.pending += size
        self._send_pending()

    def drop_pending(self) -> None:
        """Forget what hasn't been sent."""
        self._connection.pending -= len(self._pending)
        self._pending.clear()

    def end(self, block: bytes) -> None:
        """Send the trailers after what is pending: our side is over."""
        if self.ended:
            return
        self.ended = True
        self._end_block = block
        self._send_pending()

    def flush(self) -> None:
        """Send what the windows allow, now that they have grown."""
        waited = bool(self._pending)
        self._send_pending()
        if waited and not self._pending and not self.ended and self.receiver is not None:
            self.receiver.on_flushed()

    def _send_pending(self) -> None:
        connection = self._connection
        while self._pending:
            size = min(len(self._pending), self.window, connection.window, connection.frame_bytes)
            if size <= 0 or connection.blocked:
                if self.window > 0:  # otherwise its own window update brings it back
                    connection.waiting[self.id] = self
                return
            self.window -= size
            connection.window -= size
            connection.pending -= size
            connection.write_frame(DATA, 0, self.id, bytes(self._pending[:size]))
            del self._pending[:size]
        if self._end_block is not None:
            connection.write_headers(END_STREAM, self.id, self._end_block)
            self._end_block = None
            connection.stream_ended(self)

    def consumed(self, size: int) -> None:
        """The receiver has taken so many bytes: the peer may send more."""
        self.unacked += size
        if self.unacked > RECEIVE_WINDOW // 2 and not self.remote_ended:
            self._connection.write_frame(WINDOW_UPDATE, 0, self.id, self.unacked.to_bytes(4, "big"))
            self.room += self.unacked
            self.unacked = 0
