"""Slots: the small numbers by which the indexer's index knows the ranks of live instances."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from rankway.ranks import GlobalRank, Instance, Target


class RankKey(NamedTuple):
    """One rank of one instance: a restarted worker's rank is another one."""

    worker_id: str
    epoch: int
    dp_rank: int

    @property
    def instance(self) -> Instance:
        return Instance(self.worker_id, self.epoch)

    @property
    def target(self) -> Target:
        return Target(self.worker_id, GlobalRank(self.dp_rank))


class SlotTable:
    """Hands out slots and takes them back: the lowest free one first, so that what is indexed by slot stays small."""

    def __init__(self) -> None:
        self._slots: dict[RankKey, int] = {}
        self._keys: list[RankKey | None] = []
        self._free: list[int] = []

    def take(self, key: RankKey) -> int:
        """A slot for a key that has none."""
        if self._free:
            slot = heapq.heappop(self._free)
            self._keys[slot] = key
        else:
            slot = len(self._keys)
            self._keys.append(key)
        self._slots[key] = slot
        return slot

    def give_back(self, key: RankKey) -> None:
        """The key's slot is free; what was kept under it has been cleared. Raises KeyError if it has none."""
        slot = self._slots.pop(key)
        self._keys[slot] = None
        heapq.heappush(self._free, slot)

    def key(self, slot: int) -> RankKey | None:
        """Whose slot it is, None if it is free."""
        return self._keys[slot] if 0 <= slot < len(self._keys) else None

    def __len__(self) -> int:
        return len(self._slots)
