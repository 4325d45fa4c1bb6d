"""The indexer's ear on NATS: one subscription for batches and loads, so that their order is kept, feeding the tracker."""

from __future__ import annotations

import asyncio
import time

from nats.aio.client import Client
from nats.aio.msg import Msg

from rankway import bus, logs
from rankway.indexer.events import Malformed, parse_batch, parse_load
from rankway.indexer.slots import RankKey
from rankway.indexer.tracker import Tracker

log = logs.get("intake")

SLICE_S = 0.005
"""Messages are taken in for so long at most before others on the event loop get their turn."""


class Intake:
    """Parses messages, checks that they are what their subject says, and hands them on. What can't be used is counted."""

    def __init__(self, tracker: Tracker) -> None:
        self.messages = 0
        self.malformed = 0
        self._tracker = tracker
        self._slice_end = 0.0

    async def subscribe(self, client: Client, dp_group: str, pending_messages: int) -> None:
        """Subscribe, and return once the server knows of it: snapshots asked for from now on leave no gap.

        Beyond `pending_messages` the client drops; `bus.BusStatus.slow_consumer_drops` counts them.
        """
        # The active.* subjects are one token shorter.
        subject = f"rankway.v1.{dp_group or '*'}.*.*.*"
        await bus.subscribe(client, subject, self._on_message, pending_messages=pending_messages)

    async def _on_message(self, message: Msg) -> None:
        now = asyncio.get_running_loop().time()
        self.take(message.subject, message.data, now, time.time())
        if now > self._slice_end:
            await asyncio.sleep(0)
            self._slice_end = asyncio.get_running_loop().time() + SLICE_S

    def take(self, subject: str, payload: bytes, now: float, wall: float) -> None:
        """One message. `now` is the event loop's clock, `wall` seconds since 1970, for the lag."""
        self.messages += 1
        try:
            _, _, dp_group, kind, worker_id, dp_rank = subject.split(".")
            if kind == "kv":
                batch = parse_batch(payload)
                self._check(subject, dp_group, worker_id, dp_rank, batch.rank)
                self._tracker.on_batch(batch, now, wall * 1e3 - batch.published_us / 1e3)
            elif kind == "load":
                load = parse_load(payload)
                self._check(subject, dp_group, worker_id, dp_rank, load.rank)
                self._tracker.on_load(load, now)
            else:
                raise Malformed("neither kv nor load")
        except ValueError as error:
            self.malformed += 1
            log.debug("message skipped", subject=subject, bytes=len(payload), reason=str(error))

    def _check(self, subject: str, dp_group: str, worker_id: str, dp_rank: str, key: RankKey) -> None:
        if worker_id != key.worker_id or dp_rank != str(key.dp_rank):
            raise Malformed(f"a message of {key.worker_id}, rank {key.dp_rank}")
        rank = self._tracker.ranks.get(key)
        if rank is not None and rank.dp_group != dp_group:
            raise Malformed(f"its worker is in the DP group {rank.dp_group}")
