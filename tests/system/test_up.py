"""Rules of `rankway up`: how it starts, stops, and bears the death of a child."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from harness.calls import http
from harness.cluster import Cluster
from harness.waiting import free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Cluster]:
    """One worker of two ranks, not waited for."""
    cluster = Cluster("--workers=1", "--ranks-per-worker=2", tmp_path=tmp_path)
    yield cluster
    cluster.stop()


def gone(processes: list[psutil.Process], timeout_s: float = 15.0) -> bool:
    """Whether all of them end in time."""
    return psutil.wait_procs(processes, timeout_s)[1] == []


def test_one_table_then_ready_then_ctrl_c_leaves_nothing(small: Cluster) -> None:
    """The table names all services; Ctrl-C stops them in order, exits 0, leaves no process and no file."""
    small.wait_ready()
    assert list(small.table) == ["nats", "registry", "indexer", "worker-0", "router"]
    assert {row["HEALTH"] for row in small.table.values()} == {"healthy"}
    assert sum(line.startswith("SERVICE") for line in small.lines) == 1
    assert http(small.http + "/health").status == 200
    everything = small.processes()
    assert len(everything) == 6
    assert small.stop() == 0
    assert gone(everything)
    assert list(small.tmp.iterdir()) == []
    stopped = [m[1] for line in small.lines if (m := re.match(r"(\S+) +\| \S+ info +stopped", line))]
    assert stopped == ["router", "worker-0", "indexer", "registry"]
    assert [line for line in small.lines if re.search("error|Traceback|warning", line)] == []


def test_sigterm_is_ctrl_c(small: Cluster) -> None:
    """What a service manager sends stops it the same way."""
    small.wait_ready()
    everything = small.processes()
    small.process.terminate()
    assert small.process.wait(30) == 0
    assert gone(everything)
    assert list(small.tmp.iterdir()) == []


def test_ctrl_c_while_it_starts(small: Cluster) -> None:
    """Ctrl-C before `ready` stops what has started."""
    small.wait_for(lambda line: line.startswith("registry"), 30)
    everything = small.processes()
    assert small.stop() == 0
    assert gone(everything)
    assert list(small.tmp.iterdir()) == []


def test_second_ctrl_c_forces(small: Cluster) -> None:
    """A child that doesn't end holds Ctrl-C up; a second one kills it, and still nothing is left."""
    small.wait_ready()
    everything = small.processes()
    os.kill(small.pid("worker-0"), signal.SIGSTOP)
    small.interrupt()
    small.wait_for(lambda line: line.startswith("stopping"))
    small.wait_for(lambda line: line.startswith("router") and "stopped" in line)
    small.interrupt()
    assert small.process.wait(10) == 0
    assert gone(everything)
    assert list(small.tmp.iterdir()) == []


def test_kill_9_of_the_launcher_orphans_nobody(small: Cluster, tmp_path: Path) -> None:
    """The children end with the launcher, and the next one removes the files that it left."""
    small.wait_ready()
    children = small.processes()[1:]
    small.process.kill()
    assert gone(children, 40)
    left = list(tmp_path.iterdir())
    assert left
    again = Cluster("--workers=1", "--ranks-per-worker=1", tmp_path=tmp_path)
    try:
        again.wait_ready()
        assert not any(path.exists() for path in left)
    finally:
        assert again.stop() == 0


def test_a_dead_child_is_named_and_the_rest_serves(tmp_path: Path) -> None:
    """Its end, last log lines and the command that starts it again are told; requests go on, and the command works."""
    cluster = Cluster("--ranks-per-worker=1", tmp_path=tmp_path).wait_ready()
    again = None
    try:
        os.kill(cluster.pid("worker-1"), signal.SIGKILL)
        said = cluster.wait_for(lambda line: line.startswith("worker-1 (pid"))
        assert "was killed by SIGKILL; its last log lines:" in said
        body = {"prompt": "still there", "max_tokens": 2}
        answers = [http(f"{cluster.http}/v1/completions", body) for _ in range(8)]
        assert [a.status for a in answers] == [200] * 8
        assert {a.headers["x-rankway-worker-id"] for a in answers} == {"worker-0"}
        again = cluster.start_again("worker-1")
        pinned = {"x-rankway-worker-id": "worker-1"}
        deadline = time.monotonic() + 15
        while (answer := http(f"{cluster.http}/v1/completions", body, pinned)).status != 200:
            assert time.monotonic() < deadline, answer.body
        assert answer.headers["x-rankway-worker-id"] == "worker-1"
    finally:
        if again:
            again.terminate()
            again.wait(20)
        assert cluster.stop() == 0


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_a_port_in_use_is_one_line(option: str, tmp_path: Path) -> None:
    """Nothing starts, and the line says which port and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "rankway", "up", "--http-port=0", "--grpc-port=0", f"{option}={port}"]
        answer = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1
    assert f"127.0.0.1:{port}" in answer.stderr
    assert option in answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_service_that_cannot_start_ends_the_start(tmp_path: Path) -> None:
    """The cause is told, what had started is stopped, and the exit code is 1."""
    cluster = Cluster("--worker-args=--max-model-len=-1", tmp_path=tmp_path)
    try:
        cluster.wait_for(lambda line: line.startswith("rankway up: worker-") and "ended with exit code 2" in line, 30)
    finally:
        assert cluster.stop() == 1
    assert any("max_model_len=-1" in line for line in cluster.lines)
    assert list(tmp_path.iterdir()) == []


def test_make_run_cluster_on_a_terminal(tmp_path: Path) -> None:
    """On a terminal Ctrl-C under `make` reaches the launcher alone: make sees a command that went well."""
    venv = Path(sys.prefix)
    ports = [f"HTTP_PORT={free_port()}", f"GRPC_PORT={free_port()}"]
    # -o: this environment is up to date, whoever made it.
    command = ["make", "-o", f"{venv}/.installed", "run-cluster", f"VENV={venv}", "WORKERS=1", "RANKS_PER_WORKER=1", *ports]
    controller, terminal = pty.openpty()
    make = subprocess.Popen(
        [sys.executable, "-c", _ON_TERMINAL, *command],
        cwd=ROOT,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TMPDIR": str(tmp_path), "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(terminal)
    try:
        output = read_until(controller, b"\r\nready\r\n", 60)
        assert b"\x1b[" in output
        os.write(controller, b"\x03")
        assert make.wait(30) == 0
    finally:
        if make.poll() is None:
            os.killpg(make.pid, signal.SIGKILL)
            make.wait()
        os.close(controller)
    assert list(tmp_path.iterdir()) == []


# Makes the terminal the controlling one, as a shell's is, and becomes the command.
_ON_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"


def read_until(fd: int, wanted: bytes, timeout_s: float) -> bytes:
    """What a terminal shows up to and including `wanted`."""
    shown = b""
    deadline = time.monotonic() + timeout_s
    while wanted not in shown:
        assert time.monotonic() < deadline, shown.decode(errors="replace")
        try:
            shown += os.read(fd, 65536)
        except OSError:
            raise AssertionError(f"it ended: {shown.decode(errors='replace')}") from None
    return shown
