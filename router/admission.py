"""The queue of requests that wait for a target with room. Pure: bounded, ordered, fair; times are arguments, in seconds.

Order: the lowest priority number first; among equals, the tenant that has had the least (prompt tokens let in); within a tenant
by arrival. A tenant that comes back from a pause starts level with the others: pauses earn nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rankway.errors import Overloaded

T = TypeVar("T")

RATE_WINDOW = 32
"""Entries let in last, from which the retry delay is estimated."""

RETRY_MIN_S, RETRY_MAX_S = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the queue."""

    entries: int = 1024
    tokens: int = 4_000_000
    """Prompt tokens of all entries."""
    age_s: float = 30.0


@dataclass(slots=True)
class Entry(Generic[T]):
    """One waiting request."""

    item: T
    tokens: int
    priority: int
    tenant: str
    pool: Hashable
    """Entries of one pool wait for the same targets: when one can't go, none can."""
    arrived: float
    expires: float
    serial: int = 0
    gone: bool = False


@dataclass(slots=True)
class _Tenant(Generic[T]):
    served: float = 0.0
    """Prompt tokens let in, from a common start: its place in the order."""
    waiting: int = 0
    heap: list[tuple[int, int, Entry[T]]] = field(default_factory=list)


@dataclass(slots=True)
class QueueCounts:
    """What happened since the start."""

    waited: int = 0
    let_in: int = 0
    rejected: int = 0
    expired: int = 0


class WaitQueue(Generic[T]):
    """Requests that wait."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.counts = QueueCounts()
        self.tokens = 0
        self._entries: dict[int, Entry[T]] = {}
        self._tenants: dict[str, _Tenant[T]] = {}
        self._serials = itertools.count()
        self._floor = 0.0
        self._let_in_at: deque[float] = deque(maxlen=RATE_WINDOW)

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self, item: T, tokens: int, priority: int, tenant: str, pool: Hashable, now: float, max_age_s: float | None = None
    ) -> Entry[T]:
        """Let a request wait.

        Raises:
            Overloaded: the queue is full, in number or in tokens.
        """
        limits = self.limits
        if len(self._entries) >= limits.entries or (self._entries and self.tokens + tokens > limits.tokens):
            self.counts.rejected += 1
            raise Overloaded(
                f"every target is full and {len(self._entries)} requests of {self.tokens} tokens wait already",
                self.retry_after_s(now),
            )
        age_s = limits.age_s if max_age_s is None else min(max_age_s, limits.age_s)
        entry = Entry(item, tokens, priority, tenant, pool, now, now + age_s, next(self._serials))
        self._entries[entry.serial] = entry
        self.tokens += tokens
        self.counts.waited += 1
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant(served=self._floor)
        known.served = max(known.served, self._floor) if not known.waiting else known.served
        known.waiting += 1
        heapq.heappush(known.heap, (priority, entry.serial, entry))
        return entry

    def remove(self, entry: Entry[T]) -> None:
        """The request waits no more (its client left, it was let in, or its time is over). Idempotent."""
        if not entry.gone:
            entry.gone = True
            del self._entries[entry.serial]
            self.tokens -= entry.tokens
            self._tenants[entry.tenant].waiting -= 1

    def let_in(self, now: float, try_item: Callable[[T], bool], most: int = 64) -> int:
        """Offer entries in their order until nothing more goes; returns how many went.

        Args:
            try_item: whether the request found a target. It isn't called for further entries of a pool where one found none.
            most: entries that may fail to go before the rest must wait for the next time.
        """
        blocked: set[Hashable] = set()
        went = failed = 0
        for entry in self._in_order(blocked):
            if entry.gone:
                continue
            if try_item(entry.item):
                went += 1
                self.counts.let_in += 1
                self._let_in_at.append(now)
                self._serve(entry)
                self.remove(entry)
            else:
                blocked.add(entry.pool)
                failed += 1
                if failed >= most:
                    break
        return went

    def expire(self, now: float) -> list[T]:
        """Take out the requests that have waited too long."""
        over = [entry for entry in self._entries.values() if entry.expires <= now]
        for entry in over:
            self.remove(entry)
        self.counts.expired += len(over)
        self._tidy()
        return [entry.item for entry in over]

    def items(self) -> list[T]:
        return [entry.item for entry in self._entries.values()]

    def oldest_age_s(self, now: float) -> float:
        """How long the request that has waited longest has waited."""
        return max((now - entry.arrived for entry in self._entries.values()), default=0.0)

    def retry_after_s(self, now: float) -> float:
        """When a place is likely to be free: the queue's length at the rate at which requests were let in last."""
        if len(self._let_in_at) < 2:
            return RETRY_MIN_S * 2
        rate = len(self._let_in_at) / max(now - self._let_in_at[0], 1e-3)
        return min(max(len(self._entries) / rate, RETRY_MIN_S), RETRY_MAX_S)

    def _in_order(self, blocked: set[Hashable]) -> Iterator[Entry[T]]:
        """Entries that aren't blocked, in their order; it may change as they go, and a heap's failed entries come back to it."""
        passed: list[tuple[_Tenant[T], tuple[int, int, Entry[T]]]] = []
        try:
            while True:
                best: _Tenant[T] | None = None
                for tenant in list(self._tenants.values()):
                    self._settle(tenant, blocked, passed)
                    if tenant.heap and (best is None or self._rank(tenant) < self._rank(best)):
                        best = tenant
                if best is None:
                    return
                head = heapq.heappop(best.heap)
                passed.append((best, head))
                yield head[2]
        finally:
            for tenant, head in passed:
                if not head[2].gone:
                    heapq.heappush(tenant.heap, head)

    @staticmethod
    def _rank(tenant: _Tenant[T]) -> tuple[int, float, int]:
        priority, serial, _ = tenant.heap[0]
        return priority, tenant.served, serial

    @staticmethod
    def _settle(tenant: _Tenant[T], blocked: set[Hashable], passed: list[tuple[_Tenant[T], tuple[int, int, Entry[T]]]]) -> None:
        """Bring an entry that may be offered to the head of the tenant's heap."""
        while tenant.heap:
            entry = tenant.heap[0][2]
            if entry.gone:
                heapq.heappop(tenant.heap)
            elif entry.pool in blocked:
                passed.append((tenant, heapq.heappop(tenant.heap)))
            else:
                return

    def _serve(self, entry: Entry[T]) -> None:
        tenant = self._tenants[entry.tenant]
        self._floor = max(self._floor, tenant.served)
        tenant.served += max(entry.tokens, 1)

    def _tidy(self) -> None:
        """Forget tenants of whom nothing waits and who have had no more than the others."""
        if not self._entries:
            self._floor = 0.0
        for name, tenant in list(self._tenants.items()):
            if not tenant.waiting and (not self._entries or tenant.served <= self._floor):
                del self._tenants[name]
