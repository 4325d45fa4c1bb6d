"""Bookings shared between routers on `active.*`: what this one announces, and what it learns of the others.

Announcements go out in batches every few milliseconds; a request that is over by then is never announced. A router that starts
asks the others for all that they have; each repeats all of its own now and then. What isn't repeated expires.

A booking that is a reservation says so, and any router may end it: to release it, or to fulfil it by a booking of its own. Only
the router that made it can end it for good, so the other one tells that router, and tells it again whenever it still lists it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from rankway.ranks import GlobalRank, Target
from rankway.registry.records import Record
from rankway.router.ledger import Booking, Ledger
from rankway.router.policy import Decision
from rankway.router.reservations import Reservation, Reservations
from rankway.router.targets import Place
from rankway.v1 import events_pb2

TAKEN = 4096
"""Ids of others' reservations that ended here are remembered up to this number; the oldest are forgotten first."""


@dataclass(slots=True)
class Batch:
    """What changed in one DP group since the last batch."""

    booked: dict[str, Booking] = field(default_factory=dict)
    prefilled: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    fulfilled: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.booked or self.prefilled or self.released or self.fulfilled or self.taken)


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

    def __init__(self, ledger: Ledger, name: str, audience: Audience | None = None) -> None:
        self.audience = audience
        self._ledger = ledger
        self._name = name
        self._count = 0
        self._taken: dict[str, None] = {}
        """A set in the order of its making."""
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

    def fulfil(self, reservation: Reservation, now: float) -> Booking:
        """The request of a reservation that was taken out is here; returns its booking, this router's own whoever made the
        reservation.
        """
        booking = reservation.booking
        if not booking.own:
            self.end_reservation(reservation)
            return self.book(reservation.decision, now, requests=booking.requests)
        self._ledger.set_expiry(booking, None)
        batch = self._batch(booking)
        if batch is not None and booking.booking_id not in batch.booked:
            batch.fulfilled.append(booking.booking_id)
        return booking

    def end_reservation(self, reservation: Reservation) -> None:
        """A reservation that was taken out has ended here, whoever made it."""
        booking = reservation.booking
        if booking.own:
            self.release(booking)
        elif self._ledger.end(booking):
            self.remember_taken(booking.booking_id)
            batch = self._batch(booking)
            if batch is not None:
                batch.taken.append(booking.booking_id)

    def remember_taken(self, reservation_id: str) -> None:
        """A reservation has ended here. One that isn't known may be on its way: its router is told when it comes."""
        self._taken[reservation_id] = None
        if len(self._taken) > TAKEN:
            del self._taken[next(iter(self._taken))]

    def took(self, reservation_id: str) -> bool:
        """Whether a reservation has ended here."""
        return reservation_id in self._taken

    def tell_taken(self, group: str, reservation_id: str) -> None:
        """Its router, which lists it in this DP group, has not heard that it ended here."""
        if self.audience is not None:
            self.audience.notify()
            self._batches[group].taken.append(reservation_id)

    def forget_taken(self, reservation_id: str) -> None:
        """Its router has released it, and lists it no more."""
        self._taken.pop(reservation_id, None)

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
        if self.audience is None or not self.audience.listening:
            return None
        group = self.audience.group_of(booking.slot)
        if group is None:
            return None
        self.audience.notify()
        return self._batches[group]


@dataclass(slots=True)
class _Router:
    """What is known of another router in one DP group."""

    epoch: int = 0
    seq: int = 0
    heard_at: float = 0.0
    bookings: set[str] = field(default_factory=set)


class OtherBookings:
    """The bookings and reservations of other routers, in the ledger until they end or expire. Pure.

    Args:
        own: this router's: others may end its reservations.
        member: from a place to the slot and the record of a member, None for one that isn't known here.
        ttl_s: most seconds that a booking counts without being repeated.
    """

    def __init__(
        self,
        ledger: Ledger,
        own: OwnBookings,
        reservations: Reservations,
        member: Callable[[Place], tuple[int, Record] | None],
        ttl_s: float,
    ) -> None:
        self._ledger = ledger
        self._own = own
        self._reservations = reservations
        self._member = member
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
            self._book(group, router, message, now)
        for booking_id in update.prefilled:
            booking = self._ledger.find(booking_id)
            if booking is not None and not booking.own:
                self._ledger.prefilled(booking)
        for booking_id in update.fulfilled:
            booking = self._ledger.find(booking_id)
            if booking is not None and not booking.own:
                self._reservations.take(booking_id)
                self._ledger.set_expiry(booking, now + self._ttl_s)
        for booking_id in update.taken:
            reservation = self._reservations.take(booking_id)
            if reservation is not None and reservation.booking.own:
                self._own.release(reservation.booking)
            elif reservation is not None:
                self._ledger.end(reservation.booking)
        self._end(router, update.released)
        for booking_id in update.released:
            self._own.forget_taken(booking_id)
        return complete

    def tidy(self, now: float) -> None:
        """Forget routers that have been silent for so long that all their bookings have expired."""
        for key in [key for key, router in self._routers.items() if router.heard_at + 2 * self._ttl_s < now]:
            self._forget(key)

    def _book(self, group: str, router: _Router, message: events_pb2.Booking, now: float) -> None:
        reserved = message.HasField("reservation")
        if reserved and self._own.took(message.booking_id):
            self._own.tell_taken(group, message.booking_id)
            return
        expires_at = now + min(message.ttl_ms / 1000, self._ttl_s)
        known = self._ledger.find(message.booking_id)
        if known is not None:
            if not known.own:
                self._ledger.set_expiry(known, expires_at)
                if message.prefilled:
                    self._ledger.prefilled(known)
                if not reserved:
                    self._reservations.take(message.booking_id)
            return
        place = Place(Target(message.worker_id, GlobalRank(message.dp_rank)), message.epoch)
        member = self._member(place)
        if member is None or len(message.block_hashes) % 8:
            return
        slot, record = member
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
        if reserved:
            self._reservations.add(_reservation(message, place, record, booking))

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


def _reservation(message: events_pb2.Booking, place: Place, record: Record, booking: Booking) -> Reservation:
    made = message.reservation
    decision = Decision(
        booking.slot,
        place,
        record.endpoint,
        made.cost,
        made.overlap_blocks,
        record.block_size,
        made.prompt_tokens,
        message.block_hashes,
    )
    return Reservation(message.booking_id, made.request_id, decision, booking, made.ttl_ms)
