"""What every service's process does: event loop, signals, metrics endpoint, exit code.

A service is `async def run(settings, *, ready, stop)`: it serves until `stop` is set, then stops in the order that its docstring
gives. `ready` is called once, with the addresses it listens on, when it can serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import uvloop
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

import rankway
from rankway import logs, native
from rankway import settings as settings_module
from rankway.errors import RankwayError

log = logs.get("service")

Ready = Callable[[Mapping[str, str]], None]
"""Called once with {"grpc": "host:port", …} when the service can serve."""


class CommonSettings(Protocol):
    """What `main` needs of every service's settings."""

    @property
    def log_level(self) -> str: ...


S = TypeVar("S", bound=CommonSettings)


def main(
    name: str,
    settings_class: type[S],
    run: Callable[..., Coroutine[Any, Any, None]],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a service in this process until SIGTERM or SIGINT; returns the exit code. A second signal kills it.

    When it is ready, one line `ready` is logged with its addresses; if RANKWAY_READY_FD is set, the same goes there as
    JSON (the launcher waits for it).
    """
    description = (sys.modules[run.__module__].__doc__ or "").strip()
    settings = settings_module.parse(
        settings_class,
        sys.argv[1:] if argv is None else argv,
        os.environ,
        prog=f"rankway {name}",
        description=description,
    )
    logs.configure(settings.log_level, service=name)
    log.info("settings", version=rankway.__version__, pid=os.getpid(), **settings_module.effective(settings))
    log.log(logging.INFO if native.COMPILED else logging.WARNING, "core", core=native.REASON)
    try:
        return uvloop.run(_supervise(name, settings, run))
    except OSError as error:
        log.error("can't start", error=str(error))
        return 1


async def _supervise(name: str, settings: Any, run: Callable[..., Coroutine[Any, Any, None]]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            log.warning("second signal: leaving at once", signal=signal.Signals(number).name)
            os._exit(130)
        log.info("stopping", signal=signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)

    def ready(addresses: Mapping[str, str]) -> None:
        log.info("ready", **addresses)
        _tell_launcher(addresses)
        # What has been loaded stays: a full collection need not go through it, which takes tens of milliseconds.
        gc.collect()
        gc.freeze()

    try:
        await run(settings, ready=ready, stop=stop)
    except OSError as error:
        log.error("stopped", error=str(error))
        return 1
    except Exception as error:  # the last stop before the exit code: the cause is the last log line
        cause = _cause(error)
        # A RankwayError says all there is to say; anything else is a defect and shows where.
        log.error("failed", error=f"{type(cause).__name__}: {cause}", exc_info=None if isinstance(cause, RankwayError) else error)
        return 1
    log.info("stopped")
    return 0


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _tell_launcher(addresses: Mapping[str, str]) -> None:
    fd = os.environ.get("RANKWAY_READY_FD")
    if fd is not None:
        os.write(int(fd), json.dumps(dict(addresses)).encode() + b"\n")
        os.close(int(fd))


class _QuietHandler(WSGIRequestHandler):
    """Logs no requests."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> tuple[str, Callable[[], None]]:
    """Serve /metrics of `registry` on its own thread; returns host:port (port 0: any free one) and what stops it.

    Raises:
        OSError: the address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server_class = type("MetricsServer", (ThreadingWSGIServer,), {"address_family": family})
    server: WSGIServer = make_server(host.strip("[]"), port, make_wsgi_app(registry), server_class, _QuietHandler)
    stopping = threading.Event()

    def serve() -> None:
        # serve_forever looks for its end by the clock: an idle service would wake up 20 times a second to stop without delay.
        while not stopping.is_set():
            server.handle_request()

    thread = threading.Thread(target=serve, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        stopping.set()
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), server.server_port), 1.0):
            thread.join()
        server.server_close()

    return f"{host}:{server.server_port}", close
