"""The client's side of Attach on the wire: against grpcio's own server, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from harness.waiting import eventually
from hypothesis import given, settings
from hypothesis import strategies as st

from rankway import rpc
from rankway.h2 import frames
from rankway.h2.messages import framed
from rankway.router import attach_wire, steps
from rankway.router.attach_wire import BidiCall, CallFailed

PATH = "/rankway.test.Echo/Talk"


@asynccontextmanager
async def grpcio_server(
    talk: Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]],
) -> AsyncIterator[tuple[str, rpc.Server]]:
    """grpcio's server, set up as all of ours are, with one method that takes and gives bytes."""
    server = rpc.Server(["rankway.test.Echo"])
    handler = grpc.stream_stream_rpc_method_handler(talk)  # type: ignore[arg-type]
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("rankway.test.Echo", {"Talk": handler}),))
    port = await server.start("127.0.0.1:0")
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        await server.stop(0)


async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


class Peer:
    """A server on a raw socket: sends what the test says."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.received = bytearray()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        writer.write(frame(frames.SETTINGS))
        while data := await reader.read(2**16):
            self.received += data
        writer.close()

    def send(self, data: bytes) -> None:
        self.writers[-1].write(data)

    def frames(self) -> list[tuple[int, int, bytes]]:
        """(kind, flags, payload) of what the client has sent after its preface."""
        at, found = len(frames.PREFACE), []
        while at + 9 <= len(self.received):
            size = int.from_bytes(self.received[at : at + 3], "big")
            found.append((self.received[at + 3], self.received[at + 4], bytes(self.received[at + 9 : at + 9 + size])))
            at += 9 + size
        return found


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


@asynccontextmanager
async def peer() -> AsyncIterator[tuple[str, Peer]]:
    made = Peer()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", made
    finally:
        for writer in made.writers:
            writer.transport.abort()
        server.close()
        await server.wait_closed()


async def test_messages_come_back_in_order() -> None:
    """What grpcio's server echoes arrives whole and in order: small, empty, and many frames long."""
    async with grpcio_server(echo) as (endpoint, _):
        got: list[bytes] = []
        call = await BidiCall.open(endpoint, PATH, got.append)
        sent = [b"a", b"", b"x" * 5_000_000, *(b"%d" % number for number in range(500)), b"y" * 20_000_000]
        for message in sent:
            call.send(message)
        await eventually(lambda: len(got) == len(sent), 20)
        assert got == sent
        assert not call.waiting
        assert not call.ended.done()
        call.close()
        assert await call.ended == "closed"


async def test_close_cancels() -> None:
    """Closing cancels the call at the server."""
    cancelled = asyncio.Event()

    async def wait(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        context.add_done_callback(lambda _: cancelled.set())
        yield b"here"
        await asyncio.Event().wait()

    async with grpcio_server(wait) as (endpoint, _):
        begun = asyncio.Event()
        call = await BidiCall.open(endpoint, PATH, lambda _: begun.set())
        await asyncio.wait_for(begun.wait(), 5)
        call.close()
        call.send(b"too late")
        await asyncio.wait_for(cancelled.wait(), 5)


@pytest.mark.parametrize("short_way", [True, False])
@pytest.mark.parametrize("pieces", [1, 2])
async def test_a_message_that_is_none_ends_the_call(short_way: bool, pieces: int) -> None:
    """Whichever way it comes: the call is cancelled and the reason says so."""
    async with peer() as (endpoint, server):
        call = await BidiCall.open(endpoint, PATH, lambda message: steps.dispatch(message, {}))
        await eventually(lambda: bool(server.writers))
        if short_way:
            call.short_way = steps.frame_dispatcher({})
        bad = framed(b"\xff\xff")
        for piece in (bad[:7], bad[7:]) if pieces == 2 else (bad,):
            server.send(frame(frames.DATA, piece, stream=1))
        assert (await asyncio.wait_for(call.ended, 5)).startswith("a message is no AttachResponse: ")
        await eventually(lambda: (frames.RST_STREAM, 0, struct.pack(">I", frames.CANCEL)) in server.frames())


@pytest.mark.parametrize("first", [True, False])
async def test_status(first: bool) -> None:
    """The call ends with the server's status and message, before or after its first message."""

    async def refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        if not first:
            yield b"here"
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "epoch 1 is över")

    async with grpcio_server(refuse) as (endpoint, _):
        call = await BidiCall.open(endpoint, PATH, lambda _: None)
        assert await asyncio.wait_for(call.ended, 5) == "FAILED_PRECONDITION: epoch 1 is över"


async def test_unknown_method() -> None:
    """A method that isn't there is told as such."""
    async with grpcio_server(echo) as (endpoint, _):
        call = await BidiCall.open(endpoint, "/no.Such/Method", lambda _: None)
        assert (await asyncio.wait_for(call.ended, 5)).startswith("UNIMPLEMENTED")


async def test_server_ends_the_stream() -> None:
    """A regular end is an end too."""

    async def one(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"last"

    async with grpcio_server(one) as (endpoint, _):
        got: list[bytes] = []
        call = await BidiCall.open(endpoint, PATH, got.append)
        assert await asyncio.wait_for(call.ended, 5) == "the stream has ended"
        assert got == [b"last"]


async def test_server_stops() -> None:
    """A server that goes away ends the call."""
    async with grpcio_server(echo) as (endpoint, server):
        got: list[bytes] = []
        call = await BidiCall.open(endpoint, PATH, got.append)
        call.send(b"x")
        await eventually(lambda: got)
        await server.grpc.stop(0)
        await asyncio.wait_for(call.ended, 5)


async def test_nobody_listens() -> None:
    """A server that can't be reached is a CallFailed that names it."""
    async with peer() as (endpoint, _):
        pass
    with pytest.raises(CallFailed, match=endpoint):
        await BidiCall.open(endpoint, PATH, lambda _: None)


async def test_keepalive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers pings is kept; one that doesn't is given up."""
    monkeypatch.setattr(attach_wire, "KEEPALIVE_S", 0.02)
    monkeypatch.setattr(attach_wire, "KEEPALIVE_TIMEOUT_S", 0.2)
    async with peer() as (endpoint, server):
        call = await BidiCall.open(endpoint, PATH, lambda _: None)
        for number in range(1, 4):
            await eventually(lambda: sum(kind == frames.PING for kind, _, _ in server.frames()) == number)  # noqa: B023
            server.send(frame(frames.PING, b"rankway\0", frames.ACK))
        assert "no answer to a ping" in await asyncio.wait_for(call.ended, 5)


async def test_pings_are_answered() -> None:
    """The server's pings come back with their payload, its settings acknowledged."""
    async with peer() as (endpoint, server):
        call = await BidiCall.open(endpoint, PATH, lambda _: None)
        await eventually(lambda: server.writers)
        server.send(frame(frames.PING, b"12345678"))
        await eventually(lambda: (frames.PING, frames.ACK, b"12345678") in server.frames())
        assert (frames.SETTINGS, frames.ACK, b"") in server.frames()
        call.close()


async def test_flow_control() -> None:
    """No more is sent than the server gives room for, on the stream and on the connection."""
    async with peer() as (endpoint, server):
        call = await BidiCall.open(endpoint, PATH, lambda _: None)

        def sent() -> int:
            return sum(len(payload) for kind, _, payload in server.frames() if kind == frames.DATA)

        call.send(b"x" * 200_000)
        await eventually(lambda: sent() == frames.DEFAULT_WINDOW)
        server.send(frame(frames.WINDOW_UPDATE, struct.pack(">I", 100_000), stream=1))
        server.send(frame(frames.WINDOW_UPDATE, struct.pack(">I", 10_000)))
        await eventually(lambda: sent() == frames.DEFAULT_WINDOW + 10_000)
        server.send(frame(frames.WINDOW_UPDATE, struct.pack(">I", 10**6)))
        await eventually(lambda: sent() == frames.DEFAULT_WINDOW + 100_000)
        assert len(call.waiting) == 1
        server.send(frame(frames.SETTINGS, struct.pack(">HI", frames.INITIAL_WINDOW_SIZE, 10**6)))
        await eventually(lambda: sent() == 200_005)
        assert not call.waiting
        call.close()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (frame(frames.RST_STREAM, struct.pack(">I", 8), stream=1), "reset the stream"),
        (frame(frames.GOAWAY, struct.pack(">II", 1, 11) + b"too_many_pings"), "too_many_pings"),
        (frame(frames.GOAWAY, struct.pack(">II", 0, 0)), "GOAWAY"),
        (frame(frames.DATA, b"\1\0\0\0\0", stream=1), "compressed"),
        (frame(frames.DATA, b"\0\xff\0\0\0", stream=1), "broken protocol"),
        (frame(frames.DATA, b"", frames.END_STREAM, stream=1), "without a status"),
        (frame(frames.CONTINUATION, b"x", stream=1), "out of place"),
        (frame(frames.HEADERS, b"\xff\xff\xff\xff\xff\xff", frames.END_HEADERS, stream=1), "broken protocol"),
        (frame(frames.HEADERS, b"\x88", frames.END_HEADERS | frames.END_STREAM, stream=1), "HTTP status 200"),
        (frame(frames.WINDOW_UPDATE, b"x"), "broken protocol"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "broken protocol"),
        (frame(frames.HEADERS, b"", frames.PADDED, stream=1), "broken protocol"),
        (frame(frames.DATA, b"\x09abc", frames.PADDED, stream=1), "more padding"),
        (frame(frames.DATA, b"x", stream=3), "on stream 3"),
        (frame(frames.HEADERS, b"\x88", stream=1) + frame(frames.PING, b"12345678"), "not finished"),
        (frame(frames.SETTINGS, struct.pack(">HI", frames.MAX_FRAME_SIZE, 0)), "frame size"),
        (frame(frames.SETTINGS, struct.pack(">HI", frames.INITIAL_WINDOW_SIZE, 2**31)), "window"),
        (frame(frames.WINDOW_UPDATE, b"\x7f\xff\xff\xff"), "overflows"),
        (frame(frames.PING, b"x"), "ping"),
        (frame(frames.HEADERS, b"\x88\0\x0bgrpc-status\x02\xc2\xb2", frames.END_HEADERS | 1, stream=1), "\xb2"),
    ],
)
async def test_misbehaving_server(data: bytes, reason: str) -> None:
    """A server that breaks the protocol or the stream ends the call with the reason."""
    async with peer() as (endpoint, server):
        call = await BidiCall.open(endpoint, PATH, lambda _: None)
        await eventually(lambda: server.writers)
        server.send(data)
        assert reason in await asyncio.wait_for(call.ended, 5)


async def test_an_interim_answer_is_passed_over() -> None:
    """Headers of status 1xx come before the answer and end nothing."""
    async with peer() as (endpoint, server):
        got: list[bytes] = []
        call = await BidiCall.open(endpoint, PATH, got.append)
        await eventually(lambda: server.writers)
        server.send(frame(frames.HEADERS, b"\x08\x03103", frames.END_HEADERS, stream=1))
        server.send(frame(frames.HEADERS, b"\x88", frames.END_HEADERS, stream=1) + frame(frames.DATA, b"\0\0\0\0\1x", stream=1))
        await eventually(lambda: got == [b"x"])
        call.close()


async def test_a_server_that_drains_ends_what_runs() -> None:
    """GOAWAY of a grpcio server that stops with grace: messages go on both ways until it ends the call."""
    finish = asyncio.Event()

    async def talk(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request
            if request == b"last":
                await finish.wait()
                return

    async with grpcio_server(talk) as (endpoint, server):
        got: list[bytes] = []
        call = await BidiCall.open(endpoint, PATH, got.append)
        call.send(b"first")
        await eventually(lambda: got == [b"first"])
        stopping = asyncio.create_task(server.grpc.stop(5))
        # The server has said GOAWAY once it takes no new connection's call.
        await eventually(lambda: refused(endpoint))
        call.send(b"last")
        await eventually(lambda: got == [b"first", b"last"])
        assert not call.ended.done()
        finish.set()
        assert await asyncio.wait_for(call.ended, 5) == "the stream has ended"
        await stopping


async def refused(endpoint: str) -> bool:
    try:
        other = await BidiCall.open(endpoint, PATH, lambda _: None)
    except CallFailed:
        return True
    other.close()
    return False


async def test_the_same_address_serves_again() -> None:
    """After a restart of the server a new call on the address works at once."""
    async with grpcio_server(echo) as (endpoint, server):
        first = await BidiCall.open(endpoint, PATH, lambda _: None)
        await server.grpc.stop(0)
        await asyncio.wait_for(first.ended, 5)
        again = rpc.Server(["rankway.test.Echo"])
        handler = grpc.stream_stream_rpc_method_handler(echo)  # type: ignore[arg-type]
        again.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("rankway.test.Echo", {"Talk": handler}),))
        await again.start(endpoint)
        got: list[bytes] = []
        second = await BidiCall.open(endpoint, PATH, got.append)
        second.send(b"x")
        await eventually(lambda: got == [b"x"])
        second.close()
        await again.stop(0)


async def test_a_server_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a server is bounded in bytes, and its socket is closed although it takes nothing."""
    monkeypatch.setattr(attach_wire, "MAX_WAITING_BYTES", 2**20)
    monkeypatch.setattr(attach_wire, "CLOSE_S", 0.05)
    reading, lost = asyncio.Event(), asyncio.Event()

    class Watched(BidiCall):
        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            lost.set()

    async def hang(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"here"
        await reading.wait()

    async with grpcio_server(hang) as (endpoint, _):
        begun = asyncio.Event()
        call = await Watched.open(endpoint, PATH, lambda _: begun.set())
        await asyncio.wait_for(begun.wait(), 5)
        for _ in range(200):
            call.send(bytes(2**18))
            await asyncio.sleep(0)
            if call.ended.done():
                break
        assert "doesn't read" in await asyncio.wait_for(call.ended, 5)
        assert not call.waiting
        await asyncio.wait_for(lost.wait(), 5)
        reading.set()


async def test_steps_of_many_megabytes() -> None:
    """A server that writes 60 MB as fast as it can is read whole, in order, while the client's pings are answered."""

    async def pour(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        for number in range(12):
            yield bytes([number]) * 5_000_000
        async for request in requests:
            yield request

    async with grpcio_server(pour) as (endpoint, _):
        got: list[tuple[int, int]] = []
        call = await BidiCall.open(endpoint, PATH, lambda message: got.append((message[0], len(message))))
        call.send(b"~")
        await eventually(lambda: len(got) == 13, 20)
        assert got == [*((number, 5_000_000) for number in range(12)), (ord("~"), 1)]
        call.close()


class _Nowhere(asyncio.Transport):
    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=10), st.lists(st.integers(1, 400), max_size=20), st.integers(0, 3))
def test_any_cut(messages: list[bytes], cuts: list[int], padding: int) -> None:
    """However messages are cut into frames, and frames into what the socket gives, they arrive whole."""

    async def run() -> list[bytes]:
        got: list[bytes] = []
        call = BidiCall(PATH, "x", got.append)
        call.connection_made(_Nowhere())
        body = b"".join(b"\0" + len(message).to_bytes(4, "big") + message for message in messages)
        wire, at = b"", 0
        for size in [*cuts, len(body)]:
            pad = bytes((padding,)) if padding else b""
            flags = frames.PADDED if padding else 0
            wire += frame(frames.DATA, pad + body[at : at + size] + b"\0" * padding, flags, 1)
            at += size
        for size in [*cuts, len(wire)]:
            call.data_received(wire[:size])
            wire = wire[size:]
        call.close()
        return got

    assert asyncio.run(run()) == messages


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes(pieces: list[bytes]) -> None:
    """Whatever a server sends, nothing is raised."""

    async def run() -> None:
        call = BidiCall(PATH, "x", lambda _: None)
        call.connection_made(_Nowhere())
        for piece in pieces:
            call.data_received(piece)
        call.close()

    asyncio.run(run())
