"""Slots: the small numbers by which index, ledger and choice know one target of one instance. Pure.

Two parties tell the router of an instance's ranks, in any order: the registry (the fleet) and the indexer (the replica). Each
holds the slots that it uses; a slot is free for reuse when neither does. A new epoch is another instance and gets slots of its
own, so nothing that was counted for the old one can reach it.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass

from rankway.ranks import GlobalRank, Instance, Target


class Holder(enum.IntFlag):
    """Who uses a slot."""

    FLEET = 1
    INDEX = 2


@dataclass(frozen=True, slots=True)
class Place:
    """What a slot stands for."""

    target: Target
    epoch: int

    @property
    def instance(self) -> Instance:
        return Instance(self.target.worker_id, self.epoch)


class Targets:
    """The map between (target, epoch) and slot. Freed slots are reused, the lowest first, so tables stay dense."""

    def __init__(self) -> None:
        self._places: list[Place | None] = []
        self._holders: list[Holder] = []
        self._slots: dict[Instance, dict[GlobalRank, int]] = defaultdict(dict)
        self._free: set[int] = set()

    def __len__(self) -> int:
        """One more than the highest slot that was ever used: how long a table by slot must be."""
        return len(self._places)

    def hold(self, target: Target, epoch: int, holder: Holder) -> int:
        """The slot of a target, made if there is none, and held by `holder` from now on."""
        ranks = self._slots[Instance(target.worker_id, epoch)]
        slot = ranks.get(target.dp_rank)
        if slot is None:
            slot = self._new_slot()
            ranks[target.dp_rank] = slot
            self._places[slot] = Place(target, epoch)
            self._holders[slot] = Holder(0)
        self._holders[slot] |= holder
        return slot

    def drop(self, slot: int, holder: Holder) -> bool:
        """`holder` uses the slot no more and has cleared what it kept under it. Returns whether the slot is free now."""
        place = self._places[slot]
        if place is None:
            return True
        self._holders[slot] &= ~holder
        if self._holders[slot]:
            return False
        ranks = self._slots[place.instance]
        del ranks[place.target.dp_rank]
        if not ranks:
            del self._slots[place.instance]
        self._places[slot] = None
        self._free.add(slot)
        return True

    def find(self, target: Target, epoch: int) -> int | None:
        """The slot of a target, None if nobody holds one."""
        ranks = self._slots.get(Instance(target.worker_id, epoch))
        return None if ranks is None else ranks.get(target.dp_rank)

    def place(self, slot: int) -> Place | None:
        """What a slot stands for; None: nothing now."""
        return self._places[slot] if slot < len(self._places) else None

    def slots(self, instance: Instance) -> dict[GlobalRank, int]:
        """An instance's slots by global rank."""
        return dict(self._slots.get(instance, {}))

    def held(self, holder: Holder) -> list[int]:
        """Every slot that `holder` uses."""
        return [slot for slot, holders in enumerate(self._holders) if holder in holders and self._places[slot] is not None]

    def _new_slot(self) -> int:
        if self._free:
            slot = min(self._free)
            self._free.remove(slot)
            return slot
        self._places.append(None)
        self._holders.append(Holder(0))
        return len(self._places) - 1
