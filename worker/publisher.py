"""What the worker tells the system about its ranks: KV events and loads, over NATS.

An engine never waits for NATS. What can't be sent is dropped and counted; the hole in the seqs makes every indexer repair with a
snapshot, and loads carry the digest that shows whether one is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence

import nats.errors
from nats.aio.client import Client

from rankway import bus, logs
from rankway.ranks import DpRange, Instance, LocalRank
from rankway.worker.engine import EngineEvent, EngineInfo, EngineLoad
from rankway.worker.feed import RankFeed, RankSnapshot
from rankway.worker.mirror import Change

log = logs.get("publisher")

MAX_QUEUED_BYTES = 16 * 2**20
"""Messages waiting for NATS; beyond, new ones are dropped."""

LOAD_INTERVAL_S = 0.05
"""Loads follow changes no faster than this."""

IDLE_LOAD_INTERVAL_S = 1.0
"""Loads of ranks on which nothing changes."""

CLOSE_TIMEOUT_S = 1.0

Loads = Callable[[], Sequence[EngineLoad]]


class Publisher:
    """The engine's sink. `run` sends; everything else only queues and never blocks.

    Events that come before `open` (an engine that warms up) are kept for it.
    """

    def __init__(self, instance: Instance, dp_group: str) -> None:
        self._instance = instance
        self._dp_group = dp_group
        self._early: list[tuple[LocalRank, Sequence[EngineEvent] | None]] = []
        self._feeds: list[RankFeed] = []
        self._window = DpRange(0, 1)
        self._total_blocks = 0
        self._loads: Loads = list
        self._queue: deque[tuple[RankFeed, bytes]] = deque()
        self._queued_bytes = 0
        self._queue_filled = asyncio.Event()
        self._queue_empty = asyncio.Event()
        self._queue_empty.set()
        self._changed = asyncio.Event()
        self._dirty: set[int] = set()
        self._client: Client | None = None

    @property
    def feeds(self) -> Sequence[RankFeed]:
        """One per local rank; for metrics and tests."""
        return self._feeds

    def open(self, info: EngineInfo, loads: Loads) -> None:
        """The engine has started: its ranks are known."""
        self._window = info.window
        self._total_blocks = info.total_kv_blocks
        self._loads = loads
        self._feeds = [RankFeed(self._instance, rank, info.model, info.block_size) for rank in info.window.ranks()]
        early, self._early = self._early, []
        for local_rank, events in early:
            if events is None:
                self.kv_lost(local_rank)
            else:
                self.kv_events(local_rank, events)

    def kv_events(self, local_rank: LocalRank, events: Sequence[EngineEvent]) -> None:
        if not self._feeds:
            self._early.append((local_rank, events))
            return
        feed = self._feeds[local_rank]
        self._send(feed, feed.mirror.apply(events))

    def kv_lost(self, local_rank: LocalRank) -> None:
        if not self._feeds:
            self._early.append((local_rank, None))
            return
        feed = self._feeds[local_rank]
        feed.counts.lost_events += 1
        log.warning("engine events lost: what is known of the rank's cache is void", dp_rank=feed.dp_rank)
        self._send(feed, feed.mirror.clear())

    def stepped(self, local_rank: LocalRank) -> None:
        self._dirty.add(local_rank)
        self._changed.set()

    def cleared(self, local_rank: LocalRank) -> None:
        """The rank's prefix cache was emptied: tell it now."""
        if self._feeds:
            feed = self._feeds[local_rank]
            self._send(feed, feed.mirror.clear())

    def snapshot(self, local_rank: LocalRank) -> RankSnapshot:
        """The rank's blocks as of its last seq."""
        return self._feeds[local_rank].snapshot()

    async def run(self, url: str) -> None:
        """Connect (for as long as it takes) and send until cancelled."""
        self._client, _ = await bus.connect(url, name=self._instance.worker_id)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_batches(self._client))
                tasks.create_task(self._send_loads(self._client))
        finally:
            client, self._client = self._client, None
            with contextlib.suppress(TimeoutError):
                # A server that hangs is no reason for us to.
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await client.close()

    async def flush(self, timeout_s: float) -> None:
        """Wait until NATS has what is queued, `timeout_s` at most."""
        try:
            async with asyncio.timeout(timeout_s):
                if self._client is not None and self._client.is_connected:
                    await self._queue_empty.wait()
                    await self._client.flush()
        except (TimeoutError, nats.errors.Error) as error:
            log.warning("events not flushed", queued=len(self._queue), error=str(error))

    def _connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    def _send(self, feed: RankFeed, changes: Sequence[Change]) -> None:
        if not changes:
            return
        for message in feed.batches(changes, _now_us()):
            feed.counts.batches += 1
            if not self._connected() or self._queued_bytes + len(message) > MAX_QUEUED_BYTES:
                feed.counts.dropped_batches += 1
                continue
            self._queue.append((feed, message))
            self._queued_bytes += len(message)
        if self._queue:
            self._queue_empty.clear()
            self._queue_filled.set()
        self.stepped(LocalRank(feed.dp_rank - self._window.start_rank))

    async def _send_batches(self, client: Client) -> None:
        while True:
            await self._queue_filled.wait()
            self._queue_filled.clear()
            while self._queue:
                feed, message = self._queue.popleft()
                subject = bus.kv_subject(self._dp_group, self._instance.worker_id, feed.dp_rank)
                feed.counts.dropped_batches += not await self._publish(client, subject, message)
                self._queued_bytes -= len(message)
            self._queue_empty.set()

    async def _send_loads(self, client: Client) -> None:
        last_full = 0.0
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() - last_full >= IDLE_LOAD_INTERVAL_S:
                self._dirty.update(range(len(self._feeds)))
                last_full = loop.time()
            dirty, self._dirty = self._dirty, set()
            if dirty:
                await self._report(client, sorted(dirty))
            await asyncio.sleep(LOAD_INTERVAL_S)
            await self._wait_for_change(loop, last_full + IDLE_LOAD_INTERVAL_S)

    async def _report(self, client: Client, local_ranks: Sequence[int]) -> None:
        loads = self._loads()
        for local_rank in local_ranks:
            feed = self._feeds[local_rank]
            feed.load = loads[local_rank]
            # A load is never kept for a later connection: it would be taken as fresh.
            subject = bus.load_subject(self._dp_group, self._instance.worker_id, feed.dp_rank)
            sent = await self._publish(client, subject, feed.load_report(self._total_blocks, _now_us()))
            feed.counts.loads += sent
            feed.counts.dropped_loads += not sent

    async def _wait_for_change(self, loop: asyncio.AbstractEventLoop, until: float) -> None:
        self._changed.clear()
        if self._dirty:
            return
        timer = loop.call_at(until, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    async def _publish(self, client: Client, subject: str, message: bytes) -> bool:
        if not client.is_connected:
            return False
        try:
            await client.publish(subject, message)
        except (nats.errors.Error, OSError) as error:
            log.debug("publish failed", subject=subject, error=str(error))
            return False
        return True


def _now_us() -> int:
    return time.time_ns() // 1000
