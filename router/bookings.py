"""Bookings shared between routers on `active.*`: what this one announces, and what it learns of the others.

Announcements go out in batches every few milliseconds; a request that is over by then is never announced. A router that starts
asks the others for all that they have; each repeats all of its own now and then. What isn't repeated expires.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from rankway.router.ledger import Booking, Ledger
from rankway.router.policy import Decision
from rankway.v1 import events_pb2


@dataclass(slots=True)
class Batch:
    """What changed in one DP group since the last batch."""

    booked: dict[str, Booking] = field(default_factory=dict)
    prefilled: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.booked or self.prefilled or self.released)


class Audience(Protocol):
    """Who tells the other routers."""

    @property
    def listening(self) -> bool:
        """Whether there is another router: one that comes asks for everything that is booked by then."""

    def group_of(self, slot: int) -> str | None:
        """The DP group of a slot; None: nobody's."""

    def notify(self) -> None:
        """A batch has something to tell."""


class OwnBookings:
    """This router's bookings: in the ledger at once, and in the next batch for the others. Pure.

    Args:
        name: makes booking ids unique in the deployment: router_id and its epoch.
        audience: who tells the others; None: nobody.
    """

    def __init__(self, ledger: Ledger, name: str, audience: Audience | None) -> None:
        self._ledger = ledger
        self._name = name
        self._audience = audience
        self._count = 0
        self._batches: defaultdict[str, Batch] = defaultdict(Batch)

    def book(self, decision: Decision, now: float, *, requests: int, expires_at: float | None = None) -> Booking:
        """Book a decision."""
        self._count += 1
        booking = self._ledger.book(
            f"{self._name}/{self._count}",
            decision.slot,
            decision.prompt_tokens,
            decision.prefill_tokens,
            decision.hashes,
            now,
            expires_at=expires_at,
            requests=requests,
        )
        batch = self._batch(booking)
        if batch is not None:
            batch.booked[booking.booking_id] = booking
        return booking

    def prefilled(self, booking: Booking) -> None:
        """Its first token is there."""
        if booking.ended or booking.prefilled:
            return
        self._ledger.prefilled(booking)
        batch = self._batch(booking)
        if batch is not None and booking.booking_id not in batch.booked:
            batch.prefilled.append(booking.booking_id)

    def release(self, booking: Booking) -> None:
        """Its request is over. Idempotent."""
        if self._ledger.end(booking):
            self.expired(booking)

    def expired(self, booking: Booking) -> None:
        """The ledger has ended it."""
        if not booking.own:
            return
        batch = self._batch(booking)
        if batch is not None and batch.booked.pop(booking.booking_id, None) is None:
            batch.released.append(booking.booking_id)

    def take(self) -> dict[str, Batch]:
        """The batches by DP group; new ones begin."""
        batches = {group: batch for group, batch in self._batches.items() if batch}
        self._batches.clear()
        return batches

    def told_in_full(self) -> None:
        """A full update has been made of the ledger: nothing booked so far is news, and its end has to be told."""
        for batch in self._batches.values():
            batch.booked.clear()

    def _batch(self, booking: Booking) -> Batch | None:
        if self._audience is None or not self._audience.listening:
            return None
        group = self._audience.group_of(booking.slot)
        if group is None:
            return None
        self._audience.notify()
        return self._batches[group]


@dataclass(slots=True)
class _Router:
    """What is known of another router in one DP group."""

    epoch: int = 0
    seq: int = 0
    heard_at: float = 0.0
    bookings: set[str] = field(default_factory=set)


class OtherBookings:
    """The bookings of other routers, in the ledger until they end or expire. Pure.

    Args:
        slot_of: from (worker_id, epoch, dp_rank) to an open slot, None for a target that isn't known here.
        ttl_s: most seconds that a booking counts without being repeated.
    """

    def __init__(self, ledger: Ledger, slot_of: Callable[[str, int, int], int | None], ttl_s: float) -> None:
        self._ledger = ledger
        self._slot_of = slot_of
        self._ttl_s = ttl_s
        self._routers: dict[tuple[str, str], _Router] = {}

    def __bool__(self) -> bool:
        """Whether any router has been heard of lately."""
        return bool(self._routers)

    @property
    def routers(self) -> int:
        """Routers heard of."""
        return len({router_id for router_id, _ in self._routers})

    def apply(self, group: str, update: events_pb2.ActiveUpdate, now: float) -> bool:
        """Take in what another router says. False: something before it is missing; ask for a full update."""
        key = update.router_id, group
        router = self._routers.get(key)
        if router is None or update.router_epoch > router.epoch:
            self._forget(key)
            router = self._routers[key] = _Router(update.router_epoch)
        elif update.router_epoch < router.epoch or update.seq <= router.seq:
            return True
        complete = update.full or update.seq == router.seq + 1
        router.seq, router.heard_at = update.seq, now
        if update.full:
            self._end(router, router.bookings - {booking.booking_id for booking in update.booked})
        for message in update.booked:
            self._book(router, message, now)
        for booking_id in update.prefilled:
            booking = self._ledger.find(booking_id)
            if booking is not None and not booking.own:
                self._ledger.prefilled(booking)
        self._end(router, update.released)
        return complete

    def tidy(self, now: float) -> None:
        """Forget routers that have been silent for so long that all their bookings have expired."""
        for key in [key for key, router in self._routers.items() if router.heard_at + 2 * self._ttl_s < now]:
            self._forget(key)

    def _book(self, router: _Router, message: events_pb2.Booking, now: float) -> None:
        expires_at = now + min(message.ttl_ms / 1000, self._ttl_s)
        known = self._ledger.find(message.booking_id)
        if known is not None:
            if not known.own:
                self._ledger.set_expiry(known, expires_at)
                if message.prefilled:
                    self._ledger.prefilled(known)
            return
        slot = self._slot_of(message.worker_id, message.epoch, message.dp_rank)
        if slot is None or len(message.block_hashes) % 8:
            return
        booking = self._ledger.book(
            message.booking_id,
            slot,
            message.prefill_tokens,
            message.prefill_tokens,
            message.block_hashes,
            now,
            own=False,
            expires_at=expires_at,
            requests=message.requests,
        )
        if message.prefilled:
            self._ledger.prefilled(booking)
        router.bookings.add(message.booking_id)

    def _end(self, router: _Router, booking_ids: Iterable[str]) -> None:
        for booking_id in list(booking_ids):
            router.bookings.discard(booking_id)
            booking = self._ledger.find(booking_id)
            if booking is not None and not booking.own:
                self._ledger.end(booking)

    def _forget(self, key: tuple[str, str]) -> None:
        router = self._routers.pop(key, None)
        if router is not None:
            self._end(router, router.bookings)
