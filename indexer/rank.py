"""One rank of one instance: which of its messages to apply, which to drop, when to repair. Pure: time is an argument (seconds).

    known ──gap, digest, tail, overflow──> unknown ──snapshot──> known
    (a new rank starts unknown with the cause "start"; a snapshot that fails leaves it unknown and is asked for again)

* known, seq = last+1: applied, and those that waited for it. seq <= last: dropped as a duplicate. A later seq waits up to
  `reorder_s` (or `reorder_batches`) for the missing ones, since a bus may reorder a little; then a repair starts.
* unknown: batches wait, bounded in number and bytes; when there is no room the first that came goes, as the one that the
  snapshot is likeliest to cover. After the snapshot those beyond its seq are applied in order; if one of them was dropped the
  rank is repaired again ("overflow").
* A load says up to which seq its worker is and what it holds there. Equal seqs with another digest or count: repair
  ("digest"). A seq that does not arrive within `tail_s`: the last message was lost, repair ("tail").
* A snapshot is the worker's own word and always taken, even if its seq is lower than what was applied: then what was applied
  did not come from the worker.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rankway.index import Index
from rankway.indexer.events import KvBatch, RankLoad
from rankway.indexer.slots import RankKey


class Cause(enum.StrEnum):
    """Why a rank is repaired."""

    START = "start"
    GAP = "gap"
    DIGEST = "digest"
    TAIL = "tail"
    OVERFLOW = "overflow"
    SNAPSHOT_FAILED = "snapshot_failed"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long and how much a rank waits before it is repaired."""

    reorder_s: float = 0.05
    reorder_batches: int = 64
    tail_s: float = 0.5
    waiting_batches: int = 10_000
    waiting_bytes: int = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a worker says that a rank holds as of `seq`; `chunks` are packed hashes, parents first."""

    seq: int
    digest: int
    block_count: int
    chunks: tuple[bytes, ...]


class SnapshotWrong(Exception):
    """A snapshot whose blocks don't have its digest or count; the rank stays unknown."""


@dataclass(slots=True)
class _Waiting:
    batch: KvBatch
    arrived: float


@dataclass(slots=True)
class Rank:
    """The state of one rank. `slot` of `index` is its own; whoever takes the rank away calls `leave`."""

    key: RankKey
    slot: int
    index: Index
    dp_group: str
    limits: Limits
    known: bool = False
    last_seq: int = 0
    last_load: RankLoad | None = None
    batch_at: float | None = None
    """When the last batch was applied; None: none yet."""
    load_at: float | None = None
    lag_ms: float = 0.0
    duplicates: int = 0
    dropped_batches: int = 0
    """Batches that a full queue dropped, and those of a seq that the worker never reached."""
    repairs: Counter[Cause] = field(default_factory=Counter)
    repair_cause: Cause | None = Cause.START
    """Set while unknown: why."""
    repair_from: float | None = None
    """When the snapshot that is under way was asked for; None: none is."""
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    _waiting_bytes: int = 0
    _dropped_to: int = 0
    """Highest seq that was dropped for lack of room since the repair began."""
    _gap_since: float | None = None
    _tail_since: float | None = None
    _tail_seq: int = 0

    # --- messages

    def on_batch(self, batch: KvBatch, now: float) -> Sequence[KvBatch]:
        """The batches that were applied because of this one, in order: none, this one, or this and some that waited for it."""
        if batch.seq <= self.last_seq or batch.seq in self._waiting:
            self.duplicates += 1
            return ()
        if not self.known or batch.seq != self.last_seq + 1:
            self._wait(batch, now)
            return ()
        self._apply(batch, now)
        applied = (batch, *self._apply_waiting()) if self._waiting else (batch,)
        if self._tail_since is not None:
            self._check_load(now)
        return applied

    def on_load(self, load: RankLoad, now: float) -> bool:
        """Whether the load is news; an older one that comes late is not."""
        if self.last_load is not None and load.load_seq <= self.last_load.load_seq:
            self.duplicates += 1
            return False
        self.last_load = load
        self.load_at = now
        self._check_load(now)
        return True

    def on_tick(self, now: float) -> None:
        """Start the repairs whose time has come."""
        if not self.known:
            return
        if self._gap_since is not None and now - self._gap_since >= self.limits.reorder_s:
            self._repair(Cause.GAP)
        elif self._tail_since is not None and now - self._tail_since >= self.limits.tail_s:
            self._repair(Cause.TAIL)

    @property
    def waits(self) -> bool:
        """Whether `on_tick` has something to wait for."""
        return self.known and (self._gap_since is not None or self._tail_since is not None)

    # --- repair

    def on_repair_started(self, now: float) -> None:
        """A snapshot is asked for now: it contains at least all that was published before."""
        self.repair_from = now
        self.repairs[self.repair_cause or Cause.START] += 1

    def on_snapshot(self, snapshot: Snapshot, now: float) -> Sequence[KvBatch]:
        """Replace what the rank holds; returns the batches beyond the snapshot that were applied after it.

        Raises:
            SnapshotWrong: its blocks don't have its digest or count. Ask again.
        """
        asked, self.repair_from = self.repair_from, None
        self.index.clear(self.slot)
        for chunk in snapshot.chunks:
            self.index.store(self.slot, chunk)
        if (self.index.digest(self.slot), self.index.size(self.slot)) != (snapshot.digest, snapshot.block_count):
            self.repair_cause = Cause.SNAPSHOT_FAILED
            raise SnapshotWrong(f"{self.index.size(self.slot)} blocks do not make digest and count of seq {snapshot.seq}")
        self.last_seq = snapshot.seq
        self.known = True
        self.repair_cause = None
        self._gap_since = self._tail_since = None
        self._drop_stale(asked)
        applied = self._apply_waiting()
        if self._dropped_to > self.last_seq:
            self._repair(Cause.OVERFLOW)
        self._dropped_to = 0
        self._check_load(now)
        return applied

    def on_snapshot_failed(self) -> None:
        """The worker could not be asked: the rank stays unknown until a snapshot comes."""
        self.repair_from = None
        self.repair_cause = Cause.SNAPSHOT_FAILED

    def leave(self) -> None:
        """Drop blocks and loads: the instance is gone."""
        self.index.clear(self.slot)
        self._waiting.clear()
        self._waiting_bytes = 0
        self.known = False
        self.last_load = None

    # --- inside

    def _apply(self, batch: KvBatch, now: float) -> None:
        batch.apply_to(self.index, self.slot)
        self.last_seq = batch.seq
        self.batch_at = now

    def _apply_waiting(self) -> list[KvBatch]:
        """Apply what waits, from last+1 on without a hole; what is left shows a gap."""
        applied = []
        while (waiting := self._waiting.pop(self.last_seq + 1, None)) is not None:
            self._waiting_bytes -= len(waiting.batch.payload)
            self._apply(waiting.batch, waiting.arrived)
            applied.append(waiting.batch)
        self._gap_since = min((waiting.arrived for waiting in self._waiting.values()), default=None)
        return applied

    def _wait(self, batch: KvBatch, now: float) -> None:
        self._waiting[batch.seq] = _Waiting(batch, now)
        self._waiting_bytes += len(batch.payload)
        if self.known:
            if self._gap_since is None:
                self._gap_since = now
            if len(self._waiting) > self.limits.reorder_batches:
                self._repair(Cause.GAP)
        while len(self._waiting) > self.limits.waiting_batches or self._waiting_bytes > self.limits.waiting_bytes:
            first = next(iter(self._waiting))
            self._waiting_bytes -= len(self._waiting.pop(first).batch.payload)
            self._dropped_to = max(self._dropped_to, first)
            self.dropped_batches += 1

    def _drop_stale(self, asked: float | None) -> None:
        """Drop the waiting batches that the snapshot contains, and those of a seq beyond it that came before it was asked
        for: the worker never was there, and waiting for the seqs between would repair for ever."""
        for seq, waiting in list(self._waiting.items()):
            contained = seq <= self.last_seq
            if contained or (asked is not None and waiting.arrived < asked):
                self._waiting_bytes -= len(self._waiting.pop(seq).batch.payload)
                self.dropped_batches += not contained

    def _check_load(self, now: float) -> None:
        """Compare with what the last load says; a load ahead of the batches is looked at again when they have come."""
        load = self.last_load
        if not self.known or load is None:
            return
        if self.last_seq >= self._tail_seq:
            self._tail_since = None
        if load.kv_seq > self.last_seq:
            if self._tail_since is None:
                self._tail_since, self._tail_seq = now, load.kv_seq
            return
        if load.kv_seq == self.last_seq:
            held = (self.index.digest(self.slot), self.index.size(self.slot))
            if held != (load.kv_digest, load.kv_block_count):
                self._repair(Cause.DIGEST)

    def _repair(self, cause: Cause) -> None:
        self.known = False
        self.repair_cause = cause
        self._gap_since = self._tail_since = None
