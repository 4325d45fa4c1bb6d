"""gRPC's messages, timeouts and statuses as bytes."""

from __future__ import annotations

from urllib.parse import unquote

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankway.errors import Overloaded, RankwayError
from rankway.h2 import messages


@given(st.text(max_size=300))
def test_status_messages_survive(text: str) -> None:
    """Any message can be a trailer: percent-encoded ASCII without control characters."""
    error = RankwayError(text)
    headers = {str(name): str(value) for name, value in hpack.Decoder().decode(messages.trailers(error))}
    assert headers["grpc-message"].isascii()
    assert headers["grpc-message"].isprintable() or not headers["grpc-message"]
    assert unquote(headers["grpc-message"]) == text
    assert "grpc-status-details-bin" not in headers
    assert "grpc-status-details-bin" in dict(hpack.Decoder().decode(messages.trailers(Overloaded("full"))))


@pytest.mark.parametrize(("text", "seconds"), [("1S", 1.0), ("250m", 0.25), ("3M", 180.0), ("1H", 3600.0), ("5u", 5e-6)])
def test_timeouts(text: str, seconds: float) -> None:
    """grpc-timeout in its units."""
    assert messages.timeout_s(text) == pytest.approx(seconds)


@given(st.lists(st.binary(max_size=50), max_size=10), st.lists(st.integers(1, 40), max_size=30))
def test_messages_are_cut_out_of_any_pieces(whole: list[bytes], sizes: list[int]) -> None:
    """However a body is cut, the messages are the same."""
    body = b"".join(map(messages.framed, whole))
    reader = messages.MessageReader(1000)
    got: list[bytes] = []
    for size in sizes:
        got += reader.feed(body[:size])
        body = body[size:]
    got += reader.feed(body)
    assert got == whole
    assert not reader.held
