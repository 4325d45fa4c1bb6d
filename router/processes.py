"""`rankway router`: one router, or with --processes N as many that share the ports (SO_REUSEPORT). The first is their parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rankway import logs, service
from rankway.processes import Process
from rankway.router.service import run
from rankway.router.settings import RouterSettings
from rankway.settings import to_argv

log = logs.get("processes")

KILL_AFTER_S = 10.0
"""A process that hasn't ended so long after its drain is killed."""


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
    children = [_Child(_argv(settings, router_id, number)) for number in range(settings.processes)]
    ended = [child.ended for child in children]
    stopping = asyncio.create_task(stop.wait())
    over: set[asyncio.Future[Any]] = {stopping, *ended}
    try:
        answers = asyncio.gather(*(child.answer for child in children))
        await asyncio.wait({answers, *over}, return_when=asyncio.FIRST_COMPLETED)
        if answers.done() and all(answers.result()):
            log.info("processes", addresses=answers.result())
            ready({"grpc": settings.grpc_listen, "http": settings.http_listen, "metrics": settings.metrics_listen})
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            raise OSError(f"a router process ended with exit code {next(e.result() for e in ended if e.done())}")
    finally:
        for child in children:
            child.terminate()
        await asyncio.wait(ended, timeout=settings.drain_timeout_s + KILL_AFTER_S)
        for child in children:
            if not child.ended.done():
                child.kill()
        await asyncio.wait(ended)
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)


class _Child(Process):
    """One router process."""

    def __init__(self, argv: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[str] = loop.create_future()
        """What it says when it is ready; empty: it ended before."""
        reader, writer = os.pipe()
        try:
            super().__init__(argv, pass_fds=(writer,), environ={"RANKWAY_READY_FD": str(writer)})
        finally:
            os.close(writer)
        threading.Thread(target=self._listen, args=(loop, reader), name="router process", daemon=True).start()

    def _listen(self, loop: asyncio.AbstractEventLoop, reader: int) -> None:
        with os.fdopen(reader) as pipe:
            line = pipe.readline().strip()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self.answer.set_result, line)


def _argv(settings: RouterSettings, router_id: str, number: int) -> list[str]:
    """The command of one router."""
    host, _, port = settings.metrics_listen.rpartition(":")
    metrics_port = int(port) + number if int(port) else 0
    own = replace(
        settings, processes=1, reuse_port=True, router_id=f"{router_id[:58]}-{number}", metrics_listen=f"{host}:{metrics_port}"
    )
    return [sys.executable, "-P", "-m", "rankway", "router", *to_argv(own)]


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
