"""Every rank of every live instance: who is believed, and what follows from a lease that begins or ends. Pure, like `rank`.

The registry's records say which instances live. A message of an instance that no record names is counted and dropped, not
remembered: when the registry tells of the instance, its ranks start with a repair, whose snapshot contains what was dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rankway.index import Index
from rankway.indexer.events import KvBatch, RankLoad
from rankway.indexer.rank import Limits, Rank, Snapshot
from rankway.indexer.slots import RankKey, SlotTable
from rankway.ranks import DpRange


@dataclass(frozen=True, slots=True)
class Member:
    """What the indexer needs of a worker's record."""

    worker_id: str
    epoch: int
    endpoint: str
    dp_group: str
    window: DpRange
    model: str
    model_aliases: tuple[str, ...]
    block_size: int

    def ranks(self) -> list[RankKey]:
        """A key for every rank of the window, in order."""
        return [RankKey(self.worker_id, self.epoch, dp_rank) for dp_rank in self.window.ranks()]


class Observer:
    """Told in the order in which things happen to the index; a subclass takes what it needs.

    Methods must not raise and must not call the tracker.
    """

    def joined(self, rank: Rank) -> None:
        """A new rank; it is unknown, and `unknown` follows."""

    def applied(self, rank: Rank, batch: KvBatch) -> None:
        """The batch is in the index. A rank's come in the order of their seqs, those after a repair from its snapshot's on."""

    def loaded(self, rank: Rank, load: RankLoad) -> None:
        """A newer load of the rank."""

    def unknown(self, rank: Rank) -> None:
        """The rank wants a repair; `rank.repair_cause` says why."""

    def repaired(self, rank: Rank, snapshot: Snapshot) -> None:
        """The rank is known by this snapshot. The batches that had waited are in the index, too, and told as `applied` next."""

    def gone(self, rank: Rank) -> None:
        """Its blocks and loads have been dropped."""


class Tracker:
    """The ranks of all live instances over one index."""

    def __init__(self, index: Index, limits: Limits) -> None:
        self.index = index
        self.observers: list[Observer] = []
        """Told in this order."""
        self.slots = SlotTable()
        self.ranks: dict[RankKey, Rank] = {}
        self.members: dict[str, Member] = {}
        self.unknown_worker_messages = 0
        self._limits = limits
        self._waits: set[RankKey] = set()

    # --- membership

    def replace_members(self, members: Iterable[Member]) -> None:
        """The registry's whole list: whoever is not in it has left."""
        there = {member.worker_id: member for member in members}
        for worker_id in list(self.members):
            if worker_id not in there:
                self._leave(self.members[worker_id])
        for member in there.values():
            self.put_member(member)

    def put_member(self, member: Member) -> None:
        """A new or changed record. A newer epoch replaces the instance, an older one is a late message."""
        old = self.members.get(member.worker_id)
        if old is not None:
            if member.epoch < old.epoch:
                return
            if (member.epoch, member.window, member.dp_group) == (old.epoch, old.window, old.dp_group):
                self.members[member.worker_id] = member
                return
            self._leave(old)
        self.members[member.worker_id] = member
        for key in member.ranks():
            rank = Rank(key, self.slots.take(key), self.index, member.dp_group, self._limits)
            self.ranks[key] = rank
            for observer in self.observers:
                observer.joined(rank)
            for observer in self.observers:
                observer.unknown(rank)

    def remove_member(self, worker_id: str, epoch: int) -> None:
        """A lease ended. That of an older instance says nothing about the one that lives."""
        member = self.members.get(worker_id)
        if member is not None and member.epoch <= epoch:
            self._leave(member)

    def _leave(self, member: Member) -> None:
        del self.members[member.worker_id]
        for key in member.ranks():
            rank = self.ranks.pop(key)
            rank.leave()
            self._waits.discard(key)
            self.slots.give_back(key)
            for observer in self.observers:
                observer.gone(rank)

    # --- messages

    def on_batch(self, batch: KvBatch, now: float, lag_ms: float = 0.0) -> None:
        rank = self.ranks.get(batch.rank)
        if rank is None:
            self.unknown_worker_messages += 1
            return
        was_known = rank.known
        applied = rank.on_batch(batch, now)
        if applied:
            rank.lag_ms = lag_ms
            self._tell_applied(rank, applied)
        self._after(rank, was_known)

    def on_load(self, load: RankLoad, now: float) -> None:
        rank = self.ranks.get(load.rank)
        if rank is None:
            self.unknown_worker_messages += 1
            return
        was_known = rank.known
        if rank.on_load(load, now):
            for observer in self.observers:
                observer.loaded(rank, load)
        self._after(rank, was_known)

    def on_tick(self, now: float) -> None:
        for key in list(self._waits):
            rank = self.ranks[key]
            was_known = rank.known
            rank.on_tick(now)
            self._after(rank, was_known)

    def _tell_applied(self, rank: Rank, batches: Iterable[KvBatch]) -> None:
        for batch in batches:
            for observer in self.observers:
                observer.applied(rank, batch)

    def _after(self, rank: Rank, was_known: bool) -> None:
        if rank.waits:
            self._waits.add(rank.key)
        elif self._waits:
            self._waits.discard(rank.key)
        if was_known and not rank.known:
            for observer in self.observers:
                observer.unknown(rank)

    # --- repair

    def on_snapshot(self, rank: Rank, snapshot: Snapshot, now: float) -> bool:
        """Take a snapshot for a rank that is still there. False: it was no good, or the rank needs another one already.

        Raises:
            SnapshotWrong: as `Rank.on_snapshot`.
        """
        applied = rank.on_snapshot(snapshot, now)
        if rank.known:
            for observer in self.observers:
                observer.repaired(rank, snapshot)
            self._tell_applied(rank, applied)
        self._after(rank, was_known=False)
        return rank.known

    # --- questions

    def by_slot(self, slot: int) -> Rank | None:
        key = self.slots.key(slot)
        return self.ranks.get(key) if key is not None else None
