"""The router's gRPC address: either server behind one interface, chosen by `--grpc-server`."""

from __future__ import annotations

import asyncio

import grpc.aio

from rankway import rpc
from rankway.router import grpc_direct, grpc_generation, grpc_router
from rankway.router.grpc_server import GrpcServer
from rankway.router.http2 import Http2Limits
from rankway.v1 import generate_pb2_grpc, router_pb2_grpc


class GrpcEndpoint:
    """Serves Generation, Router, health and reflection.

    Args:
        direct: answer requests on `GrpcServer`, with grpcio's server behind it on a loopback port; False: grpcio's alone.
    """

    def __init__(
        self,
        generation: grpc_generation.GenerationServicer,
        routing: grpc_router.RouterServicer,
        *,
        direct: bool,
        reuse_port: bool = False,
    ) -> None:
        self._direct = direct
        self._reuse_port = reuse_port
        self._inner = rpc.Server([grpc_generation.SERVICE_NAME, grpc_router.SERVICE_NAME], reuse_port=reuse_port and not direct)
        generate_pb2_grpc.add_GenerationServicer_to_server(generation, self._inner.grpc)  # type: ignore[arg-type]
        router_pb2_grpc.add_RouterServicer_to_server(routing, self._inner.grpc)  # type: ignore[arg-type]
        self._methods = grpc_direct.methods(generation, routing)
        self._server: GrpcServer | None = None
        self._channel: grpc.aio.Channel | None = None

    async def start(self, listen: str) -> int:
        """Listen on host:port (port 0: any free one) and return the port.

        Raises:
            OSError: the address can't be had.
        """
        if not self._direct:
            return await self._inner.start(listen)
        inner_port = await self._inner.start("127.0.0.1:0")
        self._channel = rpc.open_channel(f"127.0.0.1:{inner_port}")
        self._server = GrpcServer(self._methods, self._channel, Http2Limits())
        return await self._server.start(listen, reuse_port=self._reuse_port)

    async def set_ready(self, ready: bool) -> None:
        await self._inner.set_ready(ready)

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new, let calls end for `grace_s`, then end them. Idempotent."""
        if self._server is None or self._channel is None:
            await self._inner.stop(grace_s)
            return
        # The inner server goes first for the streams that never end by themselves (health's Watch).
        await asyncio.gather(self._server.stop(grace_s), self._inner.stop(min(grace_s, 0.2)))
        await self._channel.close()
