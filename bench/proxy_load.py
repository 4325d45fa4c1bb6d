"""The load generator of `make bench-proxy`: closed loops over HTTP and gRPC that cost little themselves.

Clients keep their connection and send the next request when the answer is complete. Tokens are counted by the `~` that begins
each one's text; the digits after it are the microsecond of its step, and the kernel stamps what arrives at a paced
client's socket: the difference is a token's latency, without the time in which this generator was busy with other streams.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
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

READ_BYTES = 2**18
SO_TIMESTAMPNS = 35
"""Linux's; Python has no name for it."""
TIMESPEC = struct.Struct("qq")
CLOCKS_APART_NS = time.time_ns() - time.monotonic_ns()
"""The kernel's stamps are wall clock, the tokens' are not."""

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


class HttpClient:
    """One connection with one request at a time, straight on a socket: the kernel says when something arrived there."""

    def __init__(self, port: int, shape: Shape, tally: Tally, prompts: Prompts) -> None:
        self._shape = shape
        self._tally = tally
        self._prompts = prompts
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpResponseParser
        self._rest = b""
        self._first = True
        self._closed = False
        self._arrived_us = 0
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setblocking(False)
        if shape.pace_ms:
            self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._loop.add_reader(self._socket.fileno(), self._read)
        self.send()

    def send(self) -> None:
        if self._closed:
            return
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
        self._socket.sendall(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(data), data))

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _read(self) -> None:
        if self._shape.pace_ms:
            data, stamps, _, _ = self._socket.recvmsg(READ_BYTES, 64)
            if stamps:
                seconds, ns = TIMESPEC.unpack(stamps[0][2])
                self._arrived_us = (seconds * 10**9 + ns - CLOCKS_APART_NS) // 1000
        else:
            data = self._socket.recv(READ_BYTES)
        if data:
            self._parser.feed_data(data)
        else:
            self._tally.errors += 1
            self.close()

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            self._tally.errors += 1

    def on_body(self, body: bytes) -> None:
        self._rest = count(self._rest + body, self._tally, self._arrived_us)

    def on_message_complete(self) -> None:
        self._tally.requests += 1
        self._rest = b""
        # Not from within the parser, which the next request replaces.
        self._loop.call_soon(self.send)


def count(data: bytes, tally: Tally, arrived_us: int = 0) -> bytes:
    """Count whole tokens, and their latencies if it is known when they arrived; returns what may be the beginning of one."""
    if not arrived_us:
        tally.tokens += data.count(b"~")
        return b""
    at = data.find(b"~")
    while at >= 0:
        if at + STAMP > len(data):
            return data[at:]
        tally.tokens += 1
        tally.latencies_us.append(arrived_us - int(data[at + 1 : at + STAMP]))
        at = data.find(b"~", at + STAMP)
    return b""


async def http(port: int, shape: Shape, cpu: Callable[[], float]) -> Tally:
    """Load the OpenAI API at a port; `cpu` reads the proxy's CPU seconds."""
    tally, prompts = Tally(), Prompts()
    clients = [HttpClient(port, shape, tally, prompts) for _ in range(shape.clients)]
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
                count(message, tally)
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
