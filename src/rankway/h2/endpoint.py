"""A gRPC address: `GrpcServer` in front, grpcio's server with health, reflection and all rare calls behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rankway import rpc
from rankway.h2.calls import Method, StreamedMethod
from rankway.h2.connection import Http2Limits
from rankway.h2.server import GrpcServer


class Endpoint:
    """Both servers as one.

    Args:
        inner: not started yet, and without an address: it gets a loopback port of its own.
    """

    def __init__(self, inner: rpc.Server, limits: Http2Limits) -> None:
        self.inner = inner
        self._channel = rpc.open_channel(f"127.0.0.1:{inner.bind('127.0.0.1:0')}")
        self._front = GrpcServer(self._channel, limits)

    async def bind(self, listen: str, *, reuse_port: bool = False) -> int:
        """Take host:port (port 0: any free one) and return the port; calls are served from `start` on.

        Raises:
            OSError: the address can't be had.
        """
        return await self._front.bind(listen, reuse_port=reuse_port)

    async def start(self, methods: Mapping[str, Method], streamed: Mapping[str, StreamedMethod] | None = None) -> None:
        """Serve: `methods` and `streamed` in front (see `GrpcServer.start`), what has been added to `inner` behind."""
        await self.inner.start()
        await self._front.start(methods, streamed or {})

    async def set_ready(self, ready: bool) -> None:
        await self.inner.set_ready(ready)

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new, let calls end for `grace_s`, then end them. Idempotent."""
        # The inner server goes first for the streams that never end by themselves (health's Watch).
        await asyncio.gather(self._front.stop(grace_s), self.inner.stop(min(grace_s, 0.2)))
        await self._channel.close()
