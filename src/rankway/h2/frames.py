"""HTTP/2's frames and codes (RFC 9113, sections 4, 6 and 7), for both sides of a connection. Pure."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS = 0x1, 0x2, 0x3
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 0x4, 0x5, 0x6
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED = 0x0, 0x1, 0x3, 0x5
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 0x6, 0x7, 0x8, 0x9, 0xB

DEFAULT_WINDOW = 65_535
MAX_WINDOW = 2**31 - 1
FRAME_BYTES = 16_384
"""Largest frame that we take, and send unless the peer takes larger ones."""

HEADER = struct.Struct(">HBBBI")
"""Of a frame: length (16 high bits, 8 low), kind, flags, stream."""


class Http2Error(Exception):
    """The peer broke the protocol.

    Args:
        code: one of the codes above.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class ConnectionError_(Http2Error):  # noqa: N801  # ConnectionError is Python's own, of another meaning
    """The connection ends with this code."""


class StreamError(Http2Error):
    """The stream ends with this code."""


def widened(window: int, more: int, error: type[Http2Error], whose: str) -> int:
    """A window after an update by `more`. Raises `error`: the update is of 0, or the window overflows."""
    if more == 0:
        raise error(PROTOCOL_ERROR, "a window update of 0")
    if window + more > MAX_WINDOW:
        raise error(FLOW_CONTROL_ERROR, f"{whose} window overflows")
    return window + more


def unpadded(flags: int, payload: bytes) -> bytes:
    """A payload without its padding. Raises ConnectionError_."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionError_(PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]


def header_fragment(flags: int, payload: bytes) -> bytes:
    """What HEADERS carries of a header block. Raises ConnectionError_."""
    block = unpadded(flags, payload)
    if not flags & HAS_PRIORITY:
        return block
    if len(block) < 5:
        raise ConnectionError_(FRAME_SIZE_ERROR, "HEADERS without the priority that it announces")
    return block[5:]
