"""A trivially fast OpenAI server: what stands behind the peers' routers in `make bench-proxy`.

    python bench/proxy_backend.py PORT

An engine of steps: with pace P ms (the request's `seed`) every stream gets a token each P ms, all of them in the same step; with
0 a whole answer is there at once. A token's text is `~` and the microsecond (monotonic clock) of its step.
"""

from __future__ import annotations

import asyncio
import sys
import time

import httptools
import msgspec
import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n"
CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1780000000,'
    b'"model":"bench","choices":[{"index":0,"delta":{"content":"%b"},"logprobs":null,"finish_reason":%b}]}\n\n'
)
WHOLE = (
    b'{"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion","created":1780000000,"model":"bench",'
    b'"choices":[{"index":0,"message":{"role":"assistant","content":"%b"},"logprobs":null,"finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":256,"completion_tokens":%d,"total_tokens":%d}}'
)
MODELS = (
    b'{"object":"list","data":[{"id":"bench","object":"model","created":1780000000,"owned_by":"bench","max_model_len":32768}]}'
)
INFO = b'{"model_path":"bench","served_model_name":"bench","tokenizer_path":"","is_generation":true,"version":"0","dp_size":1}'


class Body(msgspec.Struct):
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int = 0


def stamp() -> bytes:
    """A token's text: 14 characters."""
    return b"~%013d" % (time.monotonic_ns() // 1000)


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine:
    """Steps all paced streams together, one timer per pace."""

    def __init__(self) -> None:
        self._running: dict[int, list[Connection]] = {}

    def add(self, connection: Connection, pace_ms: int) -> None:
        running = self._running.setdefault(pace_ms, [])
        running.append(connection)
        if len(running) == 1:
            loop = asyncio.get_running_loop()
            loop.call_at(loop.time() + pace_ms / 1000, self._step, pace_ms, loop.time() + pace_ms / 1000)

    def _step(self, pace_ms: int, due: float) -> None:
        text = stamp()
        running = [connection for connection in self._running[pace_ms] if connection.token(text)]
        self._running[pace_ms] = running
        if running:
            due += pace_ms / 1000
            asyncio.get_running_loop().call_at(due, self._step, pace_ms, due)


class Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""
        self._left = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._left = 0

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url.startswith(b"/v1/chat/completions"):
            self._complete(msgspec.json.decode(self._body, type=Body))
        else:
            self._answer(MODELS if self._url.startswith(b"/v1/models") else INFO)

    def token(self, text: bytes) -> bool:
        """One step; returns whether there are more."""
        if self._left <= 0:
            return False
        self._left -= 1
        if self._left:
            self._transport.write(framed(CHUNK % (text, b"null")))
            return True
        self._transport.write(framed(CHUNK % (text, b'"length"')) + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return False

    def _complete(self, body: Body) -> None:
        tokens = body.max_completion_tokens or body.max_tokens or 16
        if not body.stream:
            self._answer(WHOLE % (stamp() * tokens, tokens, 256 + tokens))
            return
        self._transport.write(HEAD % (b"text/event-stream; charset=utf-8", b"transfer-encoding: chunked\r\n"))
        if body.seed:
            self._left = tokens
            self._engine.add(self, body.seed)
            return
        text = stamp()
        answer = framed(CHUNK % (text, b"null")) * (tokens - 1) + framed(CHUNK % (text, b'"length"'))
        self._transport.write(answer + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _answer(self, body: bytes) -> None:
        self._transport.write(HEAD % (b"application/json", b"content-length: %d\r\n" % len(body)) + body)


async def main(port: int) -> None:
    engine = Engine()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
