"""The gRPC server's HTTP/2, frame by frame over a raw socket."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import hpack
import pytest
from harness.fake_worker import LENGTH, STOP, FakeWorker, Seen
from harness.waiting import eventually
from hypothesis import given
from hypothesis import strategies as st

from rankway import rpc
from rankway.errors import Overloaded, RankwayError
from rankway.router import grpc_wire, http2
from rankway.router.grpc_generation import delta_message
from rankway.v1 import generate_pb2, router_pb2, router_pb2_grpc, types_pb2, worker_pb2

GENERATE = "/rankway.v1.Generation/Generate"


class RawClient:
    """Writes frames as a test wants them and reads what comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.encoder, self.decoder = hpack.Encoder(), hpack.Decoder()

    def frame(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        self.writer.write(struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload)

    def greet(self, *settings: tuple[int, int]) -> None:
        self.writer.write(http2.PREFACE)
        self.frame(http2.SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in settings))

    def block(self, path: str = GENERATE, **more: str) -> bytes:
        headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "content-type": "application/grpc"}
        return self.encoder.encode(list((headers | {name.replace("_", "-"): value for name, value in more.items()}).items()))

    def call(self, stream: int, message: Any, **more: str) -> None:
        self.frame(http2.HEADERS, http2.END_HEADERS, stream, self.block(**more))
        self.frame(http2.DATA, http2.END_STREAM, stream, grpc_wire.framed(message.SerializeToString()))

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
            if got_stream == stream and kind == http2.DATA:
                body += payload
            elif got_stream == stream and kind == http2.HEADERS:
                headers = {str(name): str(value) for name, value in self.decoder.decode(payload)}
                if flags & http2.END_STREAM:
                    return body, headers

    async def ends_with(self) -> int:
        """The code of GOAWAY before the connection closes."""
        _, payload = await self.until(http2.GOAWAY)
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
    return [generate_pb2.GenerateResponse.FromString(message) for message in grpc_wire.MessageReader(2**20).feed(body)]


def finish(seen: Seen) -> None:
    seen.delta([1], finish=STOP)


async def test_a_header_block_in_pieces_and_padded_data(raw: RawClient, one_worker: FakeWorker) -> None:
    """CONTINUATION, priority and padding are understood, and a message that comes in single bytes."""
    one_worker.on_start = finish
    raw.greet()
    block = raw.block()
    raw.frame(http2.HEADERS, http2.PADDED | http2.HAS_PRIORITY, 1, bytes([3]) + b"\0\0\0\0\x10" + block[:5] + b"\0\0\0")
    raw.frame(http2.CONTINUATION, 0, 1, block[5:20])
    raw.frame(http2.CONTINUATION, http2.END_HEADERS, 1, block[20:])
    message = grpc_wire.framed(a_request().SerializeToString())
    for i in range(len(message)):
        raw.frame(http2.DATA, http2.PADDED, 1, bytes([2]) + message[i : i + 1] + b"\0\0")
    raw.frame(http2.DATA, http2.END_STREAM, 1)
    body, trailers = await raw.answer(1)
    assert trailers["grpc-status"] == "0"
    assert [message.WhichOneof("event") for message in deltas(body)] == ["routed", "delta", "finished"]


async def test_ping_is_answered_and_settings_acknowledged(raw: RawClient) -> None:
    """PING comes back with its payload, SETTINGS with an ACK."""
    raw.greet((http2.INITIAL_WINDOW_SIZE, 100_000))
    raw.frame(http2.PING, 0, 0, b"12345678")
    assert (await raw.until(http2.SETTINGS))[0] == 0
    assert (await raw.until(http2.SETTINGS))[0] == http2.ACK
    assert await raw.until(http2.PING) == (http2.ACK, b"12345678")


async def test_the_peers_windows_are_respected(raw: RawClient, one_worker: FakeWorker) -> None:
    """No more is sent than stream and connection allow; the rest follows as they open, nothing lost."""
    one_worker.on_start = lambda seen: seen.burst(range(400), LENGTH)
    raw.greet((http2.INITIAL_WINDOW_SIZE, 64))
    raw.call(1, a_request(400))
    body = b""
    trailers: dict[str, str] = {}
    allowed = 64
    while not trailers:
        kind, flags, _, payload = await raw.next()
        if kind == http2.DATA:
            body += payload
            assert len(body) <= allowed
            if len(body) == allowed:
                raw.frame(http2.WINDOW_UPDATE, 0, 1, (500).to_bytes(4, "big"))
                allowed += 500
        elif kind == http2.HEADERS:
            headers = {str(name): str(value) for name, value in raw.decoder.decode(payload)}
            trailers = headers if flags & http2.END_STREAM else {}
    tokens = b"".join(message.delta.token_ids.packed for message in deltas(body))
    assert tokens == b"".join(i.to_bytes(4, "little") for i in range(400))
    assert trailers["grpc-status"] == "0"


async def test_a_window_that_shrinks_below_zero_waits(raw: RawClient, one_worker: FakeWorker) -> None:
    """SETTINGS that lower the window of streams under way hold them until it is above 0 again."""
    raw.greet()
    raw.call(1, a_request(50))
    seen = await one_worker.next_start()
    await raw.until(http2.DATA, 1)
    raw.frame(http2.SETTINGS, 0, 0, struct.pack(">HI", http2.INITIAL_WINDOW_SIZE, 0))
    await raw.until(http2.SETTINGS)
    seen.delta([1], finish=STOP)
    await eventually(raw.router.is_idle)  # type: ignore[attr-defined]
    raw.frame(http2.PING, 0, 0, b"nothing.")
    assert (await raw.next())[0] == http2.PING
    raw.frame(http2.WINDOW_UPDATE, 0, 1, (65_535).to_bytes(4, "big"))
    assert (await raw.answer(1))[1]["grpc-status"] == "0"


async def test_a_reset_reaches_the_engine(raw: RawClient, one_worker: FakeWorker) -> None:
    """RST_STREAM aborts the engine's request; other streams go on."""
    raw.greet()
    raw.call(1, a_request())
    first = await one_worker.next_start()
    raw.call(3, a_request())
    second = await one_worker.next_start()
    raw.frame(http2.RST_STREAM, 0, 1, http2.CANCEL.to_bytes(4, "big"))
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
    monkeypatch.setattr(http2, "PENDING_BYTES", 1000)
    raw.greet((http2.INITIAL_WINDOW_SIZE, 10))
    raw.call(1, a_request(2000))
    seen = await one_worker.next_start()
    seen.delta(list(range(2000)))
    await asyncio.wait_for(seen.aborted.wait(), 2)
    assert (await raw.answer(1))[1]["grpc-status"] == "8"
    await eventually(raw.router.is_idle)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "flags", "stream", "payload", "code"),
    [
        (http2.DATA, 0, 7, b"x", http2.PROTOCOL_ERROR),
        (http2.PUSH_PROMISE, 0, 1, b"", http2.PROTOCOL_ERROR),
        (http2.CONTINUATION, 0, 1, b"", http2.PROTOCOL_ERROR),
        (http2.PING, 0, 0, b"short", http2.FRAME_SIZE_ERROR),
        (http2.SETTINGS, 0, 0, b"12345", http2.FRAME_SIZE_ERROR),
        (http2.SETTINGS, 0, 0, struct.pack(">HI", http2.INITIAL_WINDOW_SIZE, 2**31), http2.FLOW_CONTROL_ERROR),
        (http2.WINDOW_UPDATE, 0, 0, b"\0\0\0\0", http2.PROTOCOL_ERROR),
        (http2.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff", http2.FLOW_CONTROL_ERROR),
        (http2.HEADERS, http2.END_HEADERS, 2, b"\x82", http2.PROTOCOL_ERROR),
        (http2.HEADERS, http2.END_HEADERS, 1, b"\xff\xff\xff\xff", http2.COMPRESSION_ERROR),
        (http2.HEADERS, http2.PADDED, 1, b"\x09x", http2.PROTOCOL_ERROR),
        (http2.RST_STREAM, 0, 1, b"x", http2.FRAME_SIZE_ERROR),
        (http2.DATA, 0, 1, b"x" * 20_000, http2.FRAME_SIZE_ERROR),
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
    assert await raw.ends_with() == http2.PROTOCOL_ERROR


async def test_what_is_no_grpc_is_refused(raw: RawClient) -> None:
    """Another method or content type has an HTTP status; a bad timeout, message or compression a gRPC one."""
    raw.greet()
    raw.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1, raw.block(content_type="text/plain"))
    assert (await raw.answer(1))[1] == {":status": "415"}
    raw.call(3, a_request(), grpc_timeout="soon")
    assert (await raw.answer(3))[1]["grpc-status"] == "3"
    raw.frame(http2.HEADERS, http2.END_HEADERS, 5, raw.block())
    raw.frame(http2.DATA, http2.END_STREAM, 5, grpc_wire.framed(b"\xff\xff"))
    assert "is no GenerateRequest" in (await raw.answer(5))[1]["grpc-message"]
    raw.frame(http2.HEADERS, http2.END_HEADERS, 7, raw.block())
    raw.frame(http2.DATA, http2.END_STREAM, 7, b"\x01\0\0\0\0")
    assert "compressed" in (await raw.answer(7))[1]["grpc-message"]
    raw.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 9, raw.block())
    assert "before its request" in (await raw.answer(9))[1]["grpc-message"]
    raw.call(11, a_request(), path="/rankway.v1.Generation/Nothing")
    assert (await raw.answer(11))[1]["grpc-status"] == "12"


async def test_draining_lets_running_streams_end(raw: RawClient, one_worker: FakeWorker) -> None:
    """GOAWAY first; a stream under way ends well; then the connection closes."""
    raw.greet()
    raw.call(1, a_request())
    seen = await one_worker.next_start()
    stopping = asyncio.create_task(raw.router._server.stop(5))  # type: ignore[attr-defined]
    await raw.until(http2.GOAWAY)
    raw.call(3, a_request())
    _, payload = await raw.until(http2.RST_STREAM, 3)
    assert int.from_bytes(payload, "big") == http2.REFUSED_STREAM
    finish(seen)
    assert (await raw.answer(1))[1]["grpc-status"] == "0"
    await asyncio.wait_for(stopping, 5)
    assert await asyncio.wait_for(raw.reader.read(), 5) is not None


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
    if grpc_wire.is_short(delta, tokens, text.encode()):
        (message,) = deltas(grpc_wire.short_delta(tokens, text.encode()))
        assert message == delta_message(delta)


@given(st.text(max_size=300))
def test_status_messages_survive(text: str) -> None:
    """Any message can be a trailer: percent-encoded ASCII without control characters."""
    error = RankwayError(text)
    headers = {str(name): str(value) for name, value in hpack.Decoder().decode(grpc_wire.trailers(error))}
    assert headers["grpc-message"].isascii()
    assert headers["grpc-message"].isprintable() or not headers["grpc-message"]
    assert unquote(headers["grpc-message"]) == text
    assert "grpc-status-details-bin" not in headers
    assert "grpc-status-details-bin" in dict(hpack.Decoder().decode(grpc_wire.trailers(Overloaded("full"))))


@pytest.mark.parametrize(("text", "seconds"), [("1S", 1.0), ("250m", 0.25), ("3M", 180.0), ("1H", 3600.0), ("5u", 5e-6)])
def test_timeouts(text: str, seconds: float) -> None:
    """grpc-timeout in its units."""
    assert grpc_wire.timeout_s(text) == pytest.approx(seconds)


@given(st.lists(st.binary(max_size=50), max_size=10), st.lists(st.integers(1, 40), max_size=30))
def test_messages_are_cut_out_of_any_pieces(messages: list[bytes], sizes: list[int]) -> None:
    """However a body is cut, the messages are the same."""
    body = b"".join(map(grpc_wire.framed, messages))
    reader = grpc_wire.MessageReader(1000)
    got: list[bytes] = []
    for size in sizes:
        got += reader.feed(body[:size])
        body = body[size:]
    got += reader.feed(body)
    assert got == messages
    assert reader.empty
