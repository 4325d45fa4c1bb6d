"""Reservations of look-aside clients: a choice that was made, booked, and waits for its request. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rankway.router.ledger import Booking
from rankway.router.policy import Decision


@dataclass(frozen=True, slots=True)
class Reservation:
    """Lives as long as its booking does."""

    reservation_id: str
    request_id: str
    decision: Decision
    booking: Booking
    ttl_ms: int


class Reservations:
    """By reservation_id, and by the request_id that makes Route idempotent."""

    def __init__(self) -> None:
        self._by_id: dict[str, Reservation] = {}
        self._by_request: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, reservation: Reservation) -> None:
        self._by_id[reservation.reservation_id] = reservation
        self._by_request[reservation.request_id] = reservation

    def of_request(self, request_id: str) -> Reservation | None:
        """The reservation that Route made for a request and that still lives."""
        return self._living(self._by_request.get(request_id))

    def take(self, reservation_id: str) -> Reservation | None:
        """Take a living reservation out: its booking is the caller's from now on. None: unknown, or it has ended."""
        reservation = self._living(self._by_id.get(reservation_id))
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
        if self._by_request.get(reservation.request_id) is reservation:
            del self._by_request[reservation.request_id]
