"""HTTP/1.1 on uvloop: listening, time limits, draining. What a connection does is in `http_connection`.

One sweep a second looks after every connection's time limit, so that none needs a timer of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate

from rankway import logs
from rankway.router.http_connection import Connection
from rankway.router.http_exchange import Exchange, HttpLimits, ServerState

log = logs.get("http")

_SWEEP_S = 1.0


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class HttpServer:
    """Serves connections until `stop`.

    Args:
        handle: called with each request on the event loop. It must not raise, and must answer the exchange sooner or later.
        limits: sizes and times.
    """

    def __init__(self, handle: Callable[[Exchange], None], limits: HttpLimits) -> None:
        self.state = ServerState(handle, limits)
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, listen: str, *, reuse_port: bool = False) -> Listening:
        """Accept connections on host:port (port 0: any free one). `reuse_port`: several processes share the port.

        Raises:
            OSError: the address can't be had.
        """
        host, _, port = listen.rpartition(":")
        loop = asyncio.get_running_loop()
        self._tick(loop.time())
        try:
            self._server = await loop.create_server(
                lambda: Connection(self.state), host.strip("[]"), int(port), backlog=2048, reuse_port=reuse_port or None
            )
        except (OSError, ValueError) as error:
            raise OSError(f"can't listen on {listen}: {error}") from None
        self._sweeper = asyncio.create_task(self._sweep(), name="http sweep")
        address = self._server.sockets[0].getsockname()
        return Listening(address[0], address[1])

    async def drain(self, grace_s: float) -> None:
        """Accept nothing new, close idle connections, and let running answers end for up to `grace_s` seconds."""
        if self._server is not None:
            self._server.close()
        self.state.draining = True
        for connection in list(self.state.connections):
            connection.close_if_idle()
        try:
            await asyncio.wait_for(self.state.all_closed.wait(), grace_s)
        except TimeoutError:
            if self.state.connections:
                log.warning("answers cut off at the end of the drain", connections=len(self.state.connections))

    async def stop(self, grace_s: float) -> None:
        """Drain, then cut what is left. Returns when no connection and no task is left. Idempotent."""
        await self.drain(grace_s)
        for connection in list(self.state.connections):
            connection.cut()
        await self.state.all_closed.wait()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await asyncio.gather(*self.state.tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = loop.time()
            self._tick(now)
            for connection in [c for c in self.state.connections if c.deadline < now]:
                connection.expire()

    def _tick(self, now: float) -> None:
        self.state.now = now
        self.state.date_header = b"date: " + formatdate(usegmt=True).encode() + b"\r\n"
