"""A service in an operating-system process of its own, to be killed and stopped by real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from rankway.launcher import Child, Console
from rankway.loglines import LineFormat
from rankway.settings import to_argv

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0


class ServiceProcess:
    """A service that may be started again and again, each time a process of its own.

    Args:
        kind: "registry", "indexer", "worker" or "router".
        console: where its log goes.
    """

    def __init__(self, kind: str, name: str, settings: Any, console: Console, lines: LineFormat) -> None:
        self.name = name
        self.kills = 0
        self._argv = [sys.executable, "-P", "-m", "rankway", kind, *to_argv(settings)]
        self._console = console
        self._lines = lines
        self._child: Child | None = None
        self._up: asyncio.Task[None] | None = None
        self._end: asyncio.Task[str] | None = None

    async def start(self) -> None:
        """Start a process for it; there must be none. It is not ready yet."""
        assert self._child is None, f"{self.name} is running"
        child = self._child = await Child.start(self.name, self._argv, self._console, self._lines)
        self._up = asyncio.create_task(child.wait_ready(START_TIMEOUT_S))
        self._end = asyncio.create_task(child.wait())

    @property
    def running(self) -> bool:
        """Started and not killed; perhaps not ready yet, or stopped."""
        return self._child is not None

    @property
    def ready(self) -> bool:
        return self._up is not None and self._up.done() and not self._up.cancelled() and self._up.exception() is None

    async def wait_ready(self) -> None:
        """Raises StartFailed."""
        assert self._up is not None, f"{self.name} has not been started"
        await self._up

    @property
    def addresses(self) -> Mapping[str, str]:
        """Where it listens, once it is ready."""
        assert self._child is not None, f"{self.name} is not running"
        return self._child.addresses

    async def kill(self) -> None:
        """SIGKILL. Not running from now on; returns when there is no process. Harmless if it isn't running."""
        if self._child is None:
            return
        self.check()
        self.kills += 1
        self._child.kill()
        await self._leave()

    def pause(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so many seconds, unless it was killed or resumed before."""
        assert self._child is not None, f"{self.name} is not running"
        os.kill(self._child.pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(seconds, self._resume, self._child)

    def resume(self) -> None:
        """SIGCONT. Harmless if it isn't paused."""
        if self._child is not None:
            self._resume(self._child)

    def check(self) -> None:
        """AssertionError if it has ended by itself, with how and its last lines of output."""
        assert self._end is None or not self._end.done(), f"{self.name} {self._end.result()}"

    async def stop(self) -> None:
        """SIGTERM, its end awaited; AssertionError unless it ends well. Harmless if it isn't running."""
        if self._child is None:
            return
        self.resume()
        await self._child.stop(STOP_TIMEOUT_S)
        how = await self._leave()
        assert how.startswith("ended with exit code 0;"), f"{self.name} {how}"

    def _resume(self, child: Child) -> None:
        if child is self._child and self._end is not None and not self._end.done():
            os.kill(child.pid, signal.SIGCONT)

    async def _leave(self) -> str:
        """Have no process any more; returns how the one that there was has ended."""
        up, end = self._up, self._end
        assert up is not None
        assert end is not None
        self._child = self._up = self._end = None
        up.cancel()
        await asyncio.gather(up, return_exceptions=True)
        return await end
