"""A request of `Router.Route`: it waits for a target in the same queue as any other, and is reserved there instead of sent."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Protocol

from rankway.router.attach import Link
from rankway.router.ledger import Booking
from rankway.router.policy import Decision
from rankway.router.request import Flight, Owner
from rankway.router.requests import Outcome, Routed, RouterRequest, Sink
from rankway.router.reservations import Reservation, Reservations
from rankway.v1 import worker_pb2


class RouteSink(Sink):
    """A client's side of a Route: `reserved` or `failed` is called, once; nothing streams. After `Dispatch.cancel` neither is."""

    @abstractmethod
    def reserved(self, reservation: Reservation) -> None: ...

    def routed(self, routed: Routed) -> None: ...

    def plain_events(self) -> None:
        return None

    def delta(self, delta: worker_pb2.StepDelta) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...


class RouteOwner(Owner, Protocol):
    """What a Route needs of its dispatcher."""

    reservations: Reservations

    def keep(self, route: Route, decision: Decision, booking: Booking) -> Reservation:
        """Make a booking a reservation."""


class Route(Flight):
    """Ends with the answer: what is booked is the reservation's then."""

    __slots__ = ("_answer", "_keeper", "ttl_ms")

    def __init__(self, owner: RouteOwner, request: RouterRequest, ttl_ms: int, sink: RouteSink, now: float) -> None:
        super().__init__(owner, replace(request, reservation_id=""), sink, now)
        self._answer = sink
        self._keeper = owner
        self.ttl_ms = ttl_ms

    def place(self) -> bool:
        """A reservation of the same request_id that lives is the answer, also when it was made while this one waited."""
        known = self._keeper.reservations.of_request(self.request.request_id)
        if known is None:
            return super().place()
        self._reserved(known)
        return True

    def send(self, link: Link, decision: Decision, booking: Booking, timeout_ms: int) -> None:
        """The target has room and is booked: the worker will hear of it from the client."""
        self._reserved(self._keeper.keep(self, decision, booking))

    def _reserved(self, reservation: Reservation) -> None:
        self._end(None)
        self._answer.reserved(reservation)
