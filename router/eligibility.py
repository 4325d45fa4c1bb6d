"""Who may be chosen, before any score: liveness, state, drains, model, pins, and what failed a moment ago. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from rankway.ranks import GlobalRank, Instance, Target
from rankway.registry.records import Record, State
from rankway.router.fleet import Fleet
from rankway.router.targets import Place, Targets

NOT_CONNECTED = "not connected"
ASIDE = "set aside after a failure"


@dataclass(frozen=True, slots=True)
class Query:
    """What a request asks of its target."""

    model: str
    lora: str = ""
    dp_group: str = ""
    worker_id: str = ""
    dp_rank: int | None = None
    excluded: Collection[Place] = ()
    """Targets that have failed this request."""

    @property
    def pool_key(self) -> tuple[str, str, str]:
        return self.model, self.lora, self.dp_group

    @property
    def pinned(self) -> bool:
        return bool(self.worker_id) or self.dp_rank is not None


@dataclass(slots=True)
class Section:
    """The eligible slots of a pool whose KV blocks have one size: bit masks by slot, one byte each."""

    block_size: int
    mask: bytearray = field(default_factory=bytearray)


class Eligibility:
    """Keeps a mask of eligible slots per (model, adapter, group), rebuilt only when somebody's state changed."""

    def __init__(self, fleet: Fleet, targets: Targets) -> None:
        self._fleet = fleet
        self._targets = targets
        self._connected: set[Instance] = set()
        self._aside: dict[Instance, float] = {}
        self._pools: dict[tuple[str, str, str], list[Section]] = {}

    def changed(self) -> None:
        """The fleet or the targets have changed."""
        self._pools.clear()

    def connect(self, instance: Instance) -> None:
        """The instance answers on its Attach."""
        self._connected.add(instance)
        self._aside.pop(instance, None)
        self._pools.clear()

    def disconnect(self, instance: Instance) -> None:
        """The instance's Attach is broken: nobody is sent there until it answers again."""
        self._connected.discard(instance)
        self._pools.clear()

    def is_connected(self, instance: Instance) -> bool:
        return instance in self._connected

    def any_connected(self) -> bool:
        """Whether there is anybody to send requests to."""
        return any(self._fleet.record(instance) is not None for instance in self._connected)

    def set_aside(self, instance: Instance, until: float) -> None:
        """The instance failed a request: others first until then."""
        self._aside[instance] = until
        self._pools.clear()

    def expire(self, now: float) -> None:
        """Take back those who were set aside long enough, and forget those who are gone."""
        over = [instance for instance, until in self._aside.items() if until <= now]
        for instance in over:
            del self._aside[instance]
        if over:
            self._pools.clear()

    def forget(self, instance: Instance) -> None:
        """The instance has left."""
        self._aside.pop(instance, None)
        self.disconnect(instance)

    def sections(self, query: Query) -> list[Section]:
        """The eligible slots of a query, by block size; sections with none are left out. Not to be changed."""
        pool = self._pools.get(query.pool_key)
        if pool is None:
            pool = self._build(query)
            self._pools[query.pool_key] = pool
        if not query.pinned and not query.excluded:
            return pool
        narrowed = (Section(section.block_size, self._narrowed(section.mask, query)) for section in pool)
        return [section for section in narrowed if 1 in section.mask]

    def members(self, query: Query) -> list[tuple[Record, int, int]]:
        """(record, dp_rank, slot) of every target that serves the query's model, eligible or not."""
        members = []
        for record in self._fleet.serving(*query.pool_key):
            for rank, slot in sorted(self._targets.slots(record.instance).items()):
                members.append((record, int(rank), slot))
        return members

    def reason(self, record: Record, dp_rank: int, query: Query) -> str:
        """Why a target isn't eligible, in words; "" if it is."""
        instance = record.instance
        if record.state is not State.READY:
            return f"worker is {record.state.name}"
        if dp_rank in record.draining_ranks:
            return "rank drains"
        if query.worker_id and record.worker_id != query.worker_id:
            return f"request is pinned to worker {query.worker_id}"
        if query.dp_rank is not None and dp_rank != query.dp_rank:
            return f"request is pinned to dp_rank {query.dp_rank}"
        if any(place.instance == instance and place.target.dp_rank == dp_rank for place in query.excluded):
            return "failed this request before"
        if instance not in self._connected:
            return NOT_CONNECTED
        if instance in self._aside:
            return ASIDE
        return ""

    def all_eligible(self) -> set[int]:
        """The slots that may be chosen by some request without a pin."""
        return {
            slot
            for record in self._fleet.records.values()
            for rank, slot in self._targets.slots(record.instance).items()
            if not self.reason(record, rank, Query(record.model))
        }

    def may_come_back(self, query: Query) -> bool:
        """Whether a target that the query allows is only out of reach for the moment."""
        return any(
            record.state is State.READY and self.reason(record, rank, query) in ("", NOT_CONNECTED, ASIDE)
            for record, rank, _ in self.members(query)
        )

    def _build(self, query: Query) -> list[Section]:
        bare = Query(*query.pool_key)
        members = self.members(bare)
        sections = self._sections(members, lambda record, rank: not self.reason(record, rank, bare))
        if not sections and self._aside:
            # Everybody has failed a moment ago: better one of them than nobody.
            sections = self._sections(members, lambda record, rank: self.reason(record, rank, bare) in ("", ASIDE))
        return sections

    def _sections(self, members: Iterable[tuple[Record, int, int]], allowed: Callable[[Record, int], bool]) -> list[Section]:
        sections: dict[int, Section] = {}
        for record, rank, slot in members:
            if allowed(record, rank):
                section = sections.setdefault(record.block_size, Section(record.block_size))
                section.mask.extend(bytes(max(0, slot + 1 - len(section.mask))))
                section.mask[slot] = 1
        return [sections[block_size] for block_size in sorted(sections)]

    def _narrowed(self, mask: bytearray, query: Query) -> bytearray:
        """A copy without the slots that the pins and the failed attempts rule out."""
        narrowed = bytearray(mask)
        if query.pinned:
            narrowed = bytearray(len(mask))
            for pinned in self._pinned_to(query):
                narrowed[pinned : pinned + 1] = mask[pinned : pinned + 1]
        for place in query.excluded:
            slot = self._targets.find(place.target, place.epoch)
            if slot is not None and slot < len(narrowed):
                narrowed[slot] = 0
        return narrowed

    def _pinned_to(self, query: Query) -> Iterator[int]:
        """The slots that the pins name: a look at each worker, not at each of its ranks."""
        rank = query.dp_rank
        for record in self._fleet.serving(*query.pool_key):
            if (query.worker_id and record.worker_id != query.worker_id) or (rank is not None and rank not in record.window):
                continue
            for owned in record.ranks if rank is None else (GlobalRank(rank),):
                slot = self._targets.find(Target(record.worker_id, owned), record.epoch)
                if slot is not None:
                    yield slot
