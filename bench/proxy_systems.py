"""The processes of `make bench-proxy`: Rankway's and the peers' routers, what stands behind them, and the CPU they take."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent

PEERS = {
    "vllm-router": ("vllm-router==0.1.17", "vllm_router.launch_router", []),
    "sglang-router": ("sglang-router==0.3.2", "sglang_router.launch_router", ["--disable-health-check"]),
    "smg": ("smg==1.13.0", "smg.launch_router", ["--disable-health-check", "--disable-tokenizer-autoload"]),
}
"""Name: requirement, module that starts it, options beyond those that all three share."""


@dataclass(frozen=True, slots=True)
class Cpus:
    """Who runs where: the proxy alone on one processor, everything else on the others."""

    proxy: int
    others: frozenset[int]

    @classmethod
    def of_this_machine(cls) -> Cpus:
        available = sorted(os.sched_getaffinity(0))
        return cls(available[0], frozenset(available[1:] or available))


@dataclass(frozen=True, slots=True)
class System:
    """A proxy that runs: its ports (0: it hasn't that API) and its process."""

    name: str
    http_port: int
    grpc_port: int
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds of the process, all its threads and children included: the scheduler's own count, in nanoseconds."""
        return sum(_cpu_s(pid) for pid in _family(self.pid))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Stage:
    """Starts processes, and ends all of them."""

    def __init__(self, cpus: Cpus, logs: Path) -> None:
        self._cpus = cpus
        self._logs = logs
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, command: Sequence[str], port: int, *, is_proxy: bool = False, timeout_s: float = 60) -> int:
        """Start a process and wait until something listens on its port; returns its pid."""
        cpus = {self._cpus.proxy} if is_proxy else self._cpus.others
        with (self._logs / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=lambda: os.sched_setaffinity(0, cpus)
            )
        self._processes.append(process)
        self._wait(name, process, lambda: _listens(port), timeout_s)
        return process.pid

    def wait_http(self, name: str, port: int, path: str, timeout_s: float = 60) -> None:
        """Wait until GET path answers 200."""
        self._wait(name, self._processes[-1], lambda: _answers(f"http://127.0.0.1:{port}{path}"), timeout_s)

    def end(self) -> None:
        """Last started, first ended."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _wait(self, name: str, process: subprocess.Popen[bytes], condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if process.poll() is not None or time.monotonic() > deadline:
                tail = (self._logs / f"{name}.log").read_text(errors="replace")[-2000:]
                raise SystemExit(f"{name} doesn't serve (exit code {process.poll()}):\n{tail}")
            time.sleep(0.05)


@contextlib.contextmanager
def peer(name: str, policy: str, peers_dir: Path, cpus: Cpus, logs: Path) -> Iterator[System]:
    """One of the Rust routers before two backends."""
    _, module, extra = PEERS[name]
    python = peer_python(name, peers_dir)
    stage = Stage(cpus, logs)
    try:
        urls = []
        for number in range(2):
            port = free_port()
            stage.start(f"{name} {policy} backend{number}", [sys.executable, str(HERE / "proxy_backend.py"), str(port)], port)
            urls.append(f"http://127.0.0.1:{port}")
        port = free_port()
        command = [python, "-m", module, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
        command += ["--policy", policy, "--prometheus-port", str(free_port()), "--max-concurrent-requests", "4096", *extra]
        label = f"{name} {policy}"
        pid = stage.start(label, command, port, is_proxy=True)
        stage.wait_http(label, port, "/v1/models")
        yield System(label, port, 0, pid)
    finally:
        stage.end()


@contextlib.contextmanager
def backend(cpus: Cpus, logs: Path) -> Iterator[System]:
    """No proxy: the backend itself."""
    stage = Stage(cpus, logs)
    try:
        port = free_port()
        pid = stage.start("direct", [sys.executable, str(HERE / "proxy_backend.py"), str(port)], port)
        yield System("direct", port, 0, pid)
    finally:
        stage.end()


@contextlib.contextmanager
def rankway(cpus: Cpus, logs: Path, *, policy: str = "kv", processes: int = 1) -> Iterator[tuple[System, System, System]]:
    """A whole Rankway with two fast workers of four ranks: (the router, a plain gRPC relay, a worker reached directly)."""
    stage = Stage(cpus, logs)
    try:
        nats, registry, indexer, http, grpc, relay = (free_port() for _ in range(6))
        store = logs / "jetstream"
        nats_server = str(Path(sys.executable).with_name("nats-server"))
        stage.start("nats", [nats_server, "-a", "127.0.0.1", "-p", str(nats), "-js", "-sd", str(store)], nats)
        nats_option = f"--nats-url=nats://127.0.0.1:{nats}"
        _service(stage, "registry", [nats_option, f"--grpc-listen=127.0.0.1:{registry}"], registry)
        registries = f"--registry-endpoints=127.0.0.1:{registry}"
        _service(stage, "indexer", [nats_option, registries, f"--grpc-listen=127.0.0.1:{indexer}"], indexer)
        workers = []
        for number in range(2):
            port = free_port()
            command = [sys.executable, str(HERE / "proxy_worker.py"), f"w{number}", str(4 * number), "4", "8", str(port)]
            stage.start(f"worker{number}", [*command, f"127.0.0.1:{registry}"], port)
            workers.append(port)
        endpoints = [f"127.0.0.1:{port}" for port in workers]
        relay_pid = stage.start(
            "grpc relay", [sys.executable, str(HERE / "proxy_relay.py"), str(relay), *endpoints], relay, is_proxy=True
        )
        options = [nats_option, registries, f"--indexer-endpoints=127.0.0.1:{indexer}", f"--http-listen=127.0.0.1:{http}"]
        options += [f"--grpc-listen=127.0.0.1:{grpc}", f"--policy={policy}", f"--processes={processes}", "--log-level=warning"]
        pid = _service(stage, "router", options, http, is_proxy=True)
        stage.wait_http("router", http, "/ready")
        yield (
            System(f"rankway {policy}", http, grpc, pid),
            System("grpc.aio relay", 0, relay, relay_pid),
            System("direct", 0, workers[0], 0),
        )
    finally:
        stage.end()


def peer_python(name: str, peers_dir: Path) -> str:
    """The interpreter of a peer's virtual environment, which is made if it isn't there."""
    home = peers_dir / name
    python = home / "bin" / "python"
    if not python.exists():
        requirement = PEERS[name][0]
        print(f"making {home} with {requirement}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", requirement], check=True)
    return str(python)


def _service(stage: Stage, name: str, options: list[str], port: int, *, is_proxy: bool = False) -> int:
    return stage.start(name, [sys.executable, "-m", f"rankway.{name}", *options], port, is_proxy=is_proxy)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _family(pid: int) -> list[int]:
    """The process and its descendants."""
    pids = [pid]
    for each in pids:
        for task in Path(f"/proc/{each}/task").glob("*"):
            with contextlib.suppress(OSError):
                pids.extend(int(child) for child in (task / "children").read_text().split())
    return pids


def _cpu_s(pid: int) -> float:
    """Of the threads that run now: none of the proxies ends one while it is measured."""
    run_ns = 0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            run_ns += int((task / "schedstat").read_text().split()[0])
    return run_ns / 1e9
