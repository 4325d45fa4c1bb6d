"""gRPC over HTTP/2, as bytes: messages, timeouts, header blocks, statuses. Pure.

Header blocks are literals without indexing (RFC 7541, 6.2.2), so they depend on no state and the usual ones are constants.
"""

from __future__ import annotations

import base64
import re
from typing import TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from rankway.errors import InvalidField, Overloaded, RankwayError

M = TypeVar("M", bound=Message)

_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

MESSAGE_BYTES = 2000
"""Longest status message in UTF-8; what is beyond is cut off. Percent-encoded it is up to three times as long, it comes once
more in the details, and clients take 8 KB of trailers."""

_CONTENT_TYPE = re.compile(r"application/grpc(\+proto)?\s*(;.*)?", re.IGNORECASE)


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(size: int) -> bytes:
    """A string's length without Huffman coding: an integer with a 7-bit prefix."""
    if size < 127:
        return bytes((size,))
    encoded = bytearray((127,))
    rest = size - 127
    while rest >= 128:
        encoded.append(rest % 128 + 128)
        rest //= 128
    encoded.append(rest)
    return bytes(encoded)


HEADERS = b"\x88" + _literal(b"content-type", b"application/grpc") + _literal(b"grpc-accept-encoding", b"identity")
"""`:status: 200` and what every answer begins with."""

TRAILERS_OK = _literal(b"grpc-status", b"0")


def refusal(http_status: int) -> bytes:
    """The block that answers what is no gRPC at all."""
    return _literal(b":status", str(http_status).encode())


def trailers(error: RankwayError) -> bytes:
    """The block that ends a call with an error; Overloaded carries google.rpc.RetryInfo."""
    message = _shortened(error.message)
    block = _literal(b"grpc-status", str(error.code.value[0]).encode()) + _literal(b"grpc-message", _percent_encoded(message))
    if isinstance(error, Overloaded):
        detail, delay = AnyMessage(), Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status = status_pb2.Status(code=error.code.value[0], message=message, details=[detail])
        block += _literal(b"grpc-status-details-bin", base64.b64encode(status.SerializeToString()).rstrip(b"="))
    return block


def raw_trailers(code: int, message: str, more: list[tuple[str, str | bytes]]) -> bytes:
    """The block that ends a call as another server ended it."""
    block = _literal(b"grpc-status", str(code).encode()) + _literal(b"grpc-message", _percent_encoded(_shortened(message)))
    for name, value in more:
        text = base64.b64encode(value).rstrip(b"=") if isinstance(value, bytes) else value.encode()
        block += _literal(name.encode(), text)
    return block


def is_grpc(content_type: str) -> bool:
    """Whether it is gRPC with protobuf messages; grpc-web, which begins alike, isn't."""
    return _CONTENT_TYPE.fullmatch(content_type) is not None


def metadata(name: str, value: str) -> list[tuple[str, str | bytes]]:
    """A header as gRPC means it: names that end in -bin carry bytes, several with commas between.

    Raises:
        InvalidField: no base64, or letters that gRPC's metadata can't carry.
    """
    if name.endswith("-bin"):
        return [(name, _decoded(name, part.strip(" "))) for part in value.split(",")]
    if not (value.isascii() and (value.isprintable() or not value)):
        raise InvalidField(name, value, "metadata is printable ASCII, or bytes under a name that ends in -bin")
    return [(name, value)]


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4), validate=True)
    except ValueError:
        raise InvalidField(name, text, "is no base64") from None


def timeout_s(value: str) -> float:
    """Seconds of a grpc-timeout header.

    Raises:
        InvalidField: malformed.
    """
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        raise InvalidField("grpc-timeout", value, "must be up to 8 digits and a unit")
    return int(match[1]) * _UNITS_S[match[2]]


def parsed(kind: type[M], message: bytes) -> M:
    """A request's message.

    Raises:
        InvalidField: it is none of this kind.
    """
    try:
        return kind.FromString(message)
    except DecodeError:
        raise InvalidField("message", f"{len(message)} bytes", f"is no {kind.DESCRIPTOR.name}") from None


def framed(message: bytes) -> bytes:
    """A message with its prefix: not compressed, length."""
    return b"\x00" + len(message).to_bytes(4, "big") + message


class MessageReader:
    """Cuts a body into messages.

    Args:
        max_bytes: longest message.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def held(self) -> int:
        """Bytes of a message that isn't complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes.

        Raises:
            RankwayError: compressed, or too long.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= 5:
            size = int.from_bytes(self._buffer[1:5], "big")
            if self._buffer[0]:
                raise RankwayError("a message that is marked as compressed, on a call without grpc-encoding")
            if size > self._max_bytes:
                error = RankwayError(f"a message of {size} bytes, at most {self._max_bytes} are taken")
                error.code = grpc.StatusCode.RESOURCE_EXHAUSTED  # as gRPC's own servers say; no RetryInfo: it won't get shorter
                raise error
            if len(self._buffer) < 5 + size:
                break
            messages.append(bytes(self._buffer[5 : 5 + size]))
            del self._buffer[: 5 + size]
        return messages


def _shortened(text: str) -> str:
    return text.encode(errors="replace")[:MESSAGE_BYTES].decode(errors="ignore")


def _percent_encoded(text: str) -> bytes:
    return b"".join(bytes((c,)) if 0x20 <= c <= 0x7E and c != 0x25 else b"%%%02X" % c for c in text.encode())
