"""Reservations of look-aside clients: choices of this router and of others, booked, whose requests are still to come. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rankway.router.ledger import Booking
from rankway.router.policy import Decision


@dataclass(frozen=True, slots=True)
class Reservation:
    """Lives as long as its booking does. The booking's `own` tells whether this router made it."""

    reservation_id: str
    """Its booking's id: unique among all routers."""
    request_id: str
    decision: Decision
    booking: Booking
    ttl_ms: int


class Reservations:
    """By reservation_id, and by the request_id that makes Route idempotent."""

    def __init__(self) -> None:
        self._by_id: dict[str, Reservation] = {}
        self._by_request: defaultdict[str, dict[str, Reservation]] = defaultdict(dict)
        """Several of one request_id: routers were asked before they had heard of each other's answer."""

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def own(self) -> int:
        """How many of them this router made."""
        return sum(reservation.booking.own for reservation in self._by_id.values())

    def add(self, reservation: Reservation) -> None:
        """Keep a reservation, in the place of one that had its id."""
        known = self._by_id.get(reservation.reservation_id)
        if known is not None:
            self._remove(known)
        self._by_id[reservation.reservation_id] = reservation
        self._by_request[reservation.request_id][reservation.reservation_id] = reservation

    def find(self, reservation_id: str) -> Reservation | None:
        """A reservation that lives. None: unknown, or it has ended."""
        return self._living(self._by_id.get(reservation_id))

    def of_request(self, request_id: str) -> Reservation | None:
        """The reservation that Route made for a request and that still lives; of several the one that is every router's first."""
        for _, reservation in sorted(self._by_request.get(request_id, {}).items()):
            if self._living(reservation) is not None:
                return reservation
        return None

    def take(self, reservation_id: str) -> Reservation | None:
        """Take a living reservation out: its booking is the caller's to end or to use. None: unknown, or it has ended."""
        reservation = self.find(reservation_id)
        if reservation is not None:
            self._remove(reservation)
        return reservation

    def tidy(self) -> None:
        """Forget reservations whose booking has ended."""
        for reservation in list(self._by_id.values()):
            self._living(reservation)

    def _living(self, reservation: Reservation | None) -> Reservation | None:
        if reservation is not None and reservation.booking.ended:
            self._remove(reservation)
            return None
        return reservation

    def _remove(self, reservation: Reservation) -> None:
        del self._by_id[reservation.reservation_id]
        of_request = self._by_request[reservation.request_id]
        del of_request[reservation.reservation_id]
        if not of_request:
            del self._by_request[reservation.request_id]
