"""Header blocks of one HTTP/2 connection (RFC 7541): what a client sends again and again is decoded once."""

from __future__ import annotations

from typing import cast

import hpack

Headers = list[tuple[str, str]]

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
        """Names and values, not to be changed. Raises hpack.HPACKError or UnicodeDecodeError."""
        known = self._known.get(block)
        if known is not None:
            return known
        headers = cast("Headers", self._decoder.decode(block))
        if block and min(block) > 0x80 and max(block) < 0xFF:
            if len(self._known) < MAX_KNOWN:
                self._known[bytes(block)] = headers
        else:
            self._known.clear()
        return headers
