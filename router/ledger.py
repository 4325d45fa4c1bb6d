"""The load of every slot: what routers have booked, corrected by what ranks publish. Pure; times are arguments, in seconds.

A booking counts from the moment it is made: its tokens to prefill until the first token, its blocks until it ends. A rank's
report then tells the whole truth as of a moment ago, and must not count the same requests again:

* What a report shows beyond the *most* that was booked on the slot since the report before the last one can't be ours: it is
  foreign load (clients that go straight to a worker, routers that don't share) and is added.
* Prefill work that the engine has seen for sure (booked before the report before) shrinks to what the report still shows of it;
  what was booked later counts in full.

Everything belongs to a slot, and so to one epoch of a worker. The ledger also knows which slots are above their limits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from rankway import native
from rankway.choice import LoadTable

RECENT_STEPS = 16
"""The recent-dispatch term decays in steps of half_life / RECENT_STEPS: at most 4 % off, and no work per choice."""

RECENT_FLOOR = 1 / 1024
"""A recent-dispatch term below this share of one dispatch's weight is forgotten."""


@dataclass(slots=True)
class Booking:
    """One request on one slot, of this router or of another one."""

    booking_id: str
    slot: int
    prompt_tokens: int
    prefill_tokens: int
    """Tokens to prefill on the slot."""
    hashes: bytes
    """Full blocks of the prompt, packed."""
    own: bool = True
    """Whether this router made it."""
    expires_at: float | None = None
    requests: int = 1
    prefilled: bool = False
    output_blocks: int = 0
    report: int = 0
    """Number of the slot's reports when it was booked."""
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """A rank's published load (events.RankLoad)."""

    running: int = 0
    waiting: int = 0
    deferred: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    prefill_tokens: int = 0
    load_seq: int = 0


@dataclass(frozen=True, slots=True)
class RecentTerm:
    """The decayed term for recent dispatches: each adds `weight` blocks to its slot's cost, halved every `half_life_s`.

    It keeps requests that come one after another, each after the one before has ended, from piling onto one rank. 0 turns it off.
    """

    weight: float = 0.0
    half_life_s: float = 1.0


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """A slot at one of these takes no more requests; below all of them it takes any. 0: no limit."""

    requests: int = 0
    prefill_tokens: int = 0
    blocks: int = 0


NO_LIMITS = SlotLimits()


@dataclass(slots=True)
class _Booked:
    """The most that was booked at once, each on its own."""

    prefill: int = 0
    blocks: int = 0
    requests: int = 0


@dataclass(slots=True)
class _SlotLoad:
    """What one slot's entries of the LoadTable are made of."""

    limits: SlotLimits = NO_LIMITS
    fresh_prefill: int = 0
    """Tokens to prefill of bookings made since the last report."""
    middle_prefill: int = 0
    """… between the report before and the last one."""
    settled_prefill: int = 0
    """… before that: the engine has seen them."""
    requests: int = 0
    output_blocks: int = 0
    bookings: dict[str, Booking] = field(default_factory=dict)
    reports: int = 0
    report: Report | None = None
    reported_at: float = 0.0
    peak: _Booked = field(default_factory=_Booked)
    """Since the last report."""
    peak_before: _Booked = field(default_factory=_Booked)
    """From the report before until the last."""
    foreign_prefill: int = 0
    foreign_blocks: int = 0
    foreign_requests: int = 0

    @property
    def booked_prefill(self) -> int:
        return self.fresh_prefill + self.middle_prefill + self.settled_prefill


class Ledger:
    """Keeps the arrays of a `choice.LoadTable` true. `eligible` and `known` are other people's business."""

    def __init__(self, recent: RecentTerm, report_ttl_s: float = 10.0) -> None:
        """
        Args:
            report_ttl_s: a report that is older says nothing about foreign load any more.
        """
        self.loads = LoadTable()
        self.active = native.open_active_blocks()
        self.full: set[int] = set()
        """Slots that are at one of their limits."""
        self.freed = False
        """Set when a slot stops being full; whoever lets waiting requests in clears it."""
        self._held: dict[int, float] = {}
        self._recent = recent
        self._report_ttl_s = report_ttl_s
        self._slots: dict[int, _SlotLoad] = {}
        self._bookings: dict[str, Booking] = {}
        self._expiries: list[tuple[float, str]] = []
        self._recent_slots: set[int] = set()
        self._recent_at = 0.0

    def open(self, slot: int, limits: SlotLimits = NO_LIMITS) -> None:
        """Start counting for a slot, from nothing."""
        self.loads.grow(slot + 1)
        self._slots[slot] = _SlotLoad(limits)

    def is_open(self, slot: int) -> bool:
        """Whether the slot is counted."""
        return slot in self._slots

    def close(self, slot: int) -> list[Booking]:
        """Forget a slot; returns the bookings that it had (they are ended)."""
        load = self._slots.pop(slot, None)
        if load is None:
            return []
        dropped = list(load.bookings.values())
        for booking in dropped:
            booking.ended = True
            del self._bookings[booking.booking_id]
        self.active.clear(slot)
        self.loads.prefill_tokens[slot] = 0
        self.loads.decode_blocks[slot] = 0
        self.loads.recent[slot] = 0.0
        self._recent_slots.discard(slot)
        self.full.discard(slot)
        return dropped

    def book(
        self,
        booking_id: str,
        slot: int,
        prompt_tokens: int,
        prefill_tokens: int,
        hashes: bytes,
        now: float,
        *,
        own: bool = True,
        expires_at: float | None = None,
        requests: int = 1,
    ) -> Booking:
        """Count a request on an open slot from now on. A booking of that id that lives is ended first."""
        known = self._bookings.get(booking_id)
        if known is not None:
            self.end(known)
        load = self._slots[slot]
        booking = Booking(booking_id, slot, prompt_tokens, prefill_tokens, hashes, own, None, requests, report=load.reports)
        self._bookings[booking_id] = booking
        load.bookings[booking_id] = booking
        self.active.acquire(slot, hashes)
        load.fresh_prefill += prefill_tokens
        load.requests += requests
        if expires_at is not None:
            self.set_expiry(booking, expires_at)
        if own and self._recent.weight > 0:
            self.decay(now)
            self.loads.recent[slot] += self._recent.weight
            self._recent_slots.add(slot)
        self._update(slot, load)
        return booking

    def set_expiry(self, booking: Booking, expires_at: float | None) -> None:
        """When a booking ends by itself; None: never."""
        booking.expires_at = expires_at
        if expires_at is not None:
            heapq.heappush(self._expiries, (expires_at, booking.booking_id))
            if len(self._expiries) > 64 + 4 * len(self._bookings):
                self._expiries = [(b.expires_at, b.booking_id) for b in self._bookings.values() if b.expires_at is not None]
                heapq.heapify(self._expiries)

    def prefilled(self, booking: Booking) -> None:
        """The first token is there: the booking's prefill is done. Idempotent."""
        if booking.ended or booking.prefilled:
            return
        booking.prefilled = True
        load = self._slots[booking.slot]
        self._take_prefill(load, booking)
        self._update(booking.slot, load)

    def grow(self, booking: Booking, output_blocks: int) -> None:
        """The booking's output fills this many blocks by now."""
        if booking.ended:
            return
        load = self._slots[booking.slot]
        load.output_blocks += output_blocks - booking.output_blocks
        booking.output_blocks = output_blocks
        self._update(booking.slot, load)

    def end(self, booking: Booking) -> bool:
        """The request is over. Idempotent; returns whether the booking lived."""
        if booking.ended:
            return False
        booking.ended = True
        del self._bookings[booking.booking_id]
        load = self._slots[booking.slot]
        del load.bookings[booking.booking_id]
        self.active.release(booking.slot, booking.hashes)
        if not booking.prefilled:
            self._take_prefill(load, booking)
        load.requests -= booking.requests
        load.output_blocks -= booking.output_blocks
        self._update(booking.slot, load)
        return True

    def find(self, booking_id: str) -> Booking | None:
        """A booking that lives."""
        return self._bookings.get(booking_id)

    def expire(self, now: float) -> list[Booking]:
        """End the bookings whose time is over and forget reports that are too old; returns the bookings."""
        over = []
        while self._expiries and self._expiries[0][0] <= now:
            at, booking_id = heapq.heappop(self._expiries)
            booking = self._bookings.get(booking_id)
            if booking is not None and booking.expires_at == at:
                self.end(booking)
                over.append(booking)
        for slot, load in self._slots.items():
            if load.report is not None and load.reported_at + self._report_ttl_s <= now:
                load.report = None
                load.foreign_prefill = load.foreign_blocks = load.foreign_requests = 0
                self._update(slot, load)
        return over

    def report(self, slot: int, report: Report, now: float) -> bool:
        """A rank's published load; one that is older than the last is dropped. Returns whether it was taken."""
        load = self._slots.get(slot)
        if load is None or (load.report is not None and 0 < report.load_seq <= load.report.load_seq):
            return False
        peak, before = load.peak, load.peak_before
        explained_requests = max(peak.requests, before.requests)
        # A request that runs uses one block that is not full yet: it is no foreign block.
        explained_blocks = max(peak.blocks, before.blocks) + explained_requests
        load.foreign_prefill = max(0, report.prefill_tokens - max(peak.prefill, before.prefill))
        load.foreign_blocks = max(0, report.used_blocks - explained_blocks)
        load.foreign_requests = max(0, report.running + report.waiting + report.deferred - explained_requests)
        load.report, load.reported_at = report, now
        load.reports += 1
        load.settled_prefill += load.middle_prefill
        load.middle_prefill, load.fresh_prefill = load.fresh_prefill, 0
        load.peak_before, load.peak = load.peak, _Booked()
        self._update(slot, load)
        return True

    def decay(self, now: float) -> None:
        """Bring the recent-dispatch terms up to date, in steps."""
        if not self._recent_slots:
            self._recent_at = now
            return
        step = self._recent.half_life_s / RECENT_STEPS
        steps = int((now - self._recent_at) / step) if step > 0 else 0
        if steps <= 0:
            return
        self._recent_at += steps * step
        factor = 0.5 ** (steps / RECENT_STEPS)
        floor = self._recent.weight * RECENT_FLOOR
        recent = self.loads.recent
        for slot in list(self._recent_slots):
            value = recent[slot] * factor
            if value < floor:
                value = 0.0
                self._recent_slots.discard(slot)
            recent[slot] = value

    def full_among(self, mask: bytearray) -> list[int]:
        """The slots of a mask that are full."""
        return [slot for slot in self.full if slot < len(mask) and mask[slot]] if self.full else []

    def hold(self, slot: int, blocks: float) -> None:
        """A request of so many blocks waits for a full slot (negative: it no longer does)."""
        left = self._held.get(slot, 0.0) + blocks
        if left > 1e-9:
            self._held[slot] = left
        else:
            self._held.pop(slot, None)

    def held(self, slot: int) -> float:
        """Blocks of the requests that wait for a slot."""
        return self._held.get(slot, 0.0)

    def requests(self, slot: int) -> int:
        """Requests in flight on a slot: booked ones and foreign ones."""
        load = self._slots.get(slot)
        return 0 if load is None else load.requests + load.foreign_requests

    def last_report(self, slot: int) -> tuple[Report, float] | None:
        """The last report of a slot and when it came; None: none, or too old."""
        load = self._slots.get(slot)
        return None if load is None or load.report is None else (load.report, load.reported_at)

    def bookings(self, slot: int | None = None) -> Iterable[Booking]:
        """The bookings that live, of one slot or of all."""
        if slot is None:
            return self._bookings.values()
        load = self._slots.get(slot)
        return () if load is None else load.bookings.values()

    def _take_prefill(self, load: _SlotLoad, booking: Booking) -> None:
        age = load.reports - booking.report
        if age == 0:
            load.fresh_prefill -= booking.prefill_tokens
        elif age == 1:
            load.middle_prefill -= booking.prefill_tokens
        else:
            load.settled_prefill -= booking.prefill_tokens

    def _update(self, slot: int, load: _SlotLoad) -> None:
        blocks = self.active.active(slot) + load.output_blocks
        peak = load.peak
        prefill = load.booked_prefill
        peak.prefill = max(peak.prefill, prefill)
        peak.blocks = max(peak.blocks, blocks)
        peak.requests = max(peak.requests, load.requests)
        settled = load.settled_prefill
        if load.report is not None:
            settled = min(settled, load.report.prefill_tokens)
        self.loads.prefill_tokens[slot] = load.fresh_prefill + load.middle_prefill + settled + load.foreign_prefill
        self.loads.decode_blocks[slot] = blocks + load.foreign_blocks
        self._judge(slot, load)

    def _judge(self, slot: int, load: _SlotLoad) -> None:
        """Full or not: a slot that has nothing of ours is never full, however small its limits."""
        limits, loads = load.limits, self.loads
        full = load.requests > 0 and (
            0 < limits.requests <= load.requests + load.foreign_requests
            or 0 < limits.prefill_tokens <= loads.prefill_tokens[slot]
            or 0 < limits.blocks <= loads.decode_blocks[slot]
        )
        if full:
            self.full.add(slot)
        elif slot in self.full:
            self.full.discard(slot)
            self.freed = True
