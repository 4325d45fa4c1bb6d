"""Header blocks of one HTTP/2 connection (RFC 7541): what a client sends again and again is decoded once."""

from __future__ import annotations

import hpack

Headers = list[tuple[str, str]]

CONTENT_LENGTH = "content-length"

MAX_KNOWN = 64


class HeaderBlocks:
    """Decodes the blocks of a connection, each in its turn: the decoder's table goes on from one to the next.

    A block of nothing but one-byte indices changes no table, and means the same until another kind of block has come. gRPC
    clients send such a block for every call but the first of a method.
    """

    def __init__(self, max_bytes: int) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=max_bytes)
        self._known: dict[bytes, Headers] = {}

    def decode(self, block: bytes) -> Headers:
        """Names and values, not to be changed; bytes beyond ASCII are Latin-1. Raises hpack.HPACKError."""
        known = self._known.get(block)
        if known is not None:
            return known
        pairs = self._decoder.decode(block, raw=True)
        headers = [(str(name, "latin-1"), str(value, "latin-1")) for name, value in pairs]
        if block and min(block) > 0x80 and max(block) < 0xFF:
            if len(self._known) < MAX_KNOWN:
                self._known[bytes(block)] = headers
        else:
            self._known.clear()
        return headers


_PSEUDO = frozenset((":method", ":scheme", ":path", ":authority"))
_REQUIRED = (":method", ":scheme", ":path")
_MAX_LENGTH_DIGITS = 18
_OF_CONNECTIONS = frozenset(("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"))


def size(headers: Headers) -> int:
    """A header list's size as SETTINGS_MAX_HEADER_LIST_SIZE counts it."""
    return sum(len(name) + len(value) + 32 for name, value in headers)


def fault(headers: Headers) -> str:
    """What makes a request malformed (RFC 9113, 8.1.1, 8.2 and 8.3); empty: nothing."""
    seen = set()
    regular = False
    for name, value in headers:
        if name[:1] == ":":
            if regular or name not in _PSEUDO or name in seen:
                return f"pseudo-header {name!r} out of place"
            seen.add(name)
            continue
        regular = True
        if name in _OF_CONNECTIONS or (name == "te" and value != "trailers") or name != name.lower() or not name:
            return f"header {name!r} isn't allowed"
        if name == CONTENT_LENGTH:
            if name in seen or not value.isdecimal() or len(value) > _MAX_LENGTH_DIGITS:
                return f"{name} {value[:40]!r} isn't one number"
            seen.add(name)
    for name in _REQUIRED:
        if name not in seen:
            return f"no {name}"
    return ""


def announced(headers: Headers) -> int | None:
    """How many bytes of body a request without a `fault` announces; None: it doesn't say."""
    for name, value in headers:
        if name == CONTENT_LENGTH:
            return int(value)
    return None
