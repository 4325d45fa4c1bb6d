"""Bookings shared between routers on `active.*`: what this one announces, and what it learns of the others.

Announcements go out in batches every few milliseconds; a request that is over by then is never announced. A router that starts
asks the others for all that they have; each repeats all of its own now and then. What isn't repeated expires.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from rankway.router.ledger import Booking, Ledger
from rankway.router.policy import Decision


@dataclass(slots=True)
class Batch:
    """What changed in one DP group since the last batch."""

    booked: dict[str, Booking] = field(default_factory=dict)
    prefilled: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.booked or self.prefilled or self.released)


class OwnBookings:
    """This router's bookings: in the ledger at once, and in the next batch for the others. Pure.

    Args:
        name: makes booking ids unique in the deployment: router_id and its epoch.
        group_of: the DP group of a slot; None: nobody's.
        on_change: called when a batch has something to tell; None: nobody else is told.
    """

    def __init__(
        self, ledger: Ledger, name: str, group_of: Callable[[int], str | None], on_change: Callable[[], None] | None
    ) -> None:
        self._ledger = ledger
        self._name = name
        self._group_of = group_of
        self._on_change = on_change
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

    def _batch(self, booking: Booking) -> Batch | None:
        if self._on_change is None:
            return None
        group = self._group_of(booking.slot)
        if group is None:
            return None
        self._on_change()
        return self._batches[group]
