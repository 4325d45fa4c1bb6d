"""NATS: one way to connect, and the subjects.

The client never gives up reconnecting. Callbacks only set flags and count: an exception in one could stop reconnection.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

import nats
import nats.aio.client
import nats.aio.subscription
import nats.aio.transport
import nats.js.client
import nats.js.kv
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport

from rankway import logs
from rankway.ranks import check_name

log = logs.get("bus")

T = TypeVar("T")

MAX_PAYLOAD_BYTES = 1_000_000
"""Most bytes that we put into one message: a little under nats-server's default of 1 MiB."""


CONFIRM_TIMEOUT_S = 1.0
"""How long the server may take to confirm a subscription before it is asked again."""

CLOSE_TIMEOUT_S = 2.0
"""How long closing a connection may take, however slow the server is."""


def kv_subject(dp_group: str, worker_id: str = "*", dp_rank: int | str = "*") -> str:
    """Subject of KvEventBatch; "*" stands for all."""
    return f"rankway.v1.{dp_group}.kv.{worker_id}.{dp_rank}"


def load_subject(dp_group: str, worker_id: str = "*", dp_rank: int | str = "*") -> str:
    """Subject of RankLoad; "*" stands for all."""
    return f"rankway.v1.{dp_group}.load.{worker_id}.{dp_rank}"


def active_subject(dp_group: str, router_id: str = "*") -> str:
    """Subject of ActiveUpdate; "*" stands for all."""
    return f"rankway.v1.{dp_group}.active.{router_id}"


@dataclass(slots=True)
class BusStatus:
    """What the client's callbacks saw. `reconnected` is set after each reconnect: whoever repairs waits for it and clears it."""

    disconnects: int = 0
    slow_consumer_drops: int = 0
    reconnected: asyncio.Event = field(default_factory=asyncio.Event)


class _Asyncio(ModuleType):
    """asyncio as nats-py sees it. Python 3.11's wait_for forgets a cancellation that comes together with what it waits for: a
    task that is cancelled while it waits for NATS's answer would go on for ever. This one is Python 3.12's.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def wait_for(awaitable: Awaitable[T], timeout: float | None) -> T:
        async with asyncio.timeout(timeout):
            return await awaitable


if sys.version_info < (3, 12):
    for module in (nats.aio.client, nats.aio.subscription, nats.aio.transport, nats.js.client, nats.js.kv):
        vars(module)["asyncio"] = _Asyncio("asyncio")


class _Transport(TcpTransport):
    """uvloop raises RuntimeError where asyncio raises OSError: on a write to a connection that has just been closed.

    nats-py takes that for a bug of its caller: its reconnecting would end, and `publish` would raise it.
    """

    def __bool__(self) -> bool:
        """True before it is connected, too: nats-py replaces a false one by its own."""
        return True

    closing = False
    """The client is being closed: what can't be written any more doesn't matter."""

    def write(self, payload: bytes) -> None:
        with self._lost_connection():
            super().write(payload)  # type: ignore[no-untyped-call]

    def writelines(self, payload: list[bytes]) -> None:
        with self._lost_connection():
            super().writelines(payload)  # type: ignore[no-untyped-call]

    async def drain(self) -> None:
        with self._lost_connection():
            await super().drain()  # type: ignore[no-untyped-call]

    def abort(self) -> None:
        """Close without sending what is left: a peer that doesn't read would keep the socket open."""
        if self._io_writer is not None:
            self._io_writer.transport.abort()

    @contextlib.contextmanager
    def _lost_connection(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            if not self.closing:
                raise ConnectionResetError(str(error)) from None


class _Client(Client):
    """A client that is closed by `close` alone: an error that the server reports makes it reconnect, too.

    `close` takes `CLOSE_TIMEOUT_S` at most and raises nothing, whatever state the connection is in.
    """

    def __init__(self) -> None:
        super().__init__()
        self._safe_transport = _Transport()  # type: ignore[no-untyped-call]
        self._transport = self._safe_transport

    async def close(self) -> None:
        self._safe_transport.closing = True
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await super().close()
        except TimeoutError:
            log.warning("NATS doesn't take what is left; connection dropped")
            self._safe_transport.abort()
            await asyncio.sleep(0)

    async def _flush_pending(self, force_flush: bool = False) -> object:
        # nats-py swallows a cancellation here: a publisher that is cancelled while the server hangs would go on.
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        flushed: object = await super()._flush_pending(force_flush)
        if task and task.cancelling() > before:
            raise asyncio.CancelledError
        return flushed

    async def _process_err(self, err_msg: str) -> None:
        error = nats.errors.Error(f"nats: {err_msg}")
        if "permissions violation" in err_msg.lower():
            await self._error_cb(error)
        else:
            await self._process_op_err(error)


async def connect(url: str, *, name: str, pending_bytes: int = 8 * 2**20) -> tuple[Client, BusStatus]:
    """A connected client and its status. Waits for the first connection for as long as it takes.

    Args:
        url: nats://host:port, or several with commas between.
        name: shown in the server's monitoring.
        pending_bytes: outbound bytes kept while disconnected; beyond, publish raises OutboundBufferLimitError.
    """
    check_name("name", name)
    status = BusStatus()
    client = _Client()
    waiting = False

    async def on_error(error: Exception) -> None:
        nonlocal waiting
        if not waiting and not client.is_connected and status.disconnects == 0:
            waiting = True
            log.warning("NATS can't be reached; trying on", url=url, error=str(error) or type(error).__name__)
        if isinstance(error, nats.errors.SlowConsumerError):
            status.slow_consumer_drops += 1
        log.debug("NATS client error", error=str(error))

    async def on_disconnected() -> None:
        if client.is_closed:  # closed on purpose
            return
        status.disconnects += 1
        log.warning("NATS connection lost; reconnecting", url=url)

    async def on_reconnected() -> None:
        status.reconnected.set()
        log.info("NATS connection is back", url=url)

    connecting = asyncio.create_task(
        client.connect(
            servers=url.split(","),
            name=name,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.25,  # type: ignore[arg-type]  # a float works; nats-py says int
            allow_reconnect=True,
            connect_timeout=2,
            ping_interval=10,
            max_outstanding_pings=2,
            pending_size=pending_bytes,
            error_cb=on_error,
            disconnected_cb=on_disconnected,
            reconnected_cb=on_reconnected,
        )
    )
    try:
        await asyncio.wait((connecting,))
        connecting.result()
    finally:
        # One cancellation may be lost: nats-py waits with wait_for, which on Python 3.11 forgets it when an attempt fails at
        # that very moment, and tries on for ever.
        while not connecting.done():
            connecting.cancel()
            await asyncio.wait((connecting,), timeout=0.05)
    return client, status


async def subscribe(
    client: Client,
    subject: str,
    on_message: Callable[[Msg], Awaitable[None]],
    *,
    pending_messages: int = 65_536,
    pending_bytes: int = 128 * 2**20,
) -> None:
    """Subscribe, and return once the server knows of it, for as long as that takes: connections may be lost meanwhile.

    Beyond the pending limits the client drops messages; `BusStatus.slow_consumer_drops` counts them.

    Raises:
        nats.errors.ConnectionClosedError: the client has been closed.
    """
    with contextlib.suppress(OSError):  # subscribed all the same as soon as the connection is back
        await client.subscribe(subject, cb=on_message, pending_msgs_limit=pending_messages, pending_bytes_limit=pending_bytes)
    while True:
        try:
            await client.flush(timeout=CONFIRM_TIMEOUT_S)  # type: ignore[arg-type]  # a float works; nats-py says int
        except (nats.errors.Error, OSError):
            if client.is_closed:
                raise
            await asyncio.sleep(0.1)
        else:
            return
