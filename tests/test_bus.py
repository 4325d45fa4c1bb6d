"""NATS connections under faults."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import nats.aio.client
import nats.errors
import pytest
from harness.nats import NatsServer
from harness.proxies import TcpProxy
from harness.waiting import eventually

from rankway import bus
from rankway.errors import InvalidField


async def test_cuts_while_publishing_end_in_a_reconnect(nats_server: NatsServer) -> None:
    """However a connection breaks, `publish` raises nothing but NATS's errors and OSError, and the client comes back."""
    proxy = TcpProxy(lambda: ("127.0.0.1", nats_server.port))
    await proxy.start()
    client, status = await bus.connect(f"nats://{proxy.address}", name="test")
    for _ in range(5):
        cut = asyncio.get_running_loop().call_later(0.02, proxy.cut)
        while client.is_connected:
            with suppress(nats.errors.Error, OSError):
                await client.publish("subject", bytes(10_000))
            await asyncio.sleep(0)
        cut.cancel()
        await eventually(lambda: client.is_connected)
    await client.flush()
    assert status.disconnects >= 5
    assert status.reconnected.is_set()
    await client.close()
    await proxy.stop()


async def test_a_write_to_a_closed_transport_is_a_lost_connection(nats_server: NatsServer) -> None:
    """Between a connection's end and nats-py's notice of it a publish may fail with OSError, never with uvloop's RuntimeError."""
    client, _ = await bus.connect(nats_server.url, name="test")
    client._transport._io_writer.transport.abort()
    client._flusher_task.cancel()
    with suppress(OSError, nats.errors.Error):
        for _ in range(10):
            await client.publish("subject", bytes(900_000))
    await eventually(lambda: client.is_connected)
    await client.close()


async def test_closing_a_broken_connection_raises_nothing(nats_server: NatsServer) -> None:
    """`close` ends quietly when the connection has just been lost with bytes unsent, and when the server hangs."""
    client, _ = await bus.connect(nats_server.url, name="test")
    await client.publish("subject", bytes(100_000))
    client._transport._io_writer.transport.abort()
    await client.close()
    client, _ = await bus.connect(nats_server.url, name="test")
    nats_server.pause()
    with suppress(OSError, nats.errors.Error, TimeoutError):
        async with asyncio.timeout(1):
            for _ in range(100):
                await client.publish("subject", bytes(900_000))
    await client.close()
    nats_server.resume()
    assert client.is_closed


async def test_a_cancellation_that_comes_with_the_answer_is_not_lost() -> None:
    """nats-py's waits end with the cancellation, even at the very moment at which the answer comes."""
    answer = asyncio.get_running_loop().create_future()
    answer.add_done_callback(lambda _: task.cancel())
    task = asyncio.create_task(nats.aio.client.asyncio.wait_for(answer, 5))
    await asyncio.sleep(0)
    answer.set_result(None)
    await asyncio.wait({task})
    assert task.cancelled()


async def test_an_error_from_the_server_does_not_close_the_client(nats_server: NatsServer) -> None:
    """Where the server ends the connection with an error the client connects again, subscriptions included."""
    client, status = await bus.connect(nats_server.url, name="test")
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def hear(message: object) -> None:
        heard.put_nowait(message.data)  # type: ignore[attr-defined]

    await client.subscribe("subject", cb=hear)
    client._transport.write(b"NONSENSE\r\n")
    await asyncio.wait_for(status.reconnected.wait(), 5)
    assert not client.is_closed
    await client.publish("subject", b"back")
    assert await asyncio.wait_for(heard.get(), 5) == b"back"
    await client.close()


async def test_a_subscription_is_confirmed_however_often_the_server_restarts(nats_server: NatsServer) -> None:
    """`subscribe` outlasts a server that dies before it has confirmed, and messages come."""
    client, _ = await bus.connect(nats_server.url, name="test")
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def hear(message: object) -> None:
        heard.put_nowait(message.data)  # type: ignore[attr-defined]

    nats_server.pause()
    subscribing = asyncio.create_task(bus.subscribe(client, "subject", hear))
    try:
        done, _ = await asyncio.wait({subscribing}, timeout=1.5)  # longer than one confirmation may take
        assert not done
        nats_server.restart()
        await asyncio.wait_for(subscribing, 10)
        await client.publish("subject", b"here")
        assert await asyncio.wait_for(heard.get(), 5) == b"here"
    finally:
        await client.close()


async def test_a_name_is_checked(nats_server: NatsServer) -> None:
    """A connection's name has the characters of a NATS token."""
    with pytest.raises(InvalidField, match="name"):
        await bus.connect(nats_server.url, name="a b")
