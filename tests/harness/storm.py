"""Storms: a whole cluster under faults, and the question whether everybody ends up knowing what the engines hold.

A world is one nats-server (a child process), two registries, two indexers, two routers and two simulator workers with small
caches, all real services over real sockets; each worker reaches NATS and the registries through proxies. A storm is a script of
faults drawn from a seed, and so is the load. Timing is the machine's: a seed repeats the script, not each interleaving.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from harness.indexer import RunningReplica
from harness.nats import NatsServer
from harness.proxies import NatsProxy, TcpProxy
from harness.registry import Replica as RunningRegistry
from harness.waiting import can_listen, eventually, free_port
from harness.weather import (
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
from rankway.blocks import unpack_hashes
from rankway.errors import RankwayError
from rankway.indexer import service as indexer_service
from rankway.indexer.settings import IndexerSettings
from rankway.indexer.slots import RankKey
from rankway.ranks import LocalRank
from rankway.registry.client import RegistryClient
from rankway.router import service as router_service
from rankway.router.targets import Holder
from rankway.sampling import Sampling
from rankway.v1 import worker_pb2, worker_pb2_grpc
from rankway.worker import service as worker_service
from rankway.worker.engine import EngineOutput, EngineRequest

KILL_TIMEOUT_S = 30.0

Truth = Mapping[RankKey, set[int]]
"""What every rank of every live instance holds."""


_built: ContextVar[Callable[[Any], None]] = ContextVar("_built")
"""Of the service that the current task runs: is told the object that holds its parts."""


class _KeptWorker(worker_service._Worker):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if told := _built.get(None):
            told(self)


def _kept_router(*args: Any, build: Callable[..., Any] = router_service.build) -> Any:
    router = build(*args)
    if told := _built.get(None):
        told(router)
    return router


def _kept_state(settings: Any, *, build: Callable[..., Any] = indexer_service._state) -> Any:
    state = build(settings)
    if told := _built.get(None):
        told(state)
    return state


worker_service._Worker = _KeptWorker  # type: ignore[misc]
router_service.build = _kept_router
indexer_service._state = _kept_state


class Service:
    """A service as a task of this process; `built` is given what holds its parts, for tests that look inside."""

    def __init__(self, run: Callable[..., Any], settings: Any, built: Callable[[Any], None]) -> None:
        self.settings = settings
        self.addresses: Mapping[str, str] = {}
        self._up: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        context = copy_context()
        context.run(_built.set, built)
        self._task = asyncio.create_task(run(settings, ready=self._ready, stop=self._stop), context=context)

    def _ready(self, addresses: Mapping[str, str]) -> None:
        if not self._up.done():
            self._up.set_result(addresses)

    async def wait_ready(self, timeout_s: float = 10.0) -> None:
        await asyncio.wait((self._task, self._up), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        self.addresses = self._up.result()

    @property
    def running(self) -> bool:
        return not self._task.done()

    async def kill(self) -> None:
        """Cancel it where it stands; how it ends doesn't matter."""
        self._task.cancel()
        done, _ = await asyncio.wait((self._task,), timeout=KILL_TIMEOUT_S)
        assert done, f"not dead {KILL_TIMEOUT_S} s after its cancellation: {self._task}"
        if not self._task.cancelled():
            self._task.exception()  # looked at

    def check(self) -> None:
        """RuntimeError if it has ended by itself, with its cause."""
        if self._task.done() and not self._task.cancelled():
            raise RuntimeError(f"has ended by itself: {self.settings}") from self._task.exception()

    async def stop(self) -> None:
        """End it as SIGTERM does; its failure is raised."""
        self._stop.set()
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.result()


class StormWorker:
    """A worker behind proxies. `kill` is as sudden as SIGKILL for everybody else: nothing more reaches NATS or a registry."""

    def __init__(self, world: World, number: int) -> None:
        self.worker_id = f"w{number}"
        self._number = number
        self.nats = NatsProxy(lambda: ("127.0.0.1", world.nats.port), world.network_rng)
        self.registries = [TcpProxy(lambda port=port: ("127.0.0.1", port)) for port in world.registry_ports]  # type: ignore[misc]
        self._world = world
        self._service: Service | None = None
        self._worker: Any = None

    async def open(self) -> None:
        for proxy in (self.nats, *self.registries):
            await proxy.start()
        await self.start()

    async def start(self) -> None:
        for proxy in (self.nats, *self.registries):
            proxy.heal()
        settings = worker_settings(
            self._number,
            len(self._world.workers),
            f"nats://{self.nats.address}",
            [proxy.address for proxy in self.registries],
        )
        self._service = Service(worker_service.run, settings, self._built)

    def _built(self, worker: Any) -> None:
        self._worker = worker

    async def kill(self) -> None:
        for proxy in (self.nats, *self.registries):
            proxy.sever()
        if self._service is not None:
            await self._service.kill()
        self._worker = None

    async def close(self) -> None:
        if self._service is not None:
            await self._service.kill()
        for proxy in (self.nats, *self.registries):
            await proxy.stop()

    @property
    def running(self) -> bool:
        """Started, perhaps not yet up."""
        return self._service is not None and self._service.running

    @property
    def alive(self) -> bool:
        """Up: its engine takes requests."""
        return self._service is not None and self._service.running and self._worker is not None

    async def wait_ready(self) -> None:
        assert self._service is not None
        await self._service.wait_ready()

    def check(self) -> None:
        if self._service is not None:
            self._service.check()

    @property
    def endpoint(self) -> str:
        assert self._service is not None
        return self._service.addresses["grpc"]

    @property
    def engine(self) -> Any:
        return self._worker._engine

    @property
    def publisher(self) -> Any:
        return self._worker._publisher

    @property
    def instance(self) -> Any:
        return self._worker._instance

    def truth(self) -> dict[RankKey, set[int]]:
        """What each rank holds, by the mirror that tells the system; AssertionError if the engine's own cache says otherwise."""
        held = {}
        for feed, simulator in zip(self.publisher.feeds, self.engine.ranks, strict=True):
            mirror = feed.mirror
            assert mirror.copies() == simulator.cache.cached_hashes(), f"{self.worker_id}: the mirror is not the cache"
            held[RankKey(self.worker_id, self.instance.epoch, feed.dp_rank)] = set(mirror.snapshot())
        return held

    @property
    def idle(self) -> bool:
        return all(simulator.idle for simulator in self.engine.ranks)


class StormIndexer:
    """An indexer whose state can be looked at."""

    def __init__(self, settings: IndexerSettings) -> None:
        self.state: Any = None
        self._service = Service(indexer_service.run, settings, self._built)

    def _built(self, state: Any) -> None:
        self.state = state

    async def kill(self) -> None:
        await self._service.kill()

    async def wait_ready(self) -> None:
        await self._service.wait_ready()

    @property
    def endpoint(self) -> str:
        return self._service.addresses["grpc"]

    def holds(self, truth: Truth) -> bool:
        """True if its index is the truth; AssertionError if not."""
        self._service.check()
        tracker = self.state.tracker
        for key, blocks in truth.items():
            rank = tracker.ranks.get(key)
            assert rank is not None, f"indexer: {key} is not there"
            assert rank.known, f"indexer: {key} is unknown: {rank.repair_cause}"
            _same(f"indexer, {key}", set(unpack_hashes(tracker.index.blocks(rank.slot))), blocks)
        assert tracker.ranks.keys() == truth.keys(), f"the indexer knows {set(tracker.ranks) - set(truth)} too"
        return True

    def check_tidy(self, truth: Truth) -> None:
        """Nothing is left of who has gone."""
        tracker = self.state.tracker
        assert len(tracker.index) == len(set().union(*truth.values()))
        assert len(tracker.slots) == len(truth)
        assert not tracker._waits
        _, repairer = tracker.observers
        assert not repairer.running
        assert set(repairer._workers) <= {key.instance for key in truth}


def _same(who: str, held: set[int], blocks: set[int]) -> None:
    assert held == blocks, f"{who}: {len(held - blocks)} blocks too many, {len(blocks - held)} missing"


class StormRouter:
    """A router whose replica can be looked at."""

    def __init__(self, world: World, number: int) -> None:
        settings = router_settings(number, world.nats.url, loopback(world.registry_ports), loopback(world.indexer_ports))
        self.router_id = settings.router_id
        self.router: Any = None
        self._service = Service(router_service.run, settings, self._built)

    def _built(self, router: Any) -> None:
        self.router = router

    async def kill(self) -> None:
        await self._service.kill()

    def holds(self, truth: Truth) -> bool:
        """True if its replica is the truth; AssertionError if not."""
        self._service.check()
        replica = self.router.replica
        for key, blocks in truth.items():
            rank = replica.ranks.get(key)
            assert rank is not None, f"{self.router_id}: {key} is not there"
            assert rank.known, f"{self.router_id}: {key} is unknown"
            _same(f"{self.router_id}, {key}", set(unpack_hashes(replica.index.blocks(rank.slot))), blocks)
        assert replica.ranks.keys() == truth.keys(), f"{self.router_id} knows {set(replica.ranks) - set(truth)} too"
        return True

    def check_tidy(self, truth: Truth) -> None:
        """Nothing is left of who has gone."""
        assert len(self.router.replica.index) == len(set().union(*truth.values()))
        assert len(self.router.targets.held(Holder.INDEX)) == len(truth)


@dataclass(slots=True)
class TaskReport(Report):
    """Of a storm over services that are tasks."""

    tasks: int = 0
    """Of the whole process, in the end."""


class World(Weather):
    """The cluster. `async with World(...) as world: await world.storm(seed)`, as often as wanted."""

    def __init__(self, directory: Path, seed: int, *, routers: int = 2, workers: int = 2) -> None:
        super().__init__(NatsServer(directory / "jetstream"))
        self.registry_ports = [free_port(), free_port()]
        self.indexer_ports = [free_port(), free_port()]
        self.registries: list[RunningRegistry | None] = [None, None]
        self.indexers: list[StormIndexer | None] = [None, None]
        self.routers: list[StormRouter] = []
        self.workers: list[StormWorker] = []
        self._router_count = routers
        self._worker_count = workers
        self._load_rng = random.Random(seed)
        self._prompts = [array("I", [self._load_rng.randrange(256) for _ in range(80)]) for _ in range(6)]

    @property
    def links(self) -> Sequence[NatsProxy]:
        return [worker.nats for worker in self.workers]

    async def __aenter__(self) -> World:
        await asyncio.to_thread(self.nats.start)
        for number in (0, 1):
            await self._start_registry(number)
        for number in (0, 1):
            await self._start_indexer(number)
        self.workers = [StormWorker(self, number) for number in range(self._worker_count)]
        for worker in self.workers:
            await worker.open()
        self.routers = [StormRouter(self, number) for number in range(self._router_count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for router in self.routers:
            await router.kill()
        for worker in self.workers:
            await worker.close()
        for indexer in self.indexers:
            if indexer is not None:
                await indexer.kill()
        for registry in self.registries:
            if registry is not None:
                await registry.stop()
        await asyncio.to_thread(self.nats.kill, lose_store=True)

    async def storm(self, seed: int, *, actions: int = 6, within_s: float = 5.0) -> TaskReport:
        """One storm and the calm after it.

        Raises:
            AssertionError: somebody doesn't hold the truth `within_s` after the faults have ended.
        """
        self.seed(seed)
        self._load_rng.seed(seed)
        report = TaskReport(seed)
        load = asyncio.create_task(self._load())
        try:
            await self.play(FAULTS, report, actions, 0.12)
            await self._end_faults()
        finally:
            load.cancel()
            await asyncio.wait((load,))
        if load.done() and not load.cancelled():
            load.result()
        await self._settle(report, within_s)
        return report

    # --- load

    async def _load(self) -> None:
        """Random requests straight into the engines: shared prefixes, evictions, aborts."""
        number = 0
        while True:
            for worker in self.workers:
                if worker.alive:
                    number += 1
                    self._submit(worker, f"{worker.worker_id}-{number}-{time.monotonic_ns()}")
            await asyncio.sleep(self._load_rng.uniform(0.0, 0.01))

    def _submit(self, worker: StormWorker, request_id: str) -> None:
        family = self._load_rng.choice(self._prompts)
        prompt = family[: self._load_rng.randrange(1, len(family))] + array("I", [self._load_rng.randrange(256)])
        tokens = self._load_rng.randrange(1, 12)
        worker.engine.submit(
            EngineRequest(
                request_id=request_id,
                tokens=prompt,
                prompt_len=len(prompt),
                sampling=Sampling(max_tokens=tokens, ignore_eos=True),
                local_rank=LocalRank(self._load_rng.randrange(RANKS_PER_WORKER)),
                emit=_ignore,
            )
        )
        if self._load_rng.random() < 0.1:
            worker.engine.abort(request_id)

    # --- the calm

    async def _end_faults(self) -> None:
        self.clear_up()
        for worker in self.workers:
            if not worker.running:
                await worker.start()
        for number in (0, 1):
            if self.indexers[number] is None:
                await self._start_indexer(number)
            if self.registries[number] is None:
                await self._start_registry(number)
        for worker in self.workers:
            worker.nats.release()

    async def _settle(self, report: TaskReport, within_s: float) -> None:
        started = time.monotonic()
        await eventually(lambda: all(worker.alive and worker.idle for worker in self.workers), 10.0)
        began = time.monotonic()
        await eventually(self._agreed, within_s)
        report.calm_s = time.monotonic() - min(began, started)
        left_s = within_s - (time.monotonic() - began)
        for indexer in self.indexers:
            assert indexer is not None
            await self._holds_in_full(indexer, left_s)
        await eventually(self._tidy, within_s)
        truth = self.truth()
        report.blocks = sum(map(len, truth.values()))
        report.tasks = len(asyncio.all_tasks())

    def truth(self) -> dict[RankKey, set[int]]:
        held: dict[RankKey, set[int]] = {}
        for worker in self.workers:
            held |= worker.truth()
        return held

    async def _agreed(self) -> bool:
        """True if every indexer and every router holds the truth; AssertionError if not."""
        for worker in self.workers:
            worker.check()
        truth = self.truth()
        for indexer in self.indexers:
            assert indexer is not None
            await indexer.wait_ready()
            indexer.holds(truth)
        for router in self.routers:
            router.holds(truth)
        for worker in self.workers:
            await worker.wait_ready()
        return True

    def _tidy(self) -> bool:
        truth = self.truth()
        for party in (*self.indexers, *self.routers):
            assert party is not None
            party.check_tidy(truth)
        return True

    async def _holds_in_full(self, indexer: StormIndexer, within_s: float) -> None:
        """What a new follower of this indexer is told is the truth, and so is what workers' Snapshots say."""
        await indexer.wait_ready()
        replica = RunningReplica([indexer.endpoint], "g")
        try:
            await eventually(lambda: replica.replica.complete and replica.holds(self.truth()), max(within_s, 0.5))
        finally:
            await replica.stop()
        for worker in self.workers:
            for key, blocks in worker.truth().items():
                assert await snapshot(worker.endpoint, key.worker_id, key.dp_rank) == (key, blocks)

    # --- services

    async def _start_registry(self, number: int) -> None:
        listen = await self._vacated(self.registry_ports[number])
        self.registries[number] = RunningRegistry(registry_settings(listen, self.nats.url))

    async def _vacated(self, port: int) -> str:
        """The address of a port that the one before, cancelled where it stood, has left."""
        await eventually(lambda: can_listen(port))
        return f"127.0.0.1:{port}"

    async def _start_indexer(self, number: int) -> None:
        listen = await self._vacated(self.indexer_ports[number])
        settings = indexer_settings(number, listen, self.nats.url, loopback(self.registry_ports))
        self.indexers[number] = StormIndexer(settings)

    # --- faults

    async def indexer_restart(self) -> None:
        number = self.rng.randrange(2)
        indexer = self.indexers[number]
        if indexer is not None:
            await indexer.kill()
        await self._start_indexer(number)

    async def indexer_down(self) -> None:
        number = self.rng.randrange(2)
        indexer, self.indexers[number] = self.indexers[number], None
        if indexer is not None:
            await indexer.kill()

    async def router_restart(self) -> None:
        if self.routers:
            number = self.rng.randrange(len(self.routers))
            await self.routers[number].kill()
            self.routers[number] = StormRouter(self, number)

    async def registry_restart(self) -> None:
        number = self.rng.randrange(2)
        registry = self.registries[number]
        if registry is not None:
            await registry.stop()
        await self._start_registry(number)

    async def worker_restart(self) -> None:
        worker = self.rng.choice(self.workers)
        await worker.kill()
        await worker.start()

    async def worker_down(self) -> None:
        await self.rng.choice(self.workers).kill()

    async def lease_flap(self) -> None:
        """Somebody ends a lease; its worker finds out and registers again, the same instance."""
        worker = self.rng.choice(self.workers)
        client = RegistryClient(loopback(self.registry_ports))
        try:
            if worker.alive:
                async with asyncio.timeout(0.5):
                    await client.deregister(worker.instance)
        except (TimeoutError, RankwayError):
            pass  # no registry just now
        finally:
            await client.close()

    async def reset_caches(self) -> None:
        worker = self.rng.choice(self.workers)
        if not worker.alive:
            return
        try:
            await asyncio.wait_for(worker.wait_ready(), 1.0)
            async with rpc.open_channel(worker.endpoint) as channel:
                request = worker_pb2.ResetPrefixCacheRequest()
                await worker_pb2_grpc.WorkerStub(channel).ResetPrefixCache(request, timeout=1.0)
        except (TimeoutError, grpc.aio.AioRpcError):
            pass  # it is still starting


def _ignore(output: EngineOutput) -> None:
    pass


FAULTS: Sequence[Callable[[World], Awaitable[None]]] = (
    *NETWORK_FAULTS,
    World.indexer_restart,
    World.indexer_down,
    World.router_restart,
    World.registry_restart,
    World.worker_restart,
    World.worker_down,
    World.lease_flap,
    World.reset_caches,
)
