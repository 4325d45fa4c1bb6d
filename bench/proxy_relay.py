"""A plain grpc.aio relay of Generation.Generate: bytes in, bytes out, workers in turn. What a gRPC proxy in Python costs.

python bench/proxy_relay.py PORT ENDPOINT [ENDPOINT …]
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

import grpc
import grpc.aio
import uvloop

from rankway import rpc

METHOD = "/rankway.v1.Generation/Generate"


async def main(port: int, endpoints: list[str]) -> None:
    calls = [rpc.open_channel(endpoint).unary_stream(METHOD) for endpoint in endpoints]
    turn = itertools.cycle(calls)

    async def generate(request: bytes, context: Any) -> None:
        call = next(turn)(request)
        while (message := await call.read()) is not grpc.aio.EOF:
            await context.write(message)

    server = grpc.aio.server()
    handlers = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("rankway.v1.Generation", handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2:]))
