"""An indexer in the test's process, and a replica that follows one, as a router has it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from harness.messages import RankSource

from rankway import rpc
from rankway.blocks import unpack_hashes
from rankway.indexer import service
from rankway.indexer.client import Follower
from rankway.indexer.settings import IndexerSettings
from rankway.indexer.slots import RankKey
from rankway.native import open_index
from rankway.ranks import Target
from rankway.router.replica import Replica
from rankway.router.targets import Targets
from rankway.v1 import indexer_pb2, indexer_pb2_grpc


class HasSources(Protocol):
    """A worker by what its ranks hold."""

    @property
    def sources(self) -> Mapping[int, RankSource]: ...


class RunningIndexer:
    """An indexer as a task; `stop` ends it as SIGTERM does, `kill` cancels it where it stands."""

    def __init__(self, settings: IndexerSettings) -> None:
        self.addresses: Mapping[str, str] = {}
        self.ready = asyncio.Event()
        self._stop = asyncio.Event()
        self.task = asyncio.create_task(service.run(settings, ready=self._on_ready, stop=self._stop))

    def _on_ready(self, addresses: Mapping[str, str]) -> None:
        self.addresses = addresses
        self.ready.set()

    async def wait_ready(self) -> None:
        waiting = asyncio.create_task(self.ready.wait())
        await asyncio.wait({waiting, self.task}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.task.done():
            self.task.result()
        assert self.ready.is_set()

    @property
    def endpoint(self) -> str:
        return self.addresses["grpc"]

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.wait({self.task})
        if not self.task.cancelled():
            self.task.result()

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})

    async def stats(self) -> indexer_pb2.StatsResponse:
        async with rpc.open_channel(self.endpoint) as channel:
            return await indexer_pb2_grpc.IndexerStub(channel).Stats(indexer_pb2.StatsRequest())

    async def rank_stats(self, dp_rank: int) -> indexer_pb2.RankStats:
        (rank,) = [rank for rank in (await self.stats()).ranks if rank.dp_rank == dp_rank]
        return rank


class RunningReplica:
    """A replica fed by a Follower in a task, as a router has it."""

    def __init__(self, endpoints: Sequence[str], dp_group: str = "") -> None:
        self.targets = Targets()
        self.replica = Replica(open_index(), self.targets)
        self.follower = Follower(endpoints, dp_group, "test")
        self.restarts: list[str] = []
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        async for update in self.follower:
            why = self.replica.apply(update, loop.time())
            if why:
                self.restarts.append(why)
                self.follower.restart(why)

    def held(self, worker_id: str, epoch: int, dp_rank: int) -> set[int] | None:
        """What the replica holds for a known rank; None if it is unknown or not there."""
        rank = self.replica.ranks.get(RankKey(worker_id, epoch, dp_rank))
        if rank is None or not rank.known:
            return None
        assert rank.slot == self.targets.find(Target(worker_id, dp_rank), epoch)  # type: ignore[arg-type]
        return set(unpack_hashes(self.replica.index.blocks(rank.slot)))

    def equals(self, *workers: HasSources) -> bool:
        """True if it holds exactly what these workers hold, every rank known, nothing else; AssertionError if not."""
        return self.holds({s.key: set(s.held) for worker in workers for s in worker.sources.values()})

    def holds(self, truth: Mapping[RankKey, set[int]]) -> bool:
        """True if it holds exactly this, every rank known; AssertionError if not."""
        for key, blocks in truth.items():
            held = self.held(*key)
            assert held is not None, f"{key} is unknown"
            assert held == blocks, f"{key}: {len(held - blocks)} blocks too many, {len(blocks - held)} missing"
        assert self.replica.ranks.keys() == truth.keys()
        return True

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()
