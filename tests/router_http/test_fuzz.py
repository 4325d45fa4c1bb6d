"""Random bytes and mangled requests: the server answers or closes, and lives."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import uvloop
from harness.front_door import House, echo, open_house
from hypothesis import given, settings
from hypothesis import strategies as st

_GOOD = b'POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 15\r\n\r\n{"prompt":"hi"}'
_TOKENS = [
    b"GET", b"POST", b"HEAD", b" ", b"/", b"/health", b"/v1/completions", b" HTTP/1.1", b" HTTP/1.0", b"\r\n", b"\r\n\r\n", b"\n",
    b"host: t", b"content-length: 15", b"content-length: 0", b"transfer-encoding: chunked", b"connection: upgrade",
    b"upgrade: h2c", b"expect: 100-continue", b"connection: close", b"0\r\n\r\n", b"5\r\nhello\r\n", b'{"prompt":"hi"}', _GOOD,
]  # fmt: skip

pieces = st.lists(st.one_of(st.sampled_from(_TOKENS), st.binary(max_size=20)), max_size=12)
cuts = st.lists(st.integers(0, 400), max_size=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = [
    "prompt", "messages", "model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "logprobs", "logit_bias",
    "stream", "stream_options", "rankway", "user", "priority", "cache_salt", "response_format", "tools", "chat_template_kwargs",
]  # fmt: skip


async def _send(house: House, data: bytes, at: list[int]) -> None:
    client = await house.connect()
    try:
        for start, end in zip([0, *sorted(at)], [*sorted(at), len(data)], strict=True):
            await client.send(data[start:end])
            await asyncio.sleep(0)
        client.writer.write_eof()
        await client.closed()
    except ConnectionError:
        pass
    finally:
        client.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(pieces, cuts), min_size=10, max_size=20))
def test_any_bytes(cases: list[tuple[list[bytes], list[int]]]) -> None:
    """Whatever arrives, in whatever pieces, the next client is served and nothing is left behind."""

    async def run() -> None:
        async with open_house(script=echo) as house:
            for parts, at in cases:
                await _send(house, b"".join(parts), at)
            assert (await house.request("POST", "/v1/completions", b'{"prompt":"hi"}')).status == 200
            assert house.door.stats.active == 0

    uvloop.run(run())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), values, max_size=5), min_size=10, max_size=20))
def test_any_json(bodies: list[dict[str, Any]]) -> None:
    """Whatever the values of the fields, the answer is a result or an error object of the client's making, never a 500."""

    async def run() -> None:
        async with open_house(script=echo) as house:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                for body in bodies:
                    answer = await house.post(path, json.dumps(body).encode())
                    assert answer.status in (200, 400, 404), (path, body, answer)
                    if answer.status != 200:
                        assert answer.error["message"]
            assert house.door.stats.active == 0

    uvloop.run(run())
