"""What goes out on `active.*`: a batch of bookings and reservations as messages of a bounded size. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rankway import bus
from rankway.router.bookings import Batch
from rankway.router.ledger import Booking
from rankway.router.reservations import Reservations
from rankway.router.targets import Targets
from rankway.v1 import events_pb2

BOOKING_TTL_S = 30.0
"""How long a booking of a router that fell silent counts."""

MESSAGE_BYTES = bus.MAX_PAYLOAD_BYTES // 2
"""A batch is split into messages of about this size."""

ID_BYTES = 64
"""About what the id of a booking takes."""


class Updates:
    """Makes the messages of a router. Who sends them, and in which order, is the sender's to add."""

    def __init__(self, targets: Targets, reservations: Reservations) -> None:
        self._targets = targets
        self._reservations = reservations

    def of(self, batch: Batch, now: float, *, full: bool = False) -> Iterator[events_pb2.ActiveUpdate]:
        """A batch as messages: the first one carries what is short."""
        update = events_pb2.ActiveUpdate(
            full=full, prefilled=batch.prefilled, released=batch.released, fulfilled=batch.fulfilled, taken=batch.taken
        )
        size = ID_BYTES * (len(batch.prefilled) + len(batch.released) + len(batch.fulfilled) + len(batch.taken))
        for booking in self._messages(batch.booked.values(), now):
            if size > 0 and size + len(booking.block_hashes) > MESSAGE_BYTES:
                yield update
                update, size = events_pb2.ActiveUpdate(), 0
            update.booked.append(booking)
            size += len(booking.block_hashes) + 2 * ID_BYTES
        yield update

    def _messages(self, bookings: Iterable[Booking], now: float) -> Iterator[events_pb2.Booking]:
        for booking in bookings:
            place = self._targets.place(booking.slot)
            if booking.ended or place is None:
                continue
            ttl_s = BOOKING_TTL_S if booking.expires_at is None else min(BOOKING_TTL_S, booking.expires_at - now)
            yield events_pb2.Booking(
                booking_id=booking.booking_id,
                worker_id=place.target.worker_id,
                epoch=place.epoch,
                dp_rank=place.target.dp_rank,
                prefill_tokens=booking.prefill_tokens,
                block_hashes=booking.hashes,
                ttl_ms=max(1, int(ttl_s * 1000)),
                prefilled=booking.prefilled,
                requests=booking.requests,
                reservation=self._reservation(booking.booking_id),
            )

    def _reservation(self, booking_id: str) -> events_pb2.Reservation | None:
        reservation = self._reservations.find(booking_id)
        if reservation is None:
            return None
        return events_pb2.Reservation(
            request_id=reservation.request_id,
            overlap_blocks=reservation.decision.overlap_blocks,
            cost=reservation.decision.cost,
            prompt_tokens=reservation.decision.prompt_tokens,
            ttl_ms=reservation.ttl_ms,
        )
