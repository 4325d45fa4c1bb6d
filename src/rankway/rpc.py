"""gRPC: how every server and channel is set up, and how errors become status codes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from rankway import logs
from rankway.errors import EngineFailed, Overloaded, RankwayError

log = logs.get("rpc")

MAX_MESSAGE_BYTES = 32 * 2**20
"""Both directions, both sides: a prompt of a million tokens is 4 MB packed; longer answers are chunked."""

CHUNK_BYTES = 2**20
"""How much of a long answer goes into one message of a stream."""

_COMMON_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that is gone without a FIN is noticed in 10 s + 5 s. Both sides' options belong together: a server that is
    # pinged more often than it allows answers GOAWAY too_many_pings.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]
_CHANNEL_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long one connection attempt may take, whatever the name says; a busy peer needs more than the back-off's 100 ms.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # One connection per channel object: a new instance behind the same address gets a new channel with no back-off.
    ("grpc.use_local_subchannel_pool", 1),
]


def open_channel(endpoint: str) -> grpc.aio.Channel:
    """A channel to host:port that reconnects by itself. Constructing it does no I/O."""
    return grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)


class Server:
    """A gRPC server with health and reflection.

    Health: "" answers SERVING as long as the process lives (liveness); each service name answers what `set_ready` said last.
    """

    def __init__(self, service_names: Sequence[str], *, reuse_port: bool = False) -> None:
        options = [*_SERVER_OPTIONS, ("grpc.so_reuseport", int(reuse_port))]
        self.grpc = grpc.aio.server(options=options)
        self._names = tuple(service_names)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection((*self._names, "grpc.health.v1.Health", reflection.SERVICE_NAME), self.grpc)

    def bind(self, listen: str) -> int:
        """Take host:port (port 0: any free one) and return the port; calls are served from `start` on.

        Raises:
            OSError: the address can't be had.
        """
        try:
            return self.grpc.add_insecure_port(listen)
        except RuntimeError as error:
            raise OSError(f"can't listen on {listen}: {error}") from None

    async def start(self, listen: str | None = None) -> int:
        """Serve, on `listen` unless `bind` has taken an address; returns the port of `listen`, or 0.

        Raises:
            OSError: the address can't be had.
        """
        port = self.bind(listen) if listen is not None else 0
        await self.set_ready(False)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.grpc.start()
        return port

    async def set_ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new, let calls end for `grace_s`, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RankwayError) -> NoReturn:
    """End the call with the error's status; Overloaded carries google.rpc.RetryInfo."""
    if isinstance(error, Overloaded):
        detail = AnyMessage()
        delay = Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status = status_pb2.Status(code=error.code.value[0], message=error.message, details=[detail])
        context.set_trailing_metadata(rpc_status.to_status(status).trailing_metadata)
    await context.abort(error.code, error.message)


Request = TypeVar("Request")
Response = TypeVar("Response")


def unary(
    method: Callable[[Any, Request, Any], Awaitable[Response]],
) -> Callable[[Any, Request, Any], Awaitable[Response]]:
    """Decorator of a unary handler: RankwayErrors become status codes; a cancelled handler ends with CANCELLED."""

    @functools.wraps(method)
    async def handler(self: Any, request: Request, context: grpc.aio.ServicerContext[Any, Any]) -> Response:
        try:
            return await method(self, request, context)
        except RankwayError as error:
            await abort(context, error)
        except asyncio.CancelledError:
            # An escaped CancelledError leaves the client without a status (grpcio 1.85).
            await context.abort(grpc.StatusCode.CANCELLED, "cancelled")
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("handler failed", method=method.__name__)
            await abort(context, EngineFailed(f"internal error in {method.__name__}"))

    return handler


def stream(
    method: Callable[[Any, Request, Any], AsyncIterator[Response]],
) -> Callable[[Any, Request, Any], AsyncIterator[Response]]:
    """Decorator of a server-streaming handler: as `unary`, and initial metadata goes out at once."""

    @functools.wraps(method)
    async def handler(self: Any, request: Request, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Response]:
        await context.send_initial_metadata(())
        answers = method(self, request, context)
        try:
            async for answer in answers:
                yield answer
        except RankwayError as error:
            await abort(context, error)
        except asyncio.CancelledError:
            await context.abort(grpc.StatusCode.CANCELLED, "cancelled")
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("handler failed", method=method.__name__)
            await abort(context, EngineFailed(f"internal error in {method.__name__}"))
        finally:
            await answers.aclose()  # type: ignore[attr-defined]

    return handler
