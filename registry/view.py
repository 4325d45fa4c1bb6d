"""What a registry replica shows its watchers: the live records, and the last deltas with their revisions. Pure.

The bucket's consumer feeds it. Two things make it more than a dict:

* A lease that ends because NATS or this registry was away says nothing about the worker. For one lease after an interruption such
  an end is held back; a worker that comes back in that time was never gone.
* A watcher reads the deltas through a position in one shared log, so a slow one costs nothing: when the log has moved past it,
  it gets a snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rankway.ranks import Instance
from rankway.registry.records import Gone, Put, Record

LOG_SIZE = 4096
"""Changes kept for watchers that are behind or resume."""


@dataclass(frozen=True, slots=True)
class Delta:
    revision: int
    """Where it stands in the order of all changes."""
    announced: int
    """What a watcher that has applied it may resume after, at any replica: see `View.announced`."""
    event: Put | Gone
    dp_group: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the bucket, as it is after a change."""

    worker_id: str
    revision: int
    record: Record | None
    """None: the lease ended."""
    pending: bool = False
    """The record asks for admission and isn't admitted yet."""
    deregistered: bool = False
    """The lease was ended on purpose (or its entry can't be read)."""


class View:
    """Live records by worker_id, and a bounded log of changes. Times are seconds of one monotonic clock."""

    def __init__(self, lease_s: float, log_size: int = LOG_SIZE) -> None:
        self.revision = 0
        """Everything in the bucket up to this revision is contained."""
        self._lease_s = lease_s
        self._records: dict[str, tuple[Record, int]] = {}
        self._missing: dict[str, tuple[float, int]] = {}
        self._lenient_until = 0.0
        self._log: deque[Delta] = deque(maxlen=log_size)
        self._logged = 0
        self._resumable_from = 0

    def records(self, dp_group: str = "") -> list[Record]:
        """Live records of a group, or of all, by worker_id."""
        return [record for _, (record, _) in sorted(self._records.items()) if dp_group in ("", record.dp_group)]

    @property
    def announced(self) -> int:
        """The revision that watchers are told: while an end is held back, the one before it, so that a watcher which resumes
        elsewhere hears of it there."""
        return min([self.revision, *(before for _, before in self._missing.values())])

    @property
    def position(self) -> int:
        """Where the log ends: deltas after this moment come after it."""
        return self._logged

    def since(self, position: int) -> list[Delta] | None:
        """Deltas after a position, or None if the log no longer has them all."""
        behind = self._logged - position
        if behind > len(self._log):
            return None
        return [self._log[i] for i in range(len(self._log) - behind, len(self._log))]

    def resume(self, after_revision: int) -> int | None:
        """The position of a watcher that has applied everything up to `after_revision`, or None if it needs a snapshot."""
        if not self._resumable_from <= after_revision <= self.revision:
            return None
        newer = sum(1 for delta in self._log if delta.revision > after_revision)
        return self._logged - newer

    @property
    def lenient_until(self) -> float:
        """Until then, ends of leases are held back, and a watcher that can't resume keeps what it knows."""
        return self._lenient_until

    def interrupted(self, now: float) -> None:
        """Leases may have ended because nobody could renew them: hold back their ends for one lease from now."""
        self._lenient_until = now + self._lease_s
        self._missing = {worker_id: (self._lenient_until, before) for worker_id, (_, before) in self._missing.items()}

    def apply(self, entry: Entry, now: float) -> None:
        """One change of the bucket; those at or before `revision` are passed over."""
        if entry.revision <= self.revision:
            return
        before, self.revision = self.revision, entry.revision
        self._change(entry, before, now)

    def reload(self, entries: Iterable[Entry], revision: int, now: float) -> None:
        """The whole bucket as of `revision`, after a time in which changes may have been missed."""
        before, self.revision = self.revision, revision
        seen = set()
        for entry in entries:
            seen.add(entry.worker_id)
            self._change(entry, before, now)
        for worker_id in self._records.keys() - seen:
            self._change(Entry(worker_id, revision, None), before, now)
        # Changes that were missed have no place in the log.
        self._resumable_from = revision

    def expire(self, now: float) -> None:
        """Give up the workers that didn't come back in time."""
        for worker_id in [worker_id for worker_id, (until, _) in self._missing.items() if until <= now]:
            self._drop(worker_id, self.revision)

    def next_expiry(self) -> float | None:
        """When `expire` has something to do."""
        return min((until for until, _ in self._missing.values()), default=None)

    def __len__(self) -> int:
        return len(self._records)

    def _change(self, entry: Entry, before: int, now: float) -> None:
        worker_id, record = entry.worker_id, entry.record
        known = self._records.get(worker_id)
        if record is None:
            if known is None:
                return
            if entry.deregistered or now >= self._lenient_until:
                self._drop(worker_id, entry.revision)
            else:
                self._missing.setdefault(worker_id, (self._lenient_until, before))
            return
        # A newer life ends the one before, be it admitted or not. The delta before the last one of a revision carries
        # the revision before: who resumes between the two misses nothing.
        if known is not None and known[0].epoch != record.epoch:
            self._drop(worker_id, entry.revision if entry.pending else entry.revision - 1)
            known = None
        if entry.pending:
            return
        self._missing.pop(worker_id, None)
        self._records[worker_id] = (record, entry.revision)
        if known is None or known[0] != record:
            self._append(entry.revision, Put(record), record.dp_group)

    def _drop(self, worker_id: str, revision: int) -> None:
        self._missing.pop(worker_id, None)
        record, _ = self._records.pop(worker_id)
        self._append(revision, Gone(Instance(worker_id, record.epoch)), record.dp_group)

    def _append(self, revision: int, event: Put | Gone, dp_group: str) -> None:
        if len(self._log) == self._log.maxlen:
            self._resumable_from = max(self._resumable_from, self._log[0].revision)
        self._log.append(Delta(revision, min(revision, self.announced), event, dp_group))
        self._logged += 1
