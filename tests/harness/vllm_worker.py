"""`rankway worker --engine vllm` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil


class VllmWorker:
    """One worker process. `kill` it in the end; `lines` is its log so far, vLLM's own included."""

    def __init__(self, options: list[str], engine_flags: list[str], log: Path) -> None:
        self._log = log
        reader, writer = os.pipe()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rankway", "worker", "--engine=vllm", *options, "--", *engine_flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RANKWAY_READY_FD": str(writer)},
                pass_fds=(writer,),
                start_new_session=True,
            )
        os.close(writer)
        self._ready = os.fdopen(reader)
        self.addresses: dict[str, str] = {}
        self._family: dict[int, psutil.Process] = {}

    def wait_ready(self) -> VllmWorker:
        """Return once it serves. Raises AssertionError with its last lines if it ends before."""
        line = self._ready.readline()
        assert line, "the worker has ended:\n" + "\n".join(self.lines[-40:])
        self.addresses = json.loads(line)
        return self

    @property
    def lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()

    def records(self) -> list[dict[str, Any]]:
        """The worker's own structured lines."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    def says(self, event: str, **fields: Any) -> bool:
        """Whether a line with this event and these fields has been logged."""
        return any(record.get("event") == event and fields.items() <= record.items() for record in self.records())

    def family(self) -> list[psutil.Process]:
        """The worker and every process below it that was ever seen."""
        if self.process.poll() is None:
            worker = psutil.Process(self.process.pid)
            self._family.update({process.pid: process for process in [worker, *worker.children(recursive=True)]})
        return list(self._family.values())

    def engine_cores(self) -> list[psutil.Process]:
        """The processes of its ranks."""
        return [process for process in self.family() if "EngineCore" in _title(process)]

    def spawned(self) -> list[psutil.Process]:
        """vLLM's processes, also those that haven't come far enough to have a name."""
        return [process for process in self.family() if "spawn_main" in _title(process) or "VLLM" in _title(process)]

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def survivors(self, timeout_s: float = 10.0) -> list[psutil.Process]:
        """Which of the family still run after a while."""
        deadline = time.monotonic() + timeout_s
        while (left := [process for process in self._family.values() if _runs(process)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def kill(self) -> None:
        """End whatever is left. Idempotent."""
        for process in self.family():
            if _runs(process):
                process.kill()
        self.process.wait()
        self._ready.close()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
