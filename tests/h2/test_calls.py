"""Streamed and relayed calls, and what a server bounds, with grpcio's client and over a raw socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from harness.waiting import eventually

from rankway import rpc
from rankway.errors import InvalidField, Mismatch
from rankway.h2 import server as h2_server
from rankway.h2 import streams
from rankway.h2.calls import Call
from rankway.h2.connection import Http2Limits
from rankway.h2.endpoint import Endpoint
from rankway.h2.messages import framed

SERVICE = "rankway.test.Echo"


class Echo:
    """Answers each message with itself and says at the end how many there were. What a test wants to see is kept."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.count = 0
        self.gone = False
        self.room = 0
        call.on_gone = self._gone
        call.on_room = self._room

    def on_message(self, message: bytes) -> None:
        if message == b"bad":
            raise InvalidField("message", "bad", "isn't taken")
        if message == b"bug":
            raise ZeroDivisionError
        self.count += 1
        self.call.send(framed(message))

    def on_end(self) -> None:
        self.call.send(framed(b"%d" % self.count))
        self.call.finish()

    def _gone(self) -> None:
        self.gone = True

    def _room(self) -> None:
        self.room += 1


class Server:
    """An endpoint with Talk and Say in front, and Many, which sends as much as it is asked for, behind."""

    def __init__(self, limits: Http2Limits) -> None:
        inner = rpc.Server([SERVICE])
        many = grpc.unary_stream_rpc_method_handler(self._many)  # type: ignore[arg-type]
        inner.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Many": many}),))
        self.endpoint = Endpoint(inner, limits)
        self.talks: list[Echo] = []
        self.sent = 0

    async def start(self) -> str:
        port = await self.endpoint.bind("127.0.0.1:0")
        await self.endpoint.start({f"/{SERVICE}/Say": self._say}, {f"/{SERVICE}/Talk": self._talk})
        return f"127.0.0.1:{port}"

    @property
    def front(self) -> Any:
        return self.endpoint._front

    def _say(self, call: Call, message: bytes) -> None:
        call.send(framed(message))
        call.finish()

    def _talk(self, call: Call) -> Echo:
        self.talks.append(Echo(call))
        return self.talks[-1]

    async def _many(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(int(request)):
            self.sent += 1
            yield bytes(2**20)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server(Http2Limits())
    yield made
    await made.endpoint.stop(0)


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.open_channel(await server.start()) as channel:
        yield channel


def talk(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(f"/{SERVICE}/Talk")()


async def test_messages_flow_both_ways(channel: grpc.aio.Channel, server: Server) -> None:
    """Each is answered when it comes, large ones too; the end of the client's side is heard."""
    call = talk(channel)
    for message in (b"", b"one", bytes(3_000_000)):
        await call.write(message)
        assert await call.read() == message
    await call.done_writing()
    assert await call.read() == b"3"
    assert await call.code() == grpc.StatusCode.OK
    assert not server.talks[0].gone
    await eventually(lambda: not server.front.calls and not server.front.held)


@pytest.mark.parametrize(("message", "code"), [(b"bad", "INVALID_ARGUMENT"), (b"bug", "INTERNAL")])
async def test_what_a_message_raises_ends_the_call(channel: grpc.aio.Channel, server: Server, message: bytes, code: str) -> None:
    """The talk hears that it is over."""
    call = talk(channel)
    for each in (b"good", message):
        await call.write(each)
    assert await call.read() == b"good"
    assert (await call.code()).name == code
    assert server.talks[0].gone
    assert server.talks[0].count == 1
    assert not server.front.calls


async def test_a_client_that_leaves_is_heard(channel: grpc.aio.Channel, server: Server) -> None:
    """A cancelled call's talk is told once."""
    call = talk(channel)
    await call.write(b"one")
    await call.read()
    call.cancel()
    await eventually(lambda: server.talks[0].gone and not server.front.calls)


async def test_room_is_told(channel: grpc.aio.Channel, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the client doesn't read, the call isn't clear; when all has gone, it is, and the talk hears so."""
    monkeypatch.setattr(streams, "PENDING_BYTES", 64 * 2**20)
    call = talk(channel)
    await call.write(b"one")
    await call.read()
    (echo,) = server.talks
    assert echo.call.clear
    echo.call.send(framed(bytes(30_000_000)))
    assert not echo.call.clear
    assert echo.room == 0
    assert len(await call.read()) == 30_000_000
    assert echo.call.clear
    assert echo.room == 1
    call.cancel()


async def test_abandoned_by_its_owner(channel: grpc.aio.Channel, server: Server) -> None:
    """The client gets the error and the talk hears that it is over."""
    call = talk(channel)
    await call.write(b"one")
    await call.read()
    server.talks[0].call.abandon(Mismatch("no more"))
    assert (await call.code(), await call.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "no more")
    assert server.talks[0].gone


async def test_a_relayed_answer_waits_for_its_reader(channel: grpc.aio.Channel, server: Server) -> None:
    """However long an answer is, a reader who takes his time gets all of it, and no more than windows' worth is under way."""
    call = channel.unary_stream(f"/{SERVICE}/Many")(b"100")
    assert len(await call.read()) == 2**20
    await eventually(lambda: any(not stream.clear for one in server.front.state.connections for stream in one.streams.values()))
    assert server.sent < 60
    got = 1
    while (await call.read()) is not grpc.aio.EOF:
        got += 1
    assert got == 100
    assert await call.code() == grpc.StatusCode.OK


async def test_who_leaves_a_relayed_call_ends_it_behind(channel: grpc.aio.Channel, server: Server) -> None:
    """A cancelled call leaves neither call nor task, and the inner server stops sending."""
    call = channel.unary_stream(f"/{SERVICE}/Many")(b"100")
    await call.read()
    assert len(server.front.calls) == 1
    call.cancel()
    await eventually(lambda: not server.front.calls and not server.front.tasks)
    assert server.sent < 60


async def test_a_call_that_never_brings_its_message_is_ended(
    server: Server, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DEADLINE_EXCEEDED after MESSAGE_S; a streamed call may be silent as long as its method likes."""
    monkeypatch.setattr(h2_server, "MESSAGE_S", 0.0)
    silent, patient = channel.stream_stream(f"/{SERVICE}/Say")(), talk(channel)
    await silent.wait_for_connection()
    await patient.write(b"one")
    await patient.read()
    await eventually(lambda: len(server.front.calls) == 2)
    server.front.sweep()
    assert await silent.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await patient.write(b"two")
    assert await patient.read() == b"two"
    patient.cancel()


async def test_connections_beyond_the_limit_are_closed() -> None:
    """The one too many hears why; the others go on."""
    server = Server(replace(Http2Limits(), connections=1))
    endpoint = await server.start()
    try:
        async with rpc.open_channel(endpoint) as channel:
            assert await channel.unary_unary(f"/{SERVICE}/Say")(b"hello") == b"hello"
            reader, writer = await asyncio.open_connection(*endpoint.split(":"))
            assert b"1 connections are open already" in await asyncio.wait_for(reader.read(), 5)
            writer.close()
            assert await channel.unary_unary(f"/{SERVICE}/Say")(b"again") == b"again"
    finally:
        await server.endpoint.stop(0)
