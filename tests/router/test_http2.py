"""The gRPC server's HTTP/2, frame by frame over a raw socket."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import hpack
import pytest
from harness.fake_worker import LENGTH, STOP, FakeWorker, Seen
from harness.waiting import eventually
from hypothesis import given
from hypothesis import strategies as st

from rankway import rpc
from rankway.h2 import calls, connection, frames, messages, server, streams
from rankway.router import grpc_direct
from rankway.router.grpc_generation import delta_message
from rankway.v1 import generate_pb2, generate_pb2_grpc, router_pb2, router_pb2_grpc, types_pb2, worker_pb2

GENERATE = "/rankway.v1.Generation/Generate"


class RawClient:
    """Writes frames as a test wants them and reads what comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.encoder, self.decoder = hpack.Encoder(), hpack.Decoder()

    def frame(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        self.writer.write(struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload)

    def greet(self, *settings: tuple[int, int]) -> None:
        self.writer.write(frames.PREFACE)
        self.frame(frames.SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in settings))

    def block(self, path: str = GENERATE, **more: str) -> bytes:
        headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "content-type": "application/grpc"}
        return self.encoder.encode(list((headers | {name.replace("_", "-"): value for name, value in more.items()}).items()))

    def call(self, stream: int, message: Any, **more: str) -> None:
        self.frame(frames.HEADERS, frames.END_HEADERS, stream, self.block(**more))
        self.frame(frames.DATA, frames.END_STREAM, stream, messages.framed(message.SerializeToString()))

    async def next(self) -> tuple[int, int, int, bytes]:
        head = await asyncio.wait_for(self.reader.readexactly(9), 5)
        size = int.from_bytes(head[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        return kind, flags, stream, await self.reader.readexactly(size)

    async def until(self, kind: int, stream: int | None = None) -> tuple[int, bytes]:
        """(flags, payload) of the next frame of a kind; others are passed over."""
        while True:
            got, flags, got_stream, payload = await self.next()
            if got == kind and stream in (None, got_stream):
                return flags, payload

    async def answer(self, stream: int) -> tuple[bytes, dict[str, str]]:
        """(body, trailers) of a stream, to its end."""
        body = b""
        while True:
            kind, flags, got_stream, payload = await self.next()
            if got_stream == stream and kind == frames.DATA:
                body += payload
            elif got_stream == stream and kind == frames.HEADERS:
                headers = {str(name): str(value) for name, value in self.decoder.decode(payload)}
                if flags & frames.END_STREAM:
                    return body, headers

    async def ends_with(self) -> int:
        """The code of GOAWAY before the connection closes."""
        _, payload = await self.until(frames.GOAWAY)
        assert await asyncio.wait_for(self.reader.read(), 5) is not None
        return int(struct.unpack(">II", payload[:8])[1])


@pytest.fixture
async def raw(make_router: Any, one_worker: FakeWorker) -> AsyncIterator[RawClient]:
    """A raw connection to a router over one worker."""
    router = await make_router(one_worker, grpc_server="direct")
    host, _, port = (await router.serve()).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    client = RawClient(reader, writer)
    client.router = router  # type: ignore[attr-defined]
    yield client
    writer.close()


def a_request(max_tokens: int = 4) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=range(40)), sampling=types_pb2.SamplingParams(max_tokens=max_tokens)
    )


def deltas(body: bytes) -> list[generate_pb2.GenerateResponse]:
    return [generate_pb2.GenerateResponse.FromString(message) for message in messages.MessageReader(2**20).feed(body)]


def finish(seen: Seen) -> None:
    seen.delta([1], finish=STOP)


async def test_a_header_block_in_pieces_and_padded_data(raw: RawClient, one_worker: FakeWorker) -> None:
    """CONTINUATION, priority and padding are understood, and a message that comes in single bytes."""
    one_worker.on_start = finish
    raw.greet()
    block = raw.block()
    raw.frame(frames.HEADERS, frames.PADDED | frames.HAS_PRIORITY, 1, bytes([3]) + b"\0\0\0\0\x10" + block[:5] + b"\0\0\0")
    raw.frame(frames.CONTINUATION, 0, 1, block[5:20])
    raw.frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[20:])
    message = messages.framed(a_request().SerializeToString())
    for i in range(len(message)):
        raw.frame(frames.DATA, frames.PADDED, 1, bytes([2]) + message[i : i + 1] + b"\0\0")
    raw.frame(frames.DATA, frames.END_STREAM, 1)
    body, trailers = await raw.answer(1)
    assert trailers["grpc-status"] == "0"
    assert [message.WhichOneof("event") for message in deltas(body)] == ["routed", "delta", "finished"]


async def test_ping_is_answered_and_settings_acknowledged(raw: RawClient) -> None:
    """PING comes back with its payload, SETTINGS with an ACK."""
    raw.greet((frames.INITIAL_WINDOW_SIZE, 100_000))
    raw.frame(frames.PING, 0, 0, b"12345678")
    assert (await raw.until(frames.SETTINGS))[0] == 0
    assert (await raw.until(frames.SETTINGS))[0] == frames.ACK
    assert await raw.until(frames.PING) == (frames.ACK, b"12345678")


async def test_the_peers_windows_are_respected(raw: RawClient, one_worker: FakeWorker) -> None:
    """No more is sent than stream and connection allow; the rest follows as they open, nothing lost."""
    one_worker.on_start = lambda seen: seen.burst(range(400), LENGTH)
    raw.greet((frames.INITIAL_WINDOW_SIZE, 64))
    raw.call(1, a_request(400))
    body = b""
    trailers: dict[str, str] = {}
    allowed = 64
    while not trailers:
        kind, flags, _, payload = await raw.next()
        if kind == frames.DATA:
            body += payload
            assert len(body) <= allowed
            if len(body) == allowed:
                raw.frame(frames.WINDOW_UPDATE, 0, 1, (500).to_bytes(4, "big"))
                allowed += 500
        elif kind == frames.HEADERS:
            headers = {str(name): str(value) for name, value in raw.decoder.decode(payload)}
            trailers = headers if flags & frames.END_STREAM else {}
    tokens = b"".join(message.delta.token_ids.packed for message in deltas(body))
    assert tokens == b"".join(i.to_bytes(4, "little") for i in range(400))
    assert trailers["grpc-status"] == "0"


async def test_a_window_that_shrinks_below_zero_waits(raw: RawClient, one_worker: FakeWorker) -> None:
    """SETTINGS that lower the window of streams under way hold them until it is above 0 again."""
    raw.greet()
    raw.call(1, a_request(50))
    seen = await one_worker.next_start()
    seen.delta([0])
    await raw.until(frames.DATA, 1)
    await raw.until(frames.DATA, 1)
    raw.frame(frames.SETTINGS, 0, 0, struct.pack(">HI", frames.INITIAL_WINDOW_SIZE, 0))
    await raw.until(frames.SETTINGS)
    seen.delta([1], finish=STOP)
    await eventually(raw.router.is_idle)  # type: ignore[attr-defined]
    raw.frame(frames.PING, 0, 0, b"nothing.")
    assert (await raw.next())[0] == frames.PING
    raw.frame(frames.WINDOW_UPDATE, 0, 1, (65_535).to_bytes(4, "big"))
    assert (await raw.answer(1))[1]["grpc-status"] == "0"


async def test_a_reset_reaches_the_engine(raw: RawClient, one_worker: FakeWorker) -> None:
    """RST_STREAM aborts the engine's request; other streams go on."""
    raw.greet()
    raw.call(1, a_request())
    first = await one_worker.next_start()
    raw.call(3, a_request())
    second = await one_worker.next_start()
    raw.frame(frames.RST_STREAM, 0, 1, frames.CANCEL.to_bytes(4, "big"))
    await asyncio.wait_for(first.aborted.wait(), 2)
    finish(second)
    assert (await raw.answer(3))[1]["grpc-status"] == "0"
    await eventually(raw.router.is_idle)  # type: ignore[attr-defined]


async def test_a_closed_socket_reaches_the_engine(raw: RawClient, one_worker: FakeWorker) -> None:
    """A connection that goes takes its requests with it."""
    raw.greet()
    for stream in (1, 3, 5):
        raw.call(stream, a_request())
    seen = [await one_worker.next_start() for _ in range(3)]
    raw.writer.transport.abort()
    for each in seen:
        await asyncio.wait_for(each.aborted.wait(), 2)
    await eventually(raw.router.is_idle)  # type: ignore[attr-defined]
    assert raw.router.parts.generation.active == 0  # type: ignore[attr-defined]


async def test_a_client_that_never_reads_is_cut_off(
    raw: RawClient, one_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stream leaves unread is bounded: beyond, its request ends with RESOURCE_EXHAUSTED."""
    monkeypatch.setattr(streams, "PENDING_BYTES", 1000)
    raw.greet((frames.INITIAL_WINDOW_SIZE, 10))
    raw.call(1, a_request(2000))
    seen = await one_worker.next_start()
    for _ in range(2):
        seen.delta(list(range(1000)))
    await asyncio.wait_for(seen.aborted.wait(), 2)
    assert (await raw.answer(1))[1]["grpc-status"] == "8"
    await eventually(raw.router.is_idle)  # type: ignore[attr-defined]


async def test_a_client_that_is_cut_off_at_its_very_end_is_counted_once(
    raw: RawClient, one_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message that ends a request may be the one that its client has no room for: the request has finished, once."""
    monkeypatch.setattr(streams, "PENDING_BYTES", 1000)
    raw.greet((frames.INITIAL_WINDOW_SIZE, 10))
    raw.call(1, a_request(2000))
    (await one_worker.next_start()).delta(list(range(1000)), finish=STOP)
    assert (await raw.answer(1))[1]["grpc-status"] == "8"
    router = raw.router  # type: ignore[attr-defined]
    await eventually(router.is_idle)
    counts = router.parts.dispatcher.counts
    assert (counts.finished, counts.cancelled, counts.completion_tokens) == (1, 0, 1000)
    assert router.parts.generation.active == 0


@pytest.mark.parametrize(
    ("kind", "flags", "stream", "payload", "code"),
    [
        (frames.DATA, 0, 7, b"x", frames.PROTOCOL_ERROR),
        (frames.PUSH_PROMISE, 0, 1, b"", frames.PROTOCOL_ERROR),
        (frames.CONTINUATION, 0, 1, b"", frames.PROTOCOL_ERROR),
        (frames.PING, 0, 0, b"short", frames.FRAME_SIZE_ERROR),
        (frames.SETTINGS, 0, 0, b"12345", frames.FRAME_SIZE_ERROR),
        (frames.SETTINGS, 0, 0, struct.pack(">HI", frames.INITIAL_WINDOW_SIZE, 2**31), frames.FLOW_CONTROL_ERROR),
        (frames.WINDOW_UPDATE, 0, 0, b"\0\0\0\0", frames.PROTOCOL_ERROR),
        (frames.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff", frames.FLOW_CONTROL_ERROR),
        (frames.HEADERS, frames.END_HEADERS, 2, b"\x82", frames.PROTOCOL_ERROR),
        (frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff", frames.COMPRESSION_ERROR),
        (frames.HEADERS, frames.PADDED, 1, b"\x09x", frames.PROTOCOL_ERROR),
        (frames.RST_STREAM, 0, 1, b"x", frames.FRAME_SIZE_ERROR),
        (frames.RST_STREAM, 0, 9, b"\0\0\0\x08", frames.PROTOCOL_ERROR),
        (frames.WINDOW_UPDATE, 0, 9, b"\0\0\0\x08", frames.PROTOCOL_ERROR),
        (frames.SETTINGS, 0, 1, b"", frames.PROTOCOL_ERROR),
        (frames.SETTINGS, 0, 0, struct.pack(">HI", frames.MAX_FRAME_SIZE, 1), frames.PROTOCOL_ERROR),
        (frames.PING, 0, 1, b"12345678", frames.PROTOCOL_ERROR),
        (frames.HEADERS, frames.HAS_PRIORITY | frames.END_HEADERS, 1, b"\x82", frames.FRAME_SIZE_ERROR),
        (frames.DATA, 0, 1, b"x" * 20_000, frames.FRAME_SIZE_ERROR),
    ],
)
async def test_broken_protocol_ends_the_connection_with_its_code(
    raw: RawClient, kind: int, flags: int, stream: int, payload: bytes, code: int
) -> None:
    """Each violation is a GOAWAY that says which, and the end."""
    raw.greet()
    raw.frame(kind, flags, stream, payload)
    assert await raw.ends_with() == code


async def test_what_is_no_http2_is_cut(raw: RawClient) -> None:
    """A browser on the gRPC port gets no answer that it could mistake for one."""
    raw.writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await raw.ends_with() == frames.PROTOCOL_ERROR


async def test_what_is_no_grpc_is_refused(raw: RawClient) -> None:
    """Another method or content type has an HTTP status; a bad timeout, message or compression a gRPC one."""
    raw.greet()
    raw.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, raw.block(content_type="text/plain"))
    assert (await raw.answer(1))[1] == {":status": "415"}
    raw.call(3, a_request(), grpc_timeout="soon")
    assert (await raw.answer(3))[1]["grpc-status"] == "3"
    raw.frame(frames.HEADERS, frames.END_HEADERS, 5, raw.block())
    raw.frame(frames.DATA, frames.END_STREAM, 5, messages.framed(b"\xff\xff"))
    assert "is no GenerateRequest" in (await raw.answer(5))[1]["grpc-message"]
    raw.frame(frames.HEADERS, frames.END_HEADERS, 7, raw.block())
    raw.frame(frames.DATA, frames.END_STREAM, 7, b"\x01\0\0\0\0")
    assert "compressed" in (await raw.answer(7))[1]["grpc-message"]
    raw.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 13, raw.block(content_type="application/grpc-web+proto"))
    assert (await raw.answer(13))[1] == {":status": "415"}
    raw.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 15, raw.block())
    assert "before its request" in (await raw.answer(15))[1]["grpc-message"]
    raw.call(17, a_request(), path="/rankway.v1.Generation/Nothing")
    assert (await raw.answer(17))[1]["grpc-status"] == "12"


async def test_draining_loses_no_stream(raw: RawClient, one_worker: FakeWorker) -> None:
    """GOAWAY twice: what the client opens until it has read the first is served, what comes after the second refused."""
    raw.greet()
    raw.call(1, a_request())
    first = await one_worker.next_start()
    stopping = asyncio.create_task(raw.router._server.stop(5))  # type: ignore[attr-defined]
    assert (await raw.until(frames.GOAWAY))[1][:8] == struct.pack(">II", 2**31 - 1, frames.NO_ERROR)
    _, ping = await raw.until(frames.PING)
    raw.call(3, a_request())
    second = await one_worker.next_start()
    raw.frame(frames.PING, frames.ACK, 0, ping)
    assert (await raw.until(frames.GOAWAY))[1][:8] == struct.pack(">II", 3, frames.NO_ERROR)
    raw.call(5, a_request())
    _, payload = await raw.until(frames.RST_STREAM, 5)
    assert int.from_bytes(payload, "big") == frames.REFUSED_STREAM
    finish(first)
    assert (await raw.answer(1))[1]["grpc-status"] == "0"
    finish(second)
    assert (await raw.answer(3))[1]["grpc-status"] == "0"
    await asyncio.wait_for(stopping, 5)
    assert await asyncio.wait_for(raw.reader.read(), 5) is not None


async def test_draining_waits_for_no_dead_client(raw: RawClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that doesn't answer the ping is closed all the same."""
    monkeypatch.setattr(connection, "CLOSE_S", 0.05)
    raw.greet()
    await raw.until(frames.SETTINGS)
    await asyncio.wait_for(raw.router._server.stop(5), 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "flags", "payload", "code"),
    [
        (frames.DATA, 0, b"x", frames.STREAM_CLOSED),
        (frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, b"\x82", frames.STREAM_CLOSED),
        (frames.WINDOW_UPDATE, 0, b"\x7f\xff\xff\xff", frames.FLOW_CONTROL_ERROR),
        (frames.WINDOW_UPDATE, 0, b"\0\0\0\0", frames.PROTOCOL_ERROR),
    ],
)
async def test_broken_streams_end_alone(
    raw: RawClient, one_worker: FakeWorker, kind: int, flags: int, payload: bytes, code: int
) -> None:
    """What breaks one stream's rules resets that stream and aborts its request; its neighbour on the connection goes on."""
    raw.greet()
    raw.call(1, a_request())
    broken = await one_worker.next_start()
    raw.call(3, a_request())
    sound = await one_worker.next_start()
    raw.frame(kind, flags, 1, payload)
    assert int.from_bytes((await raw.until(frames.RST_STREAM, 1))[1], "big") == code
    await asyncio.wait_for(broken.aborted.wait(), 2)
    finish(sound)
    assert (await raw.answer(3))[1]["grpc-status"] == "0"


@pytest.mark.parametrize(
    "headers",
    [
        [(":method", "POST"), (":scheme", "http")],
        [(":method", "POST"), (":method", "POST"), (":scheme", "http"), (":path", "/")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("Upper", "x")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("connection", "close")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("te", "gzip")],
        [("x", "y"), (":method", "POST"), (":scheme", "http"), (":path", "/")],
        [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":status", "200")],
        *(
            [(":method", "POST"), (":scheme", "http"), (":path", "/"), *(("content-length", length) for length in lengths)]
            for lengths in (["-1"], ["+1"], [""], ["5, 5"], ["5", "5"], ["0x5"], ["\xb2"], ["9" * 5000])
        ),
    ],
)
async def test_malformed_requests_are_reset(raw: RawClient, headers: list[tuple[str, str]]) -> None:
    """Headers that HTTP/2 forbids are a stream error."""
    raw.greet()
    raw.frame(frames.HEADERS, frames.END_HEADERS, 1, raw.encoder.encode(headers))
    assert int.from_bytes((await raw.until(frames.RST_STREAM, 1))[1], "big") == frames.PROTOCOL_ERROR


@pytest.mark.parametrize("path", [GENERATE, "/grpc.health.v1.Health/Check"])
@pytest.mark.parametrize("too_many", [-1, 1])
@pytest.mark.parametrize("end", ["data", "empty data", "trailers"])
async def test_a_body_of_another_length_than_announced_is_reset(
    raw: RawClient, one_worker: FakeWorker, path: str, too_many: int, end: str
) -> None:
    """A body longer or shorter than its content-length is a stream error, however it ends, and its request is aborted."""
    message = messages.framed(a_request().SerializeToString())
    raw.greet()
    raw.frame(frames.HEADERS, frames.END_HEADERS, 1, raw.block(path, content_length=str(len(message) - too_many)))
    raw.frame(frames.DATA, frames.END_STREAM if end == "data" else 0, 1, message)
    if end == "empty data":
        raw.frame(frames.DATA, frames.END_STREAM, 1)
    elif end == "trailers":
        raw.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, raw.encoder.encode([("x-sum", "1")]))
    assert int.from_bytes((await raw.until(frames.RST_STREAM, 1))[1], "big") == frames.PROTOCOL_ERROR
    await eventually(raw.router.is_idle)  # type: ignore[attr-defined]
    one_worker.on_start = finish
    raw.call(3, a_request())
    assert (await raw.answer(3))[1]["grpc-status"] == "0"


async def test_a_body_that_was_announced_and_never_comes_is_reset(raw: RawClient) -> None:
    """Headers that end the stream leave no room for the length that they announce; a length of 0 is true."""
    raw.greet()
    last = frames.END_HEADERS | frames.END_STREAM
    raw.frame(frames.HEADERS, last, 1, raw.block(content_length="5"))
    assert int.from_bytes((await raw.until(frames.RST_STREAM, 1))[1], "big") == frames.PROTOCOL_ERROR
    raw.frame(frames.HEADERS, last, 3, raw.block(content_length="0"))
    assert "before its request" in (await raw.answer(3))[1]["grpc-message"]


async def test_padding_is_no_part_of_the_announced_length(raw: RawClient, one_worker: FakeWorker) -> None:
    """content-length counts the message's bytes alone, in however many frames they come."""
    one_worker.on_start = finish
    message = messages.framed(a_request().SerializeToString())
    raw.greet()
    raw.frame(frames.HEADERS, frames.END_HEADERS, 1, raw.block(content_length=str(len(message))))
    for part in (message[:7], message[7:]):
        raw.frame(frames.DATA, frames.PADDED, 1, bytes([200]) + part + bytes(200))
    raw.frame(frames.DATA, frames.PADDED | frames.END_STREAM, 1, bytes([3]) + bytes(3))
    assert (await raw.answer(1))[1]["grpc-status"] == "0"


async def test_large_header_lists_cost_the_call_only(raw: RawClient, one_worker: FakeWorker) -> None:
    """Above the announced size a call is refused, with a status; the connection, which may be a proxy's, lives on."""
    one_worker.on_start = finish
    raw.greet()
    block = raw.block(**{f"x-{n}": "v" * 1000 for n in range(40)})
    for at in range(0, len(block), frames.FRAME_BYTES):
        first, last = at == 0, at + frames.FRAME_BYTES >= len(block)
        kind = frames.HEADERS if first else frames.CONTINUATION
        raw.frame(kind, frames.END_HEADERS if last else 0, 1, block[at : at + frames.FRAME_BYTES])
    trailers = (await raw.answer(1))[1]
    assert (trailers["grpc-status"], trailers[":status"]) == ("8", "200")
    raw.call(3, a_request(), x_name="caf\xe9")
    assert (await raw.answer(3))[1]["grpc-status"] == "0"


@pytest.mark.parametrize(
    ("kind", "flags", "stream", "payload"),
    [
        (frames.PING, 0, 0, b"12345678"),
        (frames.SETTINGS, 0, 0, b""),
        (frames.PRIORITY, 0, 1, b"\0\0\0\0\0"),
        (0x77, 0, 0, b""),
        (frames.DATA, 0, 1, b""),
        (frames.DATA, frames.PADDED, 1, b"\x02\0\0"),
    ],
)
async def test_floods_end_the_connection(
    raw: RawClient, monkeypatch: pytest.MonkeyPatch, kind: int, flags: int, stream: int, payload: bytes
) -> None:
    """Frames that carry nothing forward are bounded in number."""
    monkeypatch.setattr(connection, "MAX_IDLE_FRAMES", 100)
    raw.greet()
    raw.frame(frames.HEADERS, frames.END_HEADERS, 1, raw.block())
    for _ in range(101):
        raw.frame(kind, flags, stream, payload)
    assert await raw.ends_with() == frames.ENHANCE_YOUR_CALM


async def test_empty_continuations_are_a_flood(raw: RawClient) -> None:
    """A header block is bounded in frames, not in bytes only."""
    raw.greet()
    raw.frame(frames.HEADERS, 0, 1, raw.block())
    for _ in range(connection.MAX_CONTINUATIONS + 1):
        raw.frame(frames.CONTINUATION, 0, 1)
    assert await raw.ends_with() == frames.ENHANCE_YOUR_CALM


async def test_rapid_reset(raw: RawClient, one_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that come to nothing are bounded, beside as many as are answered."""
    monkeypatch.setattr(connection, "MAX_RESETS", 10)
    one_worker.on_start = finish
    raw.greet()
    for stream in range(1, 21, 2):
        raw.call(stream, a_request())
        assert (await raw.answer(stream))[1]["grpc-status"] == "0"
    for stream in range(21, 61, 2):
        raw.frame(frames.HEADERS, frames.END_HEADERS, stream, raw.block())
        raw.frame(frames.RST_STREAM, 0, stream, frames.CANCEL.to_bytes(4, "big"))
    raw.frame(frames.PING, 0, 0, b"patient.")
    assert (await raw.until(frames.PING)) == (frames.ACK, b"patient.")
    raw.frame(frames.HEADERS, frames.END_HEADERS, 61, raw.block())
    raw.frame(frames.RST_STREAM, 0, 61, frames.CANCEL.to_bytes(4, "big"))
    assert await raw.ends_with() == frames.ENHANCE_YOUR_CALM
    await eventually(raw.router.is_idle)  # type: ignore[attr-defined]


async def test_streams_beyond_the_limit_are_refused(make_router: Any, one_worker: FakeWorker) -> None:
    """One more stream than announced is REFUSED_STREAM, which clients may send again; a place that is free is taken."""
    router = await make_router(one_worker, grpc_server="direct")
    host, _, port = (await router.serve()).rpartition(":")
    object.__setattr__(router._server._front._front.state.limits, "concurrent_streams", 1)
    client = RawClient(*await asyncio.open_connection(host, int(port)))
    client.greet()
    client.call(1, a_request())
    seen = await one_worker.next_start()
    client.call(3, a_request())
    assert int.from_bytes((await client.until(frames.RST_STREAM, 3))[1], "big") == frames.REFUSED_STREAM
    finish(seen)
    assert (await client.answer(1))[1]["grpc-status"] == "0"
    client.call(5, a_request())
    finish(await one_worker.next_start())
    assert (await client.answer(5))[1]["grpc-status"] == "0"
    client.writer.close()


async def test_a_decoder_without_a_table_is_told(raw: RawClient, one_worker: FakeWorker) -> None:
    """A client that lowers HEADER_TABLE_SIZE gets a table size update at the start of the next header block."""
    one_worker.on_start = finish
    raw.greet((frames.HEADER_TABLE_SIZE, 0))
    raw.decoder.max_allowed_table_size = 0
    raw.call(1, a_request())
    assert (await raw.answer(1))[1]["grpc-status"] == "0"
    raw.call(3, a_request())
    assert (await raw.answer(3))[1]["grpc-status"] == "0"


async def test_padding_is_given_back(raw: RawClient) -> None:
    """Padding counts for the windows: a long padded message gets as much room again as it took."""
    raw.greet()
    raw.frame(frames.HEADERS, frames.END_HEADERS, 1, raw.block())
    raw.frame(frames.DATA, 0, 1, b"\0" + (2**24).to_bytes(4, "big"))
    sent, allowed, piece = 5, streams.RECEIVE_WINDOW, b"\xff" + bytes(256)
    while sent < 3 * streams.RECEIVE_WINDOW:
        if sent + len(piece) > allowed:
            allowed += int.from_bytes((await raw.until(frames.WINDOW_UPDATE, 1))[1], "big")
            continue
        raw.frame(frames.DATA, frames.PADDED, 1, piece)
        sent += len(piece)


async def test_a_client_that_ignores_its_window_is_reset(raw: RawClient) -> None:
    """Data after a request's message isn't taken, and bounded by the window."""
    raw.greet()
    raw.call(1, a_request(), path="/grpc.health.v1.Health/Watch")
    raw.frame(frames.HEADERS, frames.END_HEADERS, 3, raw.block())
    raw.frame(frames.DATA, 0, 3, messages.framed(a_request().SerializeToString()))
    for _ in range(streams.RECEIVE_WINDOW // 16_000 + 1):
        raw.frame(frames.DATA, 0, 3, bytes(16_000))
    assert int.from_bytes((await raw.until(frames.RST_STREAM, 3))[1], "big") == frames.FLOW_CONTROL_ERROR


async def test_unfinished_messages_are_bounded_together(raw: RawClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a server's share the call that grows is refused; what it held is free again."""
    monkeypatch.setattr(server, "HELD_BYTES", 20_000)
    raw.greet()
    for stream in (1, 3):
        raw.frame(frames.HEADERS, frames.END_HEADERS, stream, raw.block())
        raw.frame(frames.DATA, 0, stream, b"\0" + (2**20).to_bytes(4, "big") + bytes(15_000))
    assert (await raw.answer(3))[1]["grpc-status"] == "8"
    raw.frame(frames.RST_STREAM, 0, 1, frames.CANCEL.to_bytes(4, "big"))
    await eventually(lambda: raw.router._server._front._front.held == 0)  # type: ignore[attr-defined]


async def test_a_client_that_reads_nothing_at_all_is_cut(
    make_router: Any, one_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What flow control doesn't hold back (acknowledgements, errors) is bounded too."""
    monkeypatch.setattr(connection, "UNSENT_BYTES", 100_000)
    monkeypatch.setattr(connection, "TURN_BYTES", 100_000)
    router = await make_router(one_worker, grpc_server="direct")
    host, _, port = (await router.serve()).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1000)
    client = RawClient(reader, writer)
    client.greet()
    state = router._server._front._front.state
    await eventually(lambda: state.connections)
    stream = 1
    while state.connections and stream < 400_000:
        for _ in range(200):
            client.frame(
                frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream, client.block(x="y" * 1000, grpc_timeout="z" * 900)
            )
            stream += 2
        await asyncio.sleep(0)
    assert not state.connections
    writer.close()


@pytest.mark.parametrize(
    ("path", "more", "message", "code", "words"),
    [
        (GENERATE, {"grpc_encoding": "gzip"}, b"\0\0\0\0\0", "12", "gzip"),
        (GENERATE, {}, b"\x01\0\0\0\0", "13", "compressed"),
        (GENERATE, {}, b"\0\x7f\0\0\0", "8", "at most"),
        ("/grpc.health.v1.Health/Check", {}, b"\x01\0\0\0\0", "13", "compressed"),
        ("/grpc.health.v1.Health/Check", {"x_bad": "caf\xe9"}, b"\0\0\0\0\0", "3", "x-bad"),
        ("/grpc.health.v1.Health/Check", {"x_bad_bin": "!"}, b"\0\0\0\0\0", "3", "x-bad-bin"),
        ("/grpc.health.v1.Health/Check", {"x_good_bin": "AAE, AP8="}, b"\0\0\0\0\0", "0", ""),
        ("/grpc.health.v1.Health/Check", {"content_type": "application/grpc+proto"}, b"\0\0\0\0\0", "0", ""),
        ("/grpc.health.v1.Health/Check", {"content_length": "5"}, b"\0\0\0\0\0", "0", ""),
    ],
)
async def test_grpcs_own_rules(raw: RawClient, path: str, more: dict[str, str], message: bytes, code: str, words: str) -> None:
    """Encoding, size and metadata: refused with gRPC's status, in a whole answer that says what is taken."""
    raw.greet()
    raw.frame(frames.HEADERS, frames.END_HEADERS, 1, raw.block(path, **more))
    raw.frame(frames.DATA, frames.END_STREAM, 1, message)
    headers: dict[str, str] = {}
    flags = 0
    while not flags & frames.END_STREAM:
        flags, block = await raw.until(frames.HEADERS, 1)
        headers |= {str(name): str(value) for name, value in raw.decoder.decode(block)}
    assert (headers[":status"], headers["grpc-accept-encoding"], headers["grpc-status"]) == ("200", "identity", code)
    assert words in headers["grpc-message"]


async def test_more_messages_than_a_relayed_call_takes(raw: RawClient) -> None:
    """RELAY_QUEUE messages may wait for the inner server; one more and the call is refused, the next one is served."""
    many, one = (count * b"\0\0\0\0\0" for count in (calls.RELAY_QUEUE + 1, 1))
    raw.greet()
    for stream, body, status in ((1, many, "8"), (3, one, "0")):
        raw.frame(frames.HEADERS, frames.END_HEADERS, stream, raw.block("/grpc.health.v1.Health/Check"))
        raw.frame(frames.DATA, frames.END_STREAM, stream, body)
        assert (await raw.answer(stream))[1]["grpc-status"] == status


async def test_grpcio_without_a_header_table(make_router: Any, one_worker: FakeWorker) -> None:
    """A grpcio client that keeps no table for our headers understands every answer."""
    one_worker.on_start = finish
    router = await make_router(one_worker, grpc_server="direct")
    options = [("grpc.http2.hpack_table_size.decoder", 0)]
    async with grpc.aio.insecure_channel(await router.serve(), options=options) as channel:
        stub = generate_pb2_grpc.GenerationStub(channel)
        for _ in range(3):
            assert [message.WhichOneof("event") async for message in stub.Generate(a_request(), timeout=5)][-1] == "finished"


async def test_a_long_request_arrives_whole(raw: RawClient, one_worker: FakeWorker) -> None:
    """A prompt of megabytes comes through the windows that the server opens."""
    router = raw.router  # type: ignore[attr-defined]
    async with rpc.open_channel(f"127.0.0.1:{raw.writer.get_extra_info('peername')[1]}") as channel:
        request = generate_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(packed=bytes(12 * 2**20)))
        with pytest.raises(Exception, match="max_model_len"):
            await router_pb2_grpc.RouterStub(channel).Route(router_pb2.RouteRequest(request=request), timeout=10)
    assert router.is_idle()


@given(st.binary(max_size=60).map(lambda b: b[: len(b) // 4 * 4]), st.text(max_size=15))
def test_the_short_form_is_what_protobuf_makes_of_it(tokens: bytes, text: str) -> None:
    """Bytes made by hand parse as the message that they stand for."""
    delta = worker_pb2.StepDelta(tokens=tokens, text=text)
    if grpc_direct.is_short(delta, tokens, text.encode()):
        (message,) = deltas(grpc_direct.short_delta(tokens, text.encode()))
        assert message == delta_message(delta)
