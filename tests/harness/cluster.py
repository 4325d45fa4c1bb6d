"""A cluster as a user starts it: `rankway up` in a process of its own, its output read as it comes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rankway.processes import bound

START_TIMEOUT_S = 60.0

OPTIONS = ("--log-level=debug", "--log-format=json", "--router-args=--recent-weight 0", "--worker-args=--sim-speedup 10")
"""Of most clusters under test: the term for recent dispatches is off, as in the design's worked example; the simulator runs ten
times as fast as real time."""


class Cluster:
    """`rankway up` with free ports. `stop` it in the end; `lines` is its output so far."""

    def __init__(self, *options: str, tmp_path: Path, environ: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._grown = threading.Condition()
        # A temporary directory of its own shows what is left behind.
        self.tmp = tmp_path
        self.process = subprocess.Popen(
            # A test run that is killed leaves no cluster behind.
            bound([sys.executable, "-P", "-m", "rankway", "up", "--http-port=0", "--grpc-port=0", *options]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(tmp_path), **(environ or {})},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.table: dict[str, dict[str, str]] = {}

    def wait_ready(self) -> Cluster:
        """Return when `ready` was printed, with the table read."""
        self.wait_for(lambda line: line == "ready", START_TIMEOUT_S)
        at = next(i for i, line in enumerate(self.lines) if line.startswith("SERVICE"))
        columns = [(m.group(), m.start()) for m in re.finditer(r"\S+", self.lines[at])]
        for line in self.lines[at + 1 : self.lines.index("ready")]:
            if line:
                starts = [start for _, start in columns[1:]] + [len(line)]
                cells = [line[start:end].strip() for (_, start), end in zip(columns, starts, strict=True)]
                self.table[cells[0]] = dict(zip([name for name, _ in columns], cells, strict=True))
        return self

    def address(self, service: str, kind: str = "grpc") -> str:
        """host:port of a service's "grpc", "http" or "nats"."""
        found = re.search(rf"\b{kind} (\S+)", self.table[service]["ENDPOINT"])
        assert found, f"{service} has no {kind} in {self.table[service]}"
        return found[1]

    def metrics_url(self, service: str) -> str:
        return self.table[service]["METRICS"]

    def pid(self, service: str) -> int:
        return int(self.table[service]["PID"])

    @property
    def router(self) -> str:
        return self.address("router")

    @property
    def http(self) -> str:
        return f"http://{self.address('router', 'http')}"

    @property
    def nats_url(self) -> str:
        return f"nats://{self.address('nats', 'nats')}"

    def wait_for(self, wanted: Callable[[str], bool], timeout_s: float = 10.0, *, since: int = 0) -> str:
        """The first line of output from line number `since` on that is wanted; waits for it.

        Raises:
            AssertionError: it didn't come in time, or the cluster has ended without it.
        """
        deadline = time.monotonic() + timeout_s
        with self._grown:
            while True:
                for line in self.lines[since:]:
                    if wanted(line):
                        return line
                since = len(self.lines)
                left = deadline - time.monotonic()
                assert left > 0, f"not within {timeout_s} s; the last lines:\n" + "\n".join(self.lines[-30:])
                assert self._reader.is_alive(), "the cluster has ended:\n" + "\n".join(self.lines[-30:])
                self._grown.wait(min(left, 0.5))

    def records(self, since: int = 0) -> list[dict[str, Any]]:
        """The structured lines (of `--log-format json`) from line number `since` on."""
        return [json.loads(line) for line in self.lines[since:] if line.startswith("{")]

    def start_again(self, service: str) -> subprocess.Popen[bytes]:
        """Run the command that the launcher named when the service died; the caller ends it."""
        said = self.wait_for(lambda line: line.startswith(f"{service} is gone"))
        command = said.partition("to start it again: ")[2].split()
        if command[0] == "rankway":
            command = [sys.executable, "-P", "-m", *command]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def processes(self) -> list[psutil.Process]:
        """The launcher and everything below it."""
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def stop(self, timeout_s: float = 30.0) -> int:
        """Ctrl-C, and the exit code. Idempotent; kills what doesn't end in time."""
        everything = self.processes() if self.process.poll() is None else []
        if self.process.poll() is None:
            self.interrupt()
        try:
            return self.process.wait(timeout_s)
        finally:
            for process in everything:
                if process.is_running():
                    process.kill()
            self._reader.join(5)
            if self.process.stdout is not None:
                self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._grown:
                self.lines.append(line.decode(errors="replace").rstrip("\n"))
                self._grown.notify_all()
