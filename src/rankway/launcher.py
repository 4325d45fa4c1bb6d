"""Child processes of `rankway up`: how one is started, heard, told to stop and never left behind.

Each child leads a process group of its own, so a terminal's Ctrl-C reaches only the launcher, and whatever a child has started
(an engine's processes) can be ended with it. On Linux the kernel sends a child SIGTERM when the launcher dies, even by kill -9.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping

from rankway.loglines import LineFormat
from rankway.processes import Process

LAST_LINES = 10
"""How many log lines are kept of each child, for the message about its death."""

_MAX_LINE_BYTES = 64 * 1024
_QUEUED_LINES = 10_000


class StartFailed(Exception):
    """A child ended, or wasn't ready in time, while it started; the message says which and why."""


class Console:
    """Standard output for the launcher and all children's logs, written by a thread of its own.

    A terminal that is stopped (Ctrl-S) or a slow pipe must not hold the services up: at most 10,000 lines wait, newer ones are
    dropped and counted. Output that nobody reads any more is dropped for good.
    """

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(_QUEUED_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="console", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Queue one or more whole lines."""
        if self._dropped:
            text = f"({self._dropped} log lines dropped: the terminal is too slow)\n{text}"
        try:
            self._lines.put_nowait(text + "\n")
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, for at most `timeout_s`."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (text := self._lines.get()) is not None:
                sys.stdout.write(text)
                if self._lines.empty():
                    sys.stdout.flush()
            sys.stdout.flush()
            return
        # Nobody reads: keep the queue from filling up.
        while self._lines.get() is not None:
            pass


class Child:
    """One running process; `Child.start` makes it.

    Attributes:
        name, argv: as started.
        addresses: what it told when it was ready, e.g. {"grpc": "127.0.0.1:50051"}.
    """

    def __init__(self, name: str, argv: list[str], console: Console, lines: LineFormat) -> None:
        self.name = name
        self.argv = argv
        self.addresses: Mapping[str, str] = {}
        self._console = console
        self._lines = lines
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._log_ended = asyncio.Event()
        self._ready: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._process: Process

    @classmethod
    async def start(
        cls,
        name: str,
        argv: list[str],
        console: Console,
        lines: LineFormat,
        environ: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a process and listen to its log. `environ` is added to this process's environment.

        Raises:
            StartFailed: it can't be executed.
        """
        child = cls(name, argv, console, lines)
        log_read, log_write = os.pipe()
        ready_read, ready_write = os.pipe()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: _Lines(child._heard, child._log_ended.set), os.fdopen(log_read, "rb", 0))
        await loop.connect_read_pipe(lambda: _Lines(child._told, child._told_nothing), os.fdopen(ready_read, "rb", 0))
        try:
            child._process = Process(
                argv,
                output=log_write,
                pass_fds=(ready_write,),
                environ={**(environ or {}), "RANKWAY_READY_FD": str(ready_write)},
            )
        except OSError as error:
            raise StartFailed(f"{name}: can't start {argv[0]}: {error}") from None
        finally:
            os.close(log_write)
            os.close(ready_write)
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait for the child to say that it is ready.

        Raises:
            StartFailed: it ended before, or took longer than `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                told = await asyncio.shield(self._ready)
        except TimeoutError:
            raise StartFailed(f"{self.name}: not ready after {timeout_s:.0f} s") from None
        if not told:
            raise StartFailed(f"{self.name} {await self.wait()}")
        self.addresses = json.loads(told)

    async def wait(self) -> str:
        """Wait for the process to end and for the last of its log, and end what it left in its process group.

        Returns:
            How it ended, in words, with its last log lines below.
        """
        code = await asyncio.shield(self._process.ended)
        self.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._log_ended.wait(), 1.0)
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        shown = "".join(f"\n    {line}" for line in self._last_lines) or "\n    (none)"
        return f"{how}; its last log lines:{shown}"

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL if it hasn't ended after `timeout_s`. Idempotent."""
        if not self._process.ended.done():
            self._process.terminate()
            await asyncio.wait((self._process.ended,), timeout=timeout_s)
            if not self._process.ended.done():
                self._console.write(f"{self.name} did not end within {timeout_s:.0f} s of SIGTERM: killed")
                self.kill()
        await self.wait()

    def kill(self) -> None:
        """SIGKILL to the process and to all that it started in its group. Harmless when there is none."""
        self._process.kill()

    def _heard(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        shown = self._lines.render(self.name, text)
        if shown is not None:
            self._console.write(shown)
            self._last_lines.append(shown)

    def _told(self, line: bytes) -> None:
        if not self._ready.done():
            self._ready.set_result(line)

    def _told_nothing(self) -> None:
        self._told(b"")


class _Lines(asyncio.Protocol):
    """Splits a pipe into lines; a line longer than 64 KiB comes in parts."""

    def __init__(self, on_line: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._on_line = on_line
        self._on_end = on_end
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            self._on_line(line)
        if len(self._rest) > _MAX_LINE_BYTES:
            self._on_line(self._rest)
            self._rest = b""

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rest:
            self._on_line(self._rest)
        self._on_end()
