"""The load generator of `make bench-proxy`: closed loops over HTTP and gRPC that cost little themselves.

Clients keep their connection and send the next request when the answer is complete. Tokens are counted by the `~` that begins
each one's text; the digits after it are the microsecond of its step, so a token's latency is read off its arrival.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import httptools

from rankway import rpc
from rankway.v1 import generate_pb2, router_pb2, types_pb2

STAMP = 14
"""Characters of a token's text."""

PROMPT_CHARS = 256
CONVERSATIONS = 16


@dataclass(slots=True)
class Shape:
    """What one load looks like."""

    clients: int
    tokens: int = 128
    pace_ms: int = 0
    stream: bool = True
    warm_up_s: float = 1.0
    measure_s: float = 5.0


@dataclass(slots=True)
class Tally:
    """What arrived within the measured time."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    tokens: int = 0
    requests: int = 0
    errors: int = 0
    latencies_us: array[int] = field(default_factory=lambda: array("q"))

    def percentile_us(self, share: float) -> float:
        """Of the tokens' latencies; NaN without any."""
        ordered = sorted(self.latencies_us)
        return float(ordered[int(share * (len(ordered) - 1))]) if ordered else float("nan")


class Prompts:
    """Conversations with a common beginning and an end of their own."""

    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)
        letters = "abcdefgh ijklm nopqr stuvwxyz"
        self._heads = ["".join(self._random.choices(letters, k=PROMPT_CHARS - 16)) for _ in range(CONVERSATIONS)]

    def next(self) -> str:
        return f"{self._random.choice(self._heads)} {self._random.getrandbits(60):015x}"


class HttpClient(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self, shape: Shape, tally: Tally, prompts: Prompts) -> None:
        self._shape = shape
        self._tally = tally
        self._prompts = prompts
        self._parser: httptools.HttpResponseParser
        self._rest = b""
        self._first = True
        self.closed = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tally.errors += not self.closed
        self.closed = True

    def send(self) -> None:
        shape = self._shape
        # Paced streams would all begin and end together: the first one's length differs.
        tokens = random.randint(17, shape.tokens) if self._first and shape.pace_ms else shape.tokens
        self._first = False
        body = {
            "model": "bench",
            "messages": [{"role": "user", "content": self._prompts.next()}],
            "stream": shape.stream,
            "max_tokens": tokens,
            "seed": shape.pace_ms,
        }
        data = json.dumps(body).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(data), data))

    def close(self) -> None:
        self.closed = True
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            self._tally.errors += 1

    def on_body(self, body: bytes) -> None:
        self._rest = count(self._rest + body, self._tally, timed=self._shape.pace_ms > 0)

    def on_message_complete(self) -> None:
        self._tally.requests += 1
        self._rest = b""
        if not self.closed:
            # Not from within the parser, which the next request replaces.
            asyncio.get_running_loop().call_soon(self.send)


def count(data: bytes, tally: Tally, *, timed: bool) -> bytes:
    """Count whole tokens; returns what may be the beginning of one."""
    if not timed:
        tally.tokens += data.count(b"~")
        return b""
    now = time.monotonic_ns() // 1000
    at = data.find(b"~")
    while at >= 0:
        if at + STAMP > len(data):
            return data[at:]
        tally.tokens += 1
        tally.latencies_us.append(now - int(data[at + 1 : at + STAMP]))
        at = data.find(b"~", at + STAMP)
    return b""


async def http(port: int, shape: Shape, cpu: Callable[[], float]) -> Tally:
    """Load the OpenAI API at a port; `cpu` reads the proxy's CPU seconds."""
    tally, prompts = Tally(), Prompts()
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(shape.clients):
        _, client = await loop.create_connection(lambda: HttpClient(shape, tally, prompts), "127.0.0.1", port)
        clients.append(client)
    try:
        return await _measure(tally, shape, cpu)
    finally:
        for client in clients:
            client.close()


async def generate(port: int, shape: Shape, cpu: Callable[[], float]) -> Tally:
    """Load Generation.Generate."""
    tally, prompts = Tally(), Prompts()
    # Several connections: one alone would bind all streams to one HTTP/2 flow control.
    channels = [rpc.open_channel(f"127.0.0.1:{port}") for _ in range(4)]
    calls = [channel.unary_stream("/rankway.v1.Generation/Generate") for channel in channels]

    async def client(number: int) -> None:
        tokens = random.randint(17, shape.tokens) if shape.pace_ms else shape.tokens
        while True:
            call = calls[number % len(calls)](_generate_request(prompts.next(), tokens, shape.pace_ms).SerializeToString())
            tokens = shape.tokens
            while (message := await call.read()) is not grpc.aio.EOF:
                count(message, tally, timed=shape.pace_ms > 0)
            tally.requests += 1

    measured = await _with_clients(client, shape, tally, cpu)
    for channel in channels:
        await channel.close()
    return measured


async def route(port: int, shape: Shape, cpu: Callable[[], float]) -> Tally:
    """Load Router.Route; every answer counts as a request."""
    tally, prompts = Tally(), Prompts()
    channel = rpc.open_channel(f"127.0.0.1:{port}")
    call = channel.unary_unary("/rankway.v1.Router/Route")

    async def client(number: int) -> None:
        while True:
            request = router_pb2.RouteRequest(request=_generate_request(prompts.next(), shape.tokens, 0), ttl_ms=500)
            await call(request.SerializeToString())
            tally.requests += 1

    measured = await _with_clients(client, shape, tally, cpu)
    await channel.close()
    return measured


def _generate_request(prompt: str, tokens: int, pace_ms: int) -> generate_pb2.GenerateRequest:
    packed = array("I", list(prompt.encode())).tobytes()
    return generate_pb2.GenerateRequest(
        model="bench",
        token_ids=types_pb2.TokenIds(packed=packed),
        sampling=types_pb2.SamplingParams(max_tokens=tokens, seed=pace_ms),
    )


async def _with_clients(client: Callable[[int], Awaitable[None]], shape: Shape, tally: Tally, cpu: Callable[[], float]) -> Tally:
    async def guarded(number: int) -> None:
        try:
            await client(number)
        except grpc.aio.AioRpcError:
            tally.errors += 1
            raise

    tasks = [asyncio.create_task(guarded(number)) for number in range(shape.clients)]
    try:
        return await _measure(tally, shape, cpu)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _measure(tally: Tally, shape: Shape, cpu: Callable[[], float]) -> Tally:
    """Let the load run; what comes before and after the measured time doesn't count."""
    await asyncio.sleep(shape.warm_up_s)
    tally.tokens = tally.requests = 0
    del tally.latencies_us[:]
    began, cpu_began = time.monotonic(), cpu()
    await asyncio.sleep(shape.measure_s)
    cpu_s, seconds = cpu() - cpu_began, time.monotonic() - began
    return Tally(seconds, cpu_s, tally.tokens, tally.requests, tally.errors, tally.latencies_us[:])
