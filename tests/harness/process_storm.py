"""Storms over real processes: services are killed by SIGKILL and stopped by SIGSTOP, the load goes through the routers.

A world is one nats-server, two registries, two indexers, two routers and two simulator workers with small caches, a process
each; the workers reach NATS through proxies in the test's process. What is compared in the end is what the services' own APIs
tell. A seed repeats the script of faults, not each interleaving.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
from harness.calls import generate, http, request
from harness.indexer import RunningReplica
from harness.metrics import leftovers
from harness.nats import NatsServer
from harness.proxies import NatsProxy
from harness.service_process import ServiceProcess
from harness.storm_load import Known, StormLoad, Tally
from harness.waiting import eventually, free_port
from harness.weather import (
    BLOCK_SIZE,
    DP_GROUP,
    NETWORK_FAULTS,
    RANKS_PER_WORKER,
    Report,
    Weather,
    indexer_settings,
    loopback,
    registry_settings,
    router_settings,
    snapshot,
    worker_settings,
)

from rankway import rpc
from rankway.indexer.slots import RankKey
from rankway.launcher import Console
from rankway.loglines import LineFormat
from rankway.v1 import generate_pb2_grpc, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc

LOG_LEVEL = os.environ.get("STORM_LOG_LEVEL", "warning")
"""Of the services, whose logs go to standard output."""

MODEL = "sim"
WORKERS = 2
DECODE_MS = 5.0
"""Streams last long enough for a fault to hit them."""
PAUSE_S = 0.3
STORM_TIMEOUT_S = 60.0
"""A storm that hangs shows where."""

NO_WORKER_GRACE_S = 2.0
"""From a worker's being ready until every router can have noticed: a request that comes before may fail for want of a worker."""

Truth = Mapping[RankKey, set[int]]


@dataclass(slots=True)
class ProcessReport(Report):
    """Of a storm over processes."""

    load: Tally = field(default_factory=Tally)
    start_s: float = 0.0
    """From the end of the faults until everything that was down was ready again."""
    behind_holes: int = 0
    """Blocks in the end that no choice can be about, since one before them isn't held: of the routers' replicas, only the number
    of these is compared. Where there are none, replicas are compared block by block."""


class ProcessWorld(Weather):
    """The cluster. `async with ProcessWorld(...) as world: await world.storm(seed)`, as often as wanted."""

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__(NatsServer(directory / "jetstream"))
        self._links = [NatsProxy(lambda: ("127.0.0.1", self.nats.port), self.network_rng) for _ in range(WORKERS)]
        self._console = Console()
        self.registries: list[ServiceProcess] = []
        self.indexers: list[ServiceProcess] = []
        self.workers: list[ServiceProcess] = []
        self.routers: list[ServiceProcess] = []
        self._no_worker_at = 0.0
        self.load = StormLoad(self.routers, seed, self._excused)

    @property
    def links(self) -> Sequence[NatsProxy]:
        return self._links

    @property
    def services(self) -> list[ServiceProcess]:
        return [*self.registries, *self.indexers, *self.workers, *self.routers]

    async def __aenter__(self) -> ProcessWorld:
        await asyncio.to_thread(self.nats.start)
        for link in self._links:
            await link.start()
        self._describe()
        await self._start_all()
        await self.load.learn(MODEL, BLOCK_SIZE)
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self.load.close()
        try:
            for service in reversed(self.services):
                # After a failure, how a service ends is of no interest.
                await (service.kill() if kind else service.stop())
        finally:
            for link in self._links:
                await link.stop()
            await asyncio.to_thread(self.nats.kill, lose_store=True)
            await asyncio.to_thread(self._console.close)

    async def storm(self, seed: int, *, faults: int = 6, within_s: float = 5.0) -> ProcessReport:
        """One storm and the calm after it.

        Raises:
            AssertionError: somebody doesn't hold the truth `within_s` after the load has ended and everything is up again, a
                stream failed or was not what it should be, or a service has ended by itself.
        """
        self.seed(seed)
        self.load.rng.seed(seed)
        report = ProcessReport(seed)
        async with asyncio.timeout(STORM_TIMEOUT_S):
            await self._storm(report, faults)
            began = time.monotonic()
            truth: Truth = await eventually(self._agreed, within_s)
            report.calm_s = time.monotonic() - began
            report.blocks = sum(map(len, truth.values()))
            report.behind_holes = report.blocks - sum(map(len, map(self._reached, truth.values())))
            await self._engines_hold(truth)
        return report

    async def _storm(self, report: ProcessReport, faults: int) -> None:
        watch = asyncio.create_task(self._watch_workers())
        try:
            async with self.load.running() as report.load:
                await self.play(FAULTS, report, faults, PAUSE_S)
                began = time.monotonic()
                await self._end_faults()
                report.start_s = time.monotonic() - began
        finally:
            watch.cancel()
        assert not report.load.failures, "\n".join(report.load.failures)

    # --- services

    def _describe(self) -> None:
        """What there is, each service at addresses of its own for all its lives; workers tell theirs."""
        nats_url = self.nats.url
        names = [f"{kind} {number}" for kind in ("registry", "indexer", "worker", "router") for number in (0, 1)]
        lines = LineFormat(tuple(names), level=LOG_LEVEL, colour=False, as_json=False)

        def service(kind: str, number: int, settings: Any) -> ServiceProcess:
            return ServiceProcess(kind, f"{kind} {number}", replace(settings, log_level=LOG_LEVEL), self._console, lines)

        registries, indexers = loopback([free_port(), free_port()]), loopback([free_port(), free_port()])
        for number, listen in enumerate(registries):
            self.registries.append(service("registry", number, registry_settings(listen, nats_url)))
        for number, listen in enumerate(indexers):
            self.indexers.append(service("indexer", number, indexer_settings(number, listen, nats_url, registries)))
        for number, link in enumerate(self._links):
            settings = worker_settings(number, WORKERS, f"nats://{link.address}", registries, decode_ms=DECODE_MS)
            self.workers.append(service("worker", number, settings))
        for number in (0, 1):
            grpc_listen, http_listen = loopback([free_port(), free_port()])
            options = router_settings(number, nats_url, registries, indexers, grpc_listen=grpc_listen, http_listen=http_listen)
            self.routers.append(service("router", number, options))

    async def _start_all(self) -> None:
        for service in self.services:
            if not service.running:
                await service.start()
        for service in self.services:
            await service.wait_ready()

    def _check(self) -> None:
        for service in self.services:
            service.check()

    async def _watch_workers(self) -> None:
        """Notes when there was no worker."""
        while True:
            if not any(worker.ready for worker in self.workers):
                self._no_worker_at = time.monotonic()
            await asyncio.sleep(0.01)

    def _excused(self, begun: float) -> bool:
        """Whether a request may fail for want of a worker."""
        return self._no_worker_at > begun - NO_WORKER_GRACE_S

    # --- the calm

    async def _end_faults(self) -> None:
        self.clear_up()
        for service in self.services:
            service.resume()
        self._check()
        await self._start_all()
        for link in self._links:
            link.release()

    async def _agreed(self) -> Truth:
        """What the engines hold, if everybody says the same; AssertionError if not."""
        self._check()
        try:
            truth = await self._truth()
            for indexer in self.indexers:
                await self._indexer_holds(indexer, truth)
            for router in self.routers:
                await self._router_holds(router, truth)
        except grpc.aio.AioRpcError as error:
            raise AssertionError(f"{error.code().name}: {error.details()}") from error
        for service in (*self.workers, *self.routers):
            metrics = await asyncio.to_thread(http, f"http://{service.addresses['metrics']}/metrics")
            left = leftovers(metrics.body.decode())
            assert not left, f"{service.name}: {left}"
        return truth

    async def _truth(self) -> Truth:
        """What every rank holds, by the workers' Snapshots; it must be blocks of what was asked and answered."""
        held: dict[RankKey, set[int]] = {}
        for number, worker in enumerate(self.workers):
            for rank in range(number * RANKS_PER_WORKER, (number + 1) * RANKS_PER_WORKER):
                key, blocks = await snapshot(worker.addresses["grpc"], f"w{number}", rank)
                held[key] = blocks
        possible = set(itertools.chain.from_iterable(known.blocks for known in self.load.known))
        strange = set().union(*held.values()) - possible
        assert not strange, f"{len(strange)} blocks that nobody asked for"
        return held

    async def _indexer_holds(self, indexer: ServiceProcess, truth: Truth) -> None:
        """AssertionError unless a new follower is told the truth."""
        replica = RunningReplica([indexer.addresses["grpc"]], DP_GROUP)
        try:
            await eventually(lambda: replica.replica.complete, 1.0)
            replica.holds(truth)
        except AssertionError as error:
            raise AssertionError(f"{indexer.name}: {error}") from error
        finally:
            await replica.stop()

    async def _router_holds(self, router: ServiceProcess, truth: Truth) -> None:
        """AssertionError unless each rank's overlaps with prompts and their answers, and the number of its blocks, are right.

        All blocks belong to these prompts and answers: a replica that passes holds every block of the truth that isn't behind
        a hole, and as many others as there are blocks behind holes.
        """
        async with rpc.open_channel(router.addresses["grpc"]) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            # One token more than the last block: a choice never counts on the last token's block.
            questions = [request([*known.prompt, *known.tokens, 0]) for known in self.load.known]
            answers = await asyncio.gather(
                *(stub.Explain(router_pb2.ExplainRequest(request=question), timeout=5) for question in questions)
            )
        for known, answer in zip(self.load.known, answers, strict=True):
            told = {(c.worker_id, c.dp_rank): (c.overlap_blocks, c.tree_size) for c in answer.candidates if c.index_known}
            right = {(key.worker_id, key.dp_rank): (overlap(known, held), len(held)) for key, held in truth.items()}
            assert told == right, f"{router.name}: {told} where {right} is right, {list(answer.remarks)}"
            assert all(c.eligible for c in answer.candidates), f"{router.name}: {list(answer.remarks)}"

    def _reached(self, held: set[int]) -> set[int]:
        """The blocks that some prompt's overlap takes in."""
        return {block for known in self.load.known for block in known.blocks[: overlap(known, held)]}

    async def _engines_hold(self, truth: Truth) -> None:
        """On each rank, the prompt of which it holds most: what the engine takes from its cache is what was foretold."""
        async with rpc.open_channel(self.routers[0].addresses["grpc"]) as channel:
            stub = generate_pb2_grpc.GenerationStub(channel)
            for key, held in truth.items():
                known = max(self.load.known, key=lambda known: overlap(known, held))
                blocks = min(overlap(known, held), (len(known.prompt) - 1) // BLOCK_SIZE)
                answer = await generate(stub, request(known.prompt, dp_rank=key.dp_rank))
                assert (answer.routed.overlap_blocks, answer.usage.cached_tokens) == (blocks, blocks * BLOCK_SIZE), key

    # --- faults

    async def worker_restart(self) -> None:
        await self._restart(self.rng.choice(self.workers))

    async def worker_down(self) -> None:
        await self.rng.choice(self.workers).kill()

    async def worker_pause(self) -> None:
        self._pause(self.workers)

    async def indexer_restart(self) -> None:
        await self._restart(self.rng.choice(self.indexers))

    async def indexer_down(self) -> None:
        await self.rng.choice(self.indexers).kill()

    async def indexer_pause(self) -> None:
        self._pause(self.indexers)

    async def router_restart(self) -> None:
        await self._restart(self.rng.choice(self.routers))

    async def router_pause(self) -> None:
        self._pause(self.routers)

    async def registry_restart(self) -> None:
        await self._restart(self.rng.choice(self.registries))

    async def registry_down(self) -> None:
        await self.rng.choice(self.registries).kill()

    async def reset_caches(self) -> None:
        worker = self.rng.choice(self.workers)
        if worker.running and worker.ready:
            async with rpc.open_channel(worker.addresses["grpc"]) as channel:
                try:
                    await worker_pb2_grpc.WorkerStub(channel).ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(), timeout=1.0)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # it is stopped
                        raise

    async def _restart(self, service: ServiceProcess) -> None:
        await service.kill()
        await service.start()

    def _pause(self, services: Sequence[ServiceProcess]) -> None:
        """Stop one of them; the script goes on meanwhile."""
        service, seconds = self.rng.choice(services), self.rng.uniform(0.1, 1.0)
        if service.running:
            service.pause(seconds)


def overlap(known: Known, held: set[int]) -> int:
    """How many leading blocks are held."""
    return sum(1 for _ in itertools.takewhile(held.__contains__, known.blocks))


FAULTS: Sequence[Callable[[ProcessWorld], Awaitable[None]]] = (
    *NETWORK_FAULTS,
    ProcessWorld.worker_restart,
    ProcessWorld.worker_restart,
    ProcessWorld.worker_down,
    ProcessWorld.worker_pause,
    ProcessWorld.worker_pause,
    ProcessWorld.indexer_restart,
    ProcessWorld.indexer_down,
    ProcessWorld.indexer_pause,
    ProcessWorld.router_restart,
    ProcessWorld.router_restart,
    ProcessWorld.router_pause,
    ProcessWorld.registry_restart,
    ProcessWorld.registry_down,
    ProcessWorld.reset_caches,
    ProcessWorld.reset_caches,
)
