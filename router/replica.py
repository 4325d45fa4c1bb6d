"""The router's replica of the index, fed by an indexer. Pure: it applies updates, and says what is known of each rank.

A new view (after a reconnect, or from another indexer) replaces the old one rank by rank, each in one step: until a rank's
blocks have come, what was known of it goes on serving; ranks that the new view doesn't name are dropped when it is complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rankway.index import Index
from rankway.indexer.client import RankBlocks, RankGone, RankKnown, Update, ViewBegin, ViewLost, ViewReady
from rankway.indexer.events import KvBatch, RankLoad
from rankway.indexer.slots import RankKey
from rankway.router.targets import Holder, Targets


class Observer:
    """Told what the choice needs to know; a subclass takes what it needs. Methods must not raise."""

    def known_changed(self, rank: ReplicaRank) -> None:
        """`rank.known` is another now; False also when the rank goes."""

    def loaded(self, rank: ReplicaRank, load: RankLoad) -> None:
        """A newer load of the rank; `rank.load_at` says when it came."""


@dataclass(slots=True)
class ReplicaRank:
    """What the replica knows of one rank of one instance."""

    key: RankKey
    slot: int
    dp_group: str
    known: bool = False
    """Whether its blocks count; if not, the rank scores by load alone."""
    seq: int = 0
    load: RankLoad | None = None
    load_at: float | None = None
    """When the load arrived (the caller's clock, seconds)."""
    staged: list[bytes] = field(default_factory=list)


class Replica:
    """Blocks and loads of every rank, over an index that the router shares with its choice.

    Args:
        index: the one that the choice reads; every call here may change it.
        targets: gives out the slots. The replica holds one as `Holder.INDEX` for as long as the indexer names the rank.
    """

    def __init__(self, index: Index, targets: Targets, observer: Observer | None = None) -> None:
        self.index = index
        self.ranks: dict[RankKey, ReplicaRank] = {}
        self.complete = False
        """Whether a whole view has come at least once."""
        self.indexer_id = ""
        """Whose view it is."""
        self.lost_at: float | None = -math.inf
        """Since when no indexer is followed (the caller's clock, seconds); None: one is."""
        self.mismatches = 0
        """Digests that differed from a load's, and holes in a rank's seqs: each asked for a new view."""
        self._targets = targets
        self._observer = observer or Observer()
        self._named: set[RankKey] = set()
        self._in_snapshot = False

    def apply(self, update: Update, now: float) -> str:
        """Apply one update. Returns "" or, in words, why the view must be followed afresh (`Follower.restart`)."""
        if isinstance(update, KvBatch):
            return self._batch(update)
        if isinstance(update, RankLoad):
            return self._load(update, now)
        if isinstance(update, RankBlocks):
            self._blocks(update)
        elif isinstance(update, RankKnown):
            self._set_known(self._name(update.rank, update.dp_group), update.known)
        elif isinstance(update, RankGone):
            self._drop(update.rank)
        elif isinstance(update, ViewBegin):
            self._begin(update)
        elif isinstance(update, ViewReady):
            self._ready()
        elif isinstance(update, ViewLost):
            self.lost_at = now
        return ""

    def age_s(self, now: float) -> float:
        """Seconds since the index was last followed: 0 while it is, infinite if it never was."""
        return 0.0 if self.lost_at is None else now - self.lost_at

    def _begin(self, update: ViewBegin) -> None:
        self.indexer_id = update.indexer_id
        self._in_snapshot = True
        self._named.clear()
        for rank in self.ranks.values():
            rank.staged.clear()

    def _ready(self) -> None:
        self.lost_at = None
        for key in [key for key in self.ranks if key not in self._named]:
            self._drop(key)
        self._named.clear()
        self._in_snapshot = False
        self.complete = True

    def _name(self, key: RankKey, dp_group: str) -> ReplicaRank:
        if self._in_snapshot:
            self._named.add(key)
        rank = self.ranks.get(key)
        if rank is None:
            slot = self._targets.hold(key.target, key.epoch, Holder.INDEX)
            rank = self.ranks[key] = ReplicaRank(key, slot, dp_group)
        return rank

    def _blocks(self, update: RankBlocks) -> None:
        rank = self._name(update.rank, update.dp_group)
        if update.first:
            rank.staged.clear()
        rank.staged.append(update.block_hashes)
        if not update.last:
            return
        self.index.clear(rank.slot)
        for chunk in rank.staged:
            self.index.store(rank.slot, chunk)
        rank.staged = []
        rank.seq = update.seq
        self._set_known(rank, True)

    def _batch(self, batch: KvBatch) -> str:
        rank = self.ranks.get(batch.rank)
        if rank is None or not rank.known or batch.seq != rank.seq + 1:
            return self._mismatch(f"batch seq {batch.seq} of {batch.rank}, which is at {rank.seq if rank else 'nothing'}")
        batch.apply_to(self.index, rank.slot)
        rank.seq = batch.seq
        return ""

    def _load(self, load: RankLoad, now: float) -> str:
        rank = self.ranks.get(load.rank)
        if rank is None:
            return self._mismatch(f"a load of {load.rank}, which has not been named")
        if rank.load is not None and load.load_seq < rank.load.load_seq:
            return ""  # another indexer that is a little behind
        rank.load = load
        rank.load_at = now
        self._observer.loaded(rank, load)
        if rank.known and load.kv_seq == rank.seq:
            held = (self.index.digest(rank.slot), self.index.size(rank.slot))
            if held != (load.kv_digest, load.kv_block_count):
                return self._mismatch(
                    f"{load.rank} holds {held[1]} blocks with another digest than its worker's as of seq {rank.seq}"
                )
        return ""

    def _set_known(self, rank: ReplicaRank, known: bool) -> None:
        if rank.known != known:
            rank.known = known
            self._observer.known_changed(rank)

    def _drop(self, key: RankKey) -> None:
        rank = self.ranks.pop(key, None)
        if rank is None:
            return
        self._named.discard(key)
        self._set_known(rank, False)
        self.index.clear(rank.slot)
        self._targets.drop(rank.slot, Holder.INDEX)

    def _mismatch(self, why: str) -> str:
        self.mismatches += 1
        return why
