"""`make bench-proxy`: Rankway's router against the Rust routers for vLLM and SGLang, in one run, each alone on one processor.

Behind every proxy stand two trivially fast engines that step like real ones: ours speak Attach, the peers' OpenAI's HTTP. CPU is
read from /proc/<pid>/task/*/schedstat of the proxy process, so it is the proxy's alone. `theirs` is the fastest of the peers in
this run, over both of their policies. JSON=<file> writes the table as a list of {"name", "ours", "theirs", "unit", "ratio",
"reach", "holds"}: ratio = ours / theirs, `reach` is what it may be at most (null: shown for information).

    python bench/proxy.py [--peers-dir .venv-peers] [--only http|grpc] [--seconds 3] [--rounds 3]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import proxy_load
import proxy_systems
import uvloop
from proxy_load import Shape, Tally
from proxy_systems import Cpus, System

HERE = Path(__file__).parent
POLICIES = ("round_robin", "cache_aware")
CLIENTS = (1, 64, 512)
PACE_MS = 20


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    name: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    reach: float | None
    holds: bool | None


@dataclass(slots=True)
class Measured:
    """What one system did under each load, by the load's name. Of several rounds the best counts: the rest is noise."""

    system: str
    rounds: dict[str, list[Tally]] = field(default_factory=dict)

    def add(self, load: str, tally: Tally) -> None:
        self.rounds.setdefault(load, []).append(tally)

    def cpu_us_per_token(self, load: str) -> float:
        return min(1e6 * tally.cpu_s / tally.tokens if tally.tokens else math.inf for tally in self.rounds[load])

    def cpu_us_per_request(self, load: str) -> float:
        return min(1e6 * tally.cpu_s / tally.requests if tally.requests else math.inf for tally in self.rounds[load])

    def rate(self, load: str, what: str) -> float:
        return max(float(getattr(tally, what)) / tally.seconds for tally in self.rounds[load])

    def latency_us(self, load: str, share: float) -> float:
        return min(tally.percentile_us(share) for tally in self.rounds[load])

    def errors(self, load: str) -> int:
        return sum(tally.errors for tally in self.rounds[load])


def http_loads(seconds: float) -> dict[str, Shape]:
    loads = {"request": Shape(64, tokens=16, stream=False, measure_s=seconds)}
    for clients in CLIENTS:
        loads[f"paced {clients}"] = Shape(clients, pace_ms=PACE_MS, measure_s=seconds)
        loads[f"burst {clients}"] = Shape(clients, measure_s=seconds)
    return loads


def grpc_loads(seconds: float) -> dict[str, Shape]:
    return {"paced 64": Shape(64, pace_ms=PACE_MS, measure_s=seconds), "burst 64": Shape(64, measure_s=seconds)}


def measure_http(systems: list[System], loads: dict[str, Shape], rounds: int) -> list[Measured]:
    """Every system under every load, in turns: what disturbs the machine disturbs all of them."""
    measured = [Measured(system.name) for system in systems]
    for load, shape in loads.items():
        for _ in range(rounds):
            for system, result in zip(systems, measured, strict=True):
                result.add(load, uvloop.run(proxy_load.http(system.http_port, shape, system.cpu_s)))
        print(f"\nHTTP, {load}")
        for result in measured:
            _show_http(result, load)
    return measured


def measure_grpc(systems: list[System], loads: dict[str, Shape], rounds: int) -> list[Measured]:
    """Generation.Generate of every system under every load, in turns."""
    measured = [Measured(system.name) for system in systems]
    for load, shape in loads.items():
        for _ in range(rounds):
            for system, result in zip(systems, measured, strict=True):
                result.add(load, uvloop.run(proxy_load.generate(system.grpc_port, shape, system.cpu_s)))
        print(f"\ngRPC, {load}")
        for result in measured:
            cost = f"{result.cpu_us_per_token(load):7.2f} µs CPU/token" if result.system != "direct" else " " * 20
            print(f"  {result.system:<26} {cost} {result.rate(load, 'tokens'):9.0f} tokens/s", flush=True)
    return measured


def _show_http(measured: Measured, load: str) -> None:
    cpu = f"{measured.cpu_us_per_token(load):7.2f} µs CPU/token {measured.cpu_us_per_request(load):7.0f} µs CPU/request"
    line = f"  {measured.system:<26} {cpu} {measured.rate(load, 'requests'):7.0f} requests/s"
    line += f" {measured.rate(load, 'tokens'):8.0f} tokens/s"
    if measured.rounds[load][0].latencies_us:
        line += f"   latency p50 {measured.latency_us(load, 0.5):7.0f} p99 {measured.latency_us(load, 0.99):7.0f} µs"
    print(line + (f"   ERRORS {measured.errors(load)}" if measured.errors(load) else ""), flush=True)


@dataclass(slots=True)
class Run:
    """Everything that one run measured."""

    direct: Measured | None = None
    ours: Measured | None = None
    peers: list[Measured] = field(default_factory=list)
    grpc_ours: Measured | None = None
    grpc_relay: Measured | None = None
    route: Measured | None = None


def table(run: Run) -> list[Result]:
    """The lines of the table that this run can fill."""
    rows: list[Result] = []
    if run.ours is not None and run.peers:
        rows += _http_rows(run.ours, run.peers)
    if run.grpc_ours is not None and run.grpc_relay is not None:
        for load in run.grpc_ours.rounds:
            ours, theirs = run.grpc_ours.cpu_us_per_token(load), run.grpc_relay.cpu_us_per_token(load)
            rows.append(_row(f"gRPC Generate, CPU a token, {load} streams, against a relay", ours, theirs, "µs", 0.5))
    if run.route is not None and run.peers:
        ours = run.route.cpu_us_per_request("route")
        for load, reach in (("burst 64", 0.25), ("paced 64", 0.25)):
            tokens = 128
            theirs = min(tokens * peer.cpu_us_per_token(load) for peer in run.peers)
            rows.append(_row(f"one Route, against {tokens} tokens through a peer, {load.split()[0]}", ours, theirs, "µs", reach))
    return rows


def _http_rows(ours: Measured, peers: list[Measured]) -> list[Result]:
    def best(value: Callable[[Measured], float]) -> float:
        return min(value(peer) for peer in peers)

    rows = []
    for name, load, reach in (
        ("paced, 64 streams", "paced 64", 0.7),
        ("in bursts, 64 streams", "burst 64", 1.0),
        ("paced, 512 streams", "paced 512", None),
        ("in bursts, 512 streams", "burst 512", None),
    ):
        rows.append(
            _row(
                f"HTTP stream, CPU a token, {name}",
                ours.cpu_us_per_token(load),
                best(lambda peer, load=load: peer.cpu_us_per_token(load)),
                "µs",
                reach,
            )
        )
    rows.append(
        _row(
            "HTTP, CPU a request without streaming",
            ours.cpu_us_per_request("request"),
            best(lambda peer: peer.cpu_us_per_request("request")),
            "µs",
            None,
        )
    )
    for clients in CLIENTS:
        for share in (0.5, 0.99):
            load = f"paced {clients}"
            rows.append(
                _row(
                    f"HTTP stream, latency a token, {clients} streams, p{share * 100:.0f}",
                    ours.latency_us(load, share),
                    best(lambda peer, load=load, share=share: peer.latency_us(load, share)),
                    "µs",
                    1.0,
                )
            )
    for what, load in (("requests", "request"), ("tokens", "burst 1"), ("tokens", "burst 64"), ("tokens", "burst 512")):
        theirs = max(peer.rate(load, what) for peer in peers)
        rows.append(_row(f"HTTP, {what}/s, {load}", ours.rate(load, what), theirs, f"{what}/s", None))
    return rows


def _row(name: str, ours: float, theirs: float, unit: str, reach: float | None) -> Result:
    ratio = ours / theirs if theirs else math.inf
    return Result(name, ours, theirs, unit, ratio, reach, None if reach is None else ratio <= reach)


def show(rows: list[Result]) -> None:
    print(f"\n{'':<62} {'ours':>10} {'theirs':>10} {'':<10} {'ratio':>6}  reach")
    for row in rows:
        reach = "" if row.reach is None else f"<= {row.reach:g}{'' if row.holds else '  MISSED'}"
        print(f"{row.name:<62} {row.ours:>10.1f} {row.theirs:>10.1f} {row.unit:<10} {row.ratio:>6.2f}  {reach}")


@contextlib.contextmanager
def _logs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rankway-bench-") as path:
        yield Path(path)


def measure(peers_dir: Path, seconds: float, rounds: int, only: str) -> Run:
    cpus = Cpus.of_this_machine()
    os.sched_setaffinity(0, cpus.others)
    run = Run()
    with _logs() as logs, contextlib.ExitStack() as stack:
        router, relay, direct_grpc = stack.enter_context(proxy_systems.rankway(cpus, logs))
        if only != "grpc":
            systems = [stack.enter_context(proxy_systems.backend(cpus, logs)), router]
            systems += [
                stack.enter_context(proxy_systems.peer(name, policy, peers_dir, cpus, logs))
                for name in proxy_systems.PEERS
                for policy in POLICIES
            ]
            run.direct, run.ours, *run.peers = measure_http(systems, http_loads(seconds), rounds)
        if only != "http":
            loads = grpc_loads(seconds)
            run.grpc_ours, run.grpc_relay, _ = measure_grpc([router, relay, direct_grpc], loads, rounds)
            run.route = Measured("route")
            for _ in range(rounds):
                shape = Shape(32, measure_s=seconds)
                run.route.add("route", uvloop.run(proxy_load.route(router.grpc_port, shape, router.cpu_s)))
            cost = run.route.cpu_us_per_request("route")
            print(f"\nRoute  {cost:6.1f} µs CPU a call, {run.route.rate('route', 'requests'):.0f} calls/s")
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers-dir", type=Path, default=HERE.parent / ".venv-peers", help="where the peers' environments are, or go"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="measured time of each load and round")
    parser.add_argument("--rounds", type=int, default=3, help="how often every system takes its turn; the best counts")
    parser.add_argument("--only", choices=("http", "grpc"), help="one part of the table")
    args = parser.parse_args()
    rows = table(measure(args.peers_dir, args.seconds, args.rounds, args.only or ""))
    show(rows)
    if target := os.environ.get("JSON"):
        Path(target).write_text(json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
