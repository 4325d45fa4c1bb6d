"""Header blocks that come again are what the decoder would make of them."""

from __future__ import annotations

import hpack
from hypothesis import given
from hypothesis import strategies as st

from rankway.h2.headers import HeaderBlocks

names = st.sampled_from([":method", ":path", "content-type", "te", "grpc-timeout", "x-a", "x-b"])
values = st.sampled_from(["POST", "/rankway.v1.Router/Route", "application/grpc", "trailers", "1S", "a", "b" * 40])
requests = st.lists(st.lists(st.tuples(names, values), min_size=1, max_size=6), max_size=4)


@given(requests, st.lists(st.integers(0, 3), max_size=30), st.sampled_from([0, 100, 4096]))
def test_the_same_as_without_memory(requests: list[list[tuple[str, str]]], order: list[int], table_size: int) -> None:
    """Whatever requests come in whatever order, and however small the table: each block gives what a plain decoder gives."""
    encoder, plain, blocks = hpack.Encoder(), hpack.Decoder(), HeaderBlocks(65536)
    encoder.header_table_size = table_size
    for number in order:
        if number < len(requests):
            block = encoder.encode(requests[number])
            assert blocks.decode(block) == plain.decode(block)


def test_a_block_that_comes_again_is_not_decoded_again() -> None:
    """The second block of only indices gives the same list object."""
    encoder, blocks = hpack.Encoder(), HeaderBlocks(65536)
    request = [(":method", "POST"), (":path", "/a"), ("te", "trailers")]
    first = blocks.decode(encoder.encode(request))
    second = blocks.decode(encoder.encode(request))
    assert first == second
    assert blocks.decode(encoder.encode(request)) is second
