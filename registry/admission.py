"""Register, KeepAlive and Deregister against the bucket: the rules of `membership` under concurrent registries.

A registration takes three writes, each a compare-and-set:

1. the record as *pending*, with a lease: from here on the instance counts as alive for other registries, and nobody else sees it;
2. the group's window map with the new window: this decides between registries that race;
3. the record as admitted, replacing the pending one: it fails if the pending lease has ended in the meantime.

Whoever takes over a window first reads the map, then finds its holder dead, then writes the map. The holder can't come back
unseen: a renewal replaces a live record or fails, and a new registration changes the map.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from rankway import logs
from rankway.errors import NotFound, RankwayError, Unavailable
from rankway.ranks import Instance
from rankway.registry import membership
from rankway.registry.bucket import Bucket, Held, Stale
from rankway.registry.records import Record

log = logs.get("registry.admission")

MAX_ATTEMPTS = 40
"""Of one call, each lost to another writer of the same key."""

PAUSE_MAX_S = 0.02
"""Random pause before another attempt."""

T = TypeVar("T")


@dataclass(slots=True)
class AdmissionStats:
    contended: int = 0
    """Attempts lost to another writer."""


class Admission:
    """The three calls that change the bucket. Each returns the sequence of what it wrote.

    Error handling: raises the refusals of `membership`; `Unavailable` when JetStream doesn't answer or the keys stay contended.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.stats = AdmissionStats()

    async def register(self, record: Record) -> int:
        """Admit a worker, or renew the lease of the same instance."""
        try:
            return await self._until_settled(lambda: self._try_register(record))
        except RankwayError:
            await self._withdraw(record)
            raise

    async def keep_alive(self, record: Record) -> int:
        """Renew a lease and take over the record's changeable fields."""
        return await self._until_settled(lambda: self._try_keep_alive(record))

    async def deregister(self, instance: Instance) -> int | None:
        """End a lease; None if it had ended already."""
        return await self._until_settled(lambda: self._try_deregister(instance))

    async def _try_register(self, record: Record) -> int:
        held = await self._bucket.worker(record.worker_id)
        if held.record is not None:
            membership.check_succession(held.record, record)
            if held.record.epoch == record.epoch and not held.pending:
                return await self._bucket.put_worker(record, replaces=held.sequence)
        group, group_sequence = await self._bucket.group(record.dp_group)
        dead = await self._dead_rivals(group, record) if group is not None else set()
        admitted = membership.admit(group, record, dead)
        pending = await self._bucket.put_worker(record, replaces=held.sequence, pending=True)
        # Also when it changes nothing: the write is what a registry that found this worker dead collides with.
        await self._bucket.put_group(admitted, replaces=group_sequence)
        return await self._bucket.put_worker(record, replaces=pending)

    async def _dead_rivals(self, group: membership.Group, record: Record) -> set[Instance]:
        """The rivals that hold no lease. Stops at the first that does: it alone has the record refused."""
        dead = set()
        for rival in membership.rivals(group, record):
            held = await self._bucket.worker(rival.worker_id)
            if held.record is not None and held.record.epoch == rival.epoch:
                break
            dead.add(rival)
        return dead

    async def _withdraw(self, record: Record) -> None:
        """Take back what a refused registration may have left pending. Best effort: its lease ends by itself."""
        try:
            held = await self._bucket.worker(record.worker_id)
            if held.pending and held.record is not None and held.record.instance == record.instance:
                await self._bucket.end_worker(record.worker_id, replaces=held.sequence)
        except (Unavailable, Stale):
            log.debug("a refused registration stays pending until its lease ends", worker_id=record.worker_id)

    async def _try_keep_alive(self, record: Record) -> int:
        held = await self._bucket.worker(record.worker_id)
        if held.record is not None:
            membership.check_epoch(held.record, record.instance)
        if not _holds(held, record.instance):
            raise NotFound(f"worker {record.worker_id} epoch {record.epoch} holds no lease: it has ended, register again")
        membership.check_renewal(held.record, record)  # type: ignore[arg-type]  # _holds says there is one
        return await self._bucket.put_worker(record, replaces=held.sequence)

    async def _try_deregister(self, instance: Instance) -> int | None:
        held = await self._bucket.worker(instance.worker_id)
        if held.record is None:
            return None
        membership.check_epoch(held.record, instance)
        if held.record.epoch != instance.epoch:
            return None
        return await self._bucket.end_worker(instance.worker_id, replaces=held.sequence)

    async def _until_settled(self, attempt: Callable[[], Awaitable[T]]) -> T:
        for _ in range(MAX_ATTEMPTS):
            try:
                return await attempt()
            except Stale:
                self.stats.contended += 1
                await asyncio.sleep(random.uniform(0, PAUSE_MAX_S))
        raise Unavailable(f"the registry's records stay contended after {MAX_ATTEMPTS} attempts; try again")


def _holds(held: Held, instance: Instance) -> bool:
    return held.record is not None and not held.pending and held.record.instance == instance
