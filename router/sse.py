"""Server-sent events: bytes of one event, and JSON strings that no line splitter cuts."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
"""How OpenAI's streams end when they end well."""

_encode = msgspec.json.Encoder().encode


def json_string(text: str) -> bytes:
    """`text` as a JSON string in UTF-8, with the line ends that only Unicode knows (U+0085, U+2028, U+2029) escaped: some
    clients split lines at them, which JSON allows inside strings and SSE doesn't see."""
    encoded = _encode(text)
    if text.isascii():
        return encoded
    return safe_lines(encoded)


def safe_lines(json: bytes) -> bytes:
    """JSON with U+0085, U+2028 and U+2029 escaped; outside of strings JSON has none."""
    return json.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029").replace(b"\xc2\x85", b"\\u0085")


def event(value: object) -> bytes:
    """One event with a JSON value."""
    return b"data: %b\n\n" % safe_lines(_encode(value))
