"""Repairs: the snapshots that set unknown ranks right, fetched from their workers.

A rank has one task from the moment it becomes unknown until it is known or gone. Snapshots are bounded in number, overall and per
worker (a worker that hangs must not hold up the others), each has a deadline, and failures wait longer and longer. A rank
that leaves cancels its task.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import grpc
import grpc.aio

from rankway import logs, rpc
from rankway.indexer.rank import Rank, Snapshot, SnapshotWrong
from rankway.indexer.slots import RankKey
from rankway.indexer.tracker import Member, Observer, Tracker
from rankway.ranks import Instance
from rankway.v1 import worker_pb2, worker_pb2_grpc

log = logs.get("repair")


@dataclass(frozen=True, slots=True)
class RepairLimits:
    concurrency: int = 16
    per_worker: int = 2
    timeout_s: float = 10.0
    """For one snapshot."""
    silence_s: float = 2.0
    """Without a message for so long a snapshot is given up: workers answer from memory, so a call that hangs is asked anew."""
    backoff_min_s: float = 0.1
    backoff_max_s: float = 5.0


class SnapshotFailed(Exception):
    """A worker's answer that is no snapshot of the rank."""


class Repairer(Observer):
    """Fetches snapshots for the tracker, which tells it what is unknown. `run` owns every task; before it nothing is repaired."""

    def __init__(self, tracker: Tracker, limits: RepairLimits) -> None:
        self._tracker = tracker
        self._limits = limits
        self._tasks: dict[RankKey, asyncio.Task[None]] = {}
        self._workers: dict[Instance, _Worker] = {}
        self._free = asyncio.Semaphore(limits.concurrency)
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Until cancelled; then every repair is, and channels are closed."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                try:
                    for rank in self._tracker.ranks.values():
                        if not rank.known:
                            self.unknown(rank)
                    await asyncio.Event().wait()
                finally:
                    self._group = None
        finally:
            for worker in self._workers.values():
                await worker.channel.close()
            self._workers.clear()

    @property
    def running(self) -> int:
        """Ranks that are being repaired or wait for it."""
        return len(self._tasks)

    def unknown(self, rank: Rank) -> None:
        """Repair the rank, if that isn't under way."""
        if rank.key in self._tasks or self._group is None:
            return
        member = self._tracker.members[rank.key.worker_id]
        task = self._group.create_task(self._repair(rank, self._worker(member)), name=f"repair {rank.key}")
        self._tasks[rank.key] = task
        task.add_done_callback(lambda _: self._done(rank, task))

    def gone(self, rank: Rank) -> None:
        """Stop asking."""
        task = self._tasks.pop(rank.key, None)
        if task is not None:
            task.cancel()
        worker = self._workers.get(rank.key.instance)
        if worker is not None:
            worker.ranks.discard(rank.key)
            if not worker.ranks and self._group is not None:
                del self._workers[rank.key.instance]
                self._group.create_task(worker.channel.close())

    def _worker(self, member: Member) -> _Worker:
        instance = Instance(member.worker_id, member.epoch)
        worker = self._workers.get(instance)
        if worker is None:
            channel = rpc.open_channel(member.endpoint)
            free = asyncio.Semaphore(self._limits.per_worker)
            worker = self._workers[instance] = _Worker(channel, free, set(member.ranks()))
        return worker

    def _done(self, rank: Rank, task: asyncio.Task[None]) -> None:
        if self._tasks.get(rank.key) is task:
            del self._tasks[rank.key]
            if not rank.known:  # it became unknown again after the task's last look
                self.unknown(rank)

    async def _repair(self, rank: Rank, worker: _Worker) -> None:
        loop = asyncio.get_running_loop()
        pause_s = self._limits.backoff_min_s
        while not rank.known:
            failure = ""
            async with worker.free, self._free:
                rank.on_repair_started(loop.time())
                cause = rank.repair_cause
                try:
                    snapshot = await self._fetch(rank.key, worker.channel)
                    if self._tracker.on_snapshot(rank, snapshot, loop.time()):
                        log.info("repaired", **_who(rank), cause=cause, seq=rank.last_seq, blocks=snapshot.block_count)
                except grpc.aio.AioRpcError as error:
                    failure = f"{error.code().name}: {error.details()}"
                except (SnapshotFailed, SnapshotWrong) as error:
                    failure = str(error)
            if failure:
                rank.on_snapshot_failed()
                log.warning("repair failed; trying again", **_who(rank), cause=cause, failure=failure, pause_s=pause_s)
            if not rank.known:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, self._limits.backoff_max_s)

    async def _fetch(self, key: RankKey, channel: grpc.aio.Channel) -> Snapshot:
        """Raises AioRpcError, or SnapshotFailed if the answer is another instance's or empty."""
        request = worker_pb2.SnapshotRequest(dp_rank=key.dp_rank)
        chunks = []
        seq = digest = count = -1
        call = worker_pb2_grpc.WorkerStub(channel).Snapshot(request, timeout=self._limits.timeout_s)
        try:
            async with asyncio.timeout(self._limits.silence_s) as silence:
                async for part in call:
                    silence.reschedule(asyncio.get_running_loop().time() + self._limits.silence_s)
                    if part.epoch != key.epoch:
                        raise SnapshotFailed(f"epoch {part.epoch} answers at the endpoint of epoch {key.epoch}")
                    if len(part.block_hashes) % 8:
                        raise SnapshotFailed(f"block_hashes of {len(part.block_hashes)} bytes: not a multiple of 8")
                    chunks.append(part.block_hashes)
                    seq, digest, count = part.seq, part.kv_digest, part.kv_block_count
        except TimeoutError:
            raise SnapshotFailed(f"no message in {self._limits.silence_s:g} s") from None
        finally:
            call.cancel()
        if seq < 0:
            raise SnapshotFailed("the snapshot has no message")
        return Snapshot(seq, digest, count, tuple(chunks))


@dataclass(slots=True)
class _Worker:
    """One instance as the repairer reaches it; it goes with the last of its ranks."""

    channel: grpc.aio.Channel
    free: asyncio.Semaphore
    ranks: set[RankKey]


def _who(rank: Rank) -> dict[str, object]:
    return {"worker_id": rank.key.worker_id, "epoch": rank.key.epoch, "dp_rank": rank.key.dp_rank}
