"""The router's gRPC address: either server behind one interface, chosen by `--grpc-server`."""

from __future__ import annotations

from rankway import rpc
from rankway.h2.connection import Http2Limits
from rankway.h2.endpoint import Endpoint
from rankway.router import grpc_direct, grpc_generation, grpc_router
from rankway.v1 import generate_pb2_grpc, router_pb2_grpc


class GrpcEndpoint:
    """Serves Generation, Router, health and reflection.

    Args:
        direct: answer requests straight on the transport (`h2.endpoint`); False: through grpcio's server alone.
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
        self._front: Endpoint | None = None

    async def start(self, listen: str) -> int:
        """Listen on host:port (port 0: any free one) and return the port.

        Raises:
            OSError: the address can't be had.
        """
        if not self._direct:
            return await self._inner.start(listen)
        self._front = Endpoint(self._inner, Http2Limits())
        port = await self._front.bind(listen, reuse_port=self._reuse_port)
        await self._front.start(self._methods)
        return port

    async def set_ready(self, ready: bool) -> None:
        await self._inner.set_ready(ready)

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new, let calls end for `grace_s`, then end them. Idempotent."""
        await (self._inner if self._front is None else self._front).stop(grace_s)
