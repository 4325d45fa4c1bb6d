"""The indexer: who holds which block, always true, and the last load of every rank.

It hears workers on NATS, learns from the registry who lives, repairs itself with workers' snapshots, and feeds routers.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry

from rankway import bus, logs, native, rpc, service
from rankway.indexer.feed import Feed, FollowerLimits
from rankway.indexer.intake import Intake
from rankway.indexer.metrics import StateCollector
from rankway.indexer.rank import Limits, Rank
from rankway.indexer.rank import Snapshot as RankSnapshot
from rankway.indexer.repair import Repairer, RepairLimits
from rankway.indexer.servicer import SERVICE_NAME, Servicer, State
from rankway.indexer.settings import IndexerSettings
from rankway.indexer.slots import RankKey
from rankway.indexer.tracker import Member, Observer, Tracker
from rankway.registry.client import Gone, Put, Record, RegistryClient, Snapshot

log = logs.get("indexer")

TICK_S = 0.02
STOP_GRACE_S = 1.0


async def run(settings: IndexerSettings, *, ready: service.Ready, stop: asyncio.Event) -> None:
    """Serve until `stop`.

    Start: listen (Follow answers UNAVAILABLE) → connect to NATS and subscribe → watch the registry → repair every rank → ready.
    Stop: health NOT_SERVING → end the followers' streams (they go to another indexer) → stop repairs and watch → leave NATS.

    Raises:
        OSError: an address can't be had.
    """
    state = _state(settings)
    repairer = Repairer(state.tracker, _repair_limits(settings))
    state.tracker.observers += [state.feed, repairer]
    metrics = CollectorRegistry()
    metrics.register(StateCollector(state, repairer, asyncio.get_running_loop()))
    metrics_host, metrics_port = _host_port(settings.metrics_listen)
    metrics_address, close_metrics = service.serve_metrics(metrics, metrics_host, metrics_port)
    server = rpc.Server([SERVICE_NAME])
    Servicer(state, asyncio.get_running_loop().time).add_to(server)
    try:
        host, _ = _host_port(settings.grpc_listen)
        address = f"{host}:{await server.start(settings.grpc_listen)}"
        state.feed.indexer_id = settings.indexer_id or f"{socket.gethostname()}:{address.rpartition(':')[2]}"
        addresses = {"grpc": address, "metrics": metrics_address}
        indexing = asyncio.create_task(_index(settings, server, state, repairer, lambda: ready(addresses)))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({indexing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            state.feed.end()
            await server.stop(STOP_GRACE_S)
            stopping.cancel()
            indexing.cancel()
            await asyncio.wait({indexing, stopping})
        if not indexing.cancelled():
            indexing.result()
    finally:
        # A scrape under way wants the event loop.
        await asyncio.to_thread(close_metrics)


async def _index(
    settings: IndexerSettings, server: rpc.Server, state: State, repairer: Repairer, on_ready: Callable[[], None]
) -> None:
    """Follow NATS and the registry until cancelled."""
    client, status = await bus.connect(settings.nats_url, name="rankway-indexer")
    state.bus = status
    registry = RegistryClient(settings.registry_endpoints)
    listed = asyncio.Event()
    resync = Resync()
    state.tracker.observers.append(resync)
    try:
        await state.intake.subscribe(client, settings.dp_group, settings.pending_messages)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(repairer.run())
            tasks.create_task(_watch(registry, settings.dp_group, state, resync, listed))
            tasks.create_task(_tick(state))
            await listed.wait()
            await resync.wait(settings.resync_timeout_s)
            state.tracker.observers.remove(resync)
            state.ready = True
            await server.set_ready(True)
            on_ready()
    finally:
        state.ready = False
        await registry.close()
        await client.close()


async def _watch(registry: RegistryClient, dp_group: str, state: State, resync: Resync, listed: asyncio.Event) -> None:
    """Tell the tracker who lives. While no registry can be reached, those last known do."""
    async for event in registry.watch(dp_group):
        match event:
            case Snapshot(records):
                state.tracker.replace_members(map(_member, records))
                if not listed.is_set():
                    resync.begin(state.tracker.ranks)
                    listed.set()
            case Put(record):
                state.tracker.put_member(_member(record))
            case Gone(instance):
                state.tracker.remove_member(instance.worker_id, instance.epoch)


async def _tick(state: State) -> None:
    """Let time pass for the ranks that wait for something."""
    loop = asyncio.get_running_loop()
    while True:
        state.tracker.on_tick(loop.time())
        await asyncio.sleep(TICK_S)


class Resync(Observer):
    """The ranks that the registry named first and that have never been known."""

    def __init__(self) -> None:
        self.late: set[RankKey] = set()
        self.over = asyncio.Event()

    def begin(self, ranks: Iterable[RankKey]) -> None:
        self.late.update(ranks)
        self._look()

    def repaired(self, rank: Rank, snapshot: RankSnapshot) -> None:
        self.late.discard(rank.key)
        self._look()

    def gone(self, rank: Rank) -> None:
        self.late.discard(rank.key)
        self._look()

    def _look(self) -> None:
        if not self.late:
            self.over.set()

    async def wait(self, timeout_s: float) -> None:
        """Return when all of them have been repaired or have left, after `timeout_s` at most."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.over.wait()
        except TimeoutError:
            log.warning("ready although ranks have not answered", ranks=len(self.late), one=str(min(self.late)))


def _state(settings: IndexerSettings) -> State:
    limits = Limits(
        reorder_s=settings.reorder_ms / 1000, tail_s=settings.tail_ms / 1000, waiting_batches=settings.waiting_batches
    )
    tracker = Tracker(native.open_index(), limits)
    feed = Feed(settings.indexer_id, tracker.ranks, FollowerLimits(settings.follower_messages, settings.follower_bytes))
    return State(tracker, feed, Intake(tracker), bus.BusStatus())


def _repair_limits(settings: IndexerSettings) -> RepairLimits:
    return RepairLimits(concurrency=settings.repair_concurrency, timeout_s=settings.repair_timeout_s)


def _member(record: Record) -> Member:
    return Member(
        worker_id=record.worker_id,
        epoch=record.epoch,
        endpoint=record.endpoint,
        dp_group=record.dp_group,
        window=record.window,
        model=record.model,
        model_aliases=record.model_aliases,
        block_size=record.block_size,
    )


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
