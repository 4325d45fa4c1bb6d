"""`rankway router`: one router, or with --processes N as many that share the ports (SO_REUSEPORT). The first is their parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

from rankway import logs, service
from rankway.router.service import run
from rankway.router.settings import RouterSettings
from rankway.settings import to_argv

log = logs.get("processes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until SIGTERM or SIGINT; returns the exit code."""
    return service.main("router", RouterSettings, _run, argv)


async def _run(settings: RouterSettings, *, ready: service.Ready, stop: asyncio.Event) -> None:
    """One router here; or N in processes of their own, which end together.

    Stop: SIGTERM to every process, each drains, then this one ends.
    """
    if settings.processes == 1:
        await run(settings, ready=ready, stop=stop)
        return
    with contextlib.ExitStack() as held:
        settings = _with_ports(settings, held)
        await _supervise(settings, ready, stop)


async def _supervise(settings: RouterSettings, ready: service.Ready, stop: asyncio.Event) -> None:
    router_id = settings.router_id or f"{socket.gethostname()[:40]}-{os.getpid()}".replace(".", "-")
    processes: list[asyncio.subprocess.Process] = []
    stopping = asyncio.create_task(stop.wait())
    waits: list[asyncio.Task[int]] = []
    try:
        pipes = []
        for number in range(settings.processes):
            process, pipe = await _start(settings, router_id, number)
            processes.append(process)
            pipes.append(pipe)
            waits.append(asyncio.create_task(process.wait()))
        answers = asyncio.create_task(_read_all(pipes))
        await asyncio.wait({answers, stopping, *waits}, return_when=asyncio.FIRST_COMPLETED)
        if answers.done():
            lines = answers.result()
            log.info("processes", addresses=lines)
            ready({"grpc": settings.grpc_listen, "http": settings.http_listen, "metrics": settings.metrics_listen})
        else:
            answers.cancel()
        await asyncio.wait({stopping, *waits}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            raise OSError(f"a router process ended with exit code {next(wait.result() for wait in waits if wait.done())}")
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        await asyncio.gather(*waits, return_exceptions=True)
        stopping.cancel()


async def _start(settings: RouterSettings, router_id: str, number: int) -> tuple[asyncio.subprocess.Process, int]:
    """Start one router; returns its process and the end of the pipe on which it says that it is ready."""
    host, _, port = settings.metrics_listen.rpartition(":")
    metrics_port = int(port) + number if int(port) else 0
    own = replace(
        settings, processes=1, reuse_port=True, router_id=f"{router_id[:58]}-{number}", metrics_listen=f"{host}:{metrics_port}"
    )
    reader, writer = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "rankway",
        "router",
        *to_argv(own),
        env={**os.environ, "RANKWAY_READY_FD": str(writer)},
        pass_fds=(writer,),
    )
    os.close(writer)
    return process, reader


async def _read_all(pipes: list[int]) -> list[str]:
    """What each process says when it is ready."""
    return [await asyncio.to_thread(_read_line, pipe) for pipe in pipes]


def _read_line(pipe: int) -> str:
    with os.fdopen(pipe) as stream:
        return stream.readline().strip()


def _with_ports(settings: RouterSettings, held: contextlib.ExitStack) -> RouterSettings:
    """Settings in which every port is a number: one that was 0 is kept by a socket that never listens."""
    return replace(
        settings,
        grpc_listen=_with_port(settings.grpc_listen, held),
        http_listen=_with_port(settings.http_listen, held),
    )


def _with_port(listen: str, held: contextlib.ExitStack) -> str:
    host, _, port = listen.rpartition(":")
    if int(port):
        return listen
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    keeper = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    keeper.bind((host.strip("[]"), 0))
    return f"{host}:{keeper.getsockname()[1]}"
