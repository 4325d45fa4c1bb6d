"""The dispatcher: chooses, books, sends, and sees each request through to its end, whatever fails on the way.

dispatch -> choose -> book -> Start -> deltas … -> release
              ^ wait (every target full)     | attempt failed: another target, before and (n = 1) after the first token
              +------------------------------+
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from rankway import logs
from rankway.errors import EngineFailed, Overloaded, RankwayError, Unavailable
from rankway.ranks import Instance
from rankway.router.admission import WaitQueue
from rankway.router.affinity import Affinity
from rankway.router.attach import Links
from rankway.router.bookings import OwnBookings
from rankway.router.eligibility import Eligibility, Query
from rankway.router.explain import Recent
from rankway.router.ledger import Booking, Ledger
from rankway.router.policy import Decision, Policy, Prompt
from rankway.router.request import Flight, Stage
from rankway.router.requests import RouterRequest, Sink
from rankway.router.reservations import Reservation, Reservations
from rankway.router.route import Route, RouteSink
from rankway.router.timing import Timing

log = logs.get("dispatcher")

SAMPLE = 16
"""One choice in so many is timed."""

NEAR_S = 3.0
"""A deadline gets a timer when it is so near. Until then sweeps look at it: most requests end long before theirs, and a
timer costs more than all these looks."""

FIRST = -(2**31)
"""Priority in the queue of a request whose client has seen output already."""


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Bounds of what the dispatcher does for one request."""

    max_attempts: int = 4
    """Targets that one request may be sent to."""
    set_aside_s: float = 2.0
    """How long an instance whose engine broke a request takes none."""
    failover_wait_s: float = 5.0
    """How long a request waits for a worker that is a member but out of reach."""
    reservation_ttl_s: float = 30.0
    reservation_max_ttl_s: float = 600.0


@dataclass(slots=True)
class Counts:
    """What happened since the start."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By status code."""
    retries: int = 0
    migrations: int = 0
    reservations: int = 0
    predicted_tokens: int = 0
    """Prompt tokens that the choice expected in the target's cache, of the requests below."""
    cached_tokens: int = 0
    """Prompt tokens that engines reported as cached."""
    compared: int = 0
    """Requests whose prediction could be compared."""
    exact: int = 0
    """… and was right."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class RouterDispatcher:
    """`requests.Dispatcher` over links, ledger and policy. Everything happens on one event loop."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        eligibility: Eligibility,
        links: Links,
        queue: WaitQueue[Flight],
        affinity: Affinity,
        bookings: OwnBookings,
        reservations: Reservations,
        recent: Recent,
        settings: DispatchSettings,
        rng: random.Random,
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self.queue = queue
        self.reservations = reservations
        """Those of the other routers too."""
        self.counts = Counts()
        self.choice_seconds = Timing()
        """Of one choice in `SAMPLE`."""
        self.flights: set[Flight] = set()
        self.settings = settings
        self._eligibility = eligibility
        self._links = links
        self._affinity = affinity
        self._bookings = bookings
        self._recent = recent
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._choices = 0
        self._pumping = False
        self._emptied: asyncio.Future[None] | None = None
        self._closing: RankwayError | None = None

    def dispatch(self, request: RouterRequest, sink: Sink) -> Flight:
        """`Dispatcher.dispatch`. The sink hears nothing before this has returned."""
        flight = Flight(self, request, sink, self._loop.time())
        self.counts.requests += 1
        self._launch(flight)
        return flight

    def reserve(self, request: RouterRequest, ttl_ms: int, sink: RouteSink) -> Route:
        """Choose and book without sending, as soon as a target has room; the same request_id gets the same answer while its
        reservation lives, whoever made it. The sink hears nothing before this has returned.

        Args:
            ttl_ms: until the reservation expires by itself; 0: the default.
        """
        route = Route(self, request, ttl_ms or int(self.settings.reservation_ttl_s * 1000), sink, self._loop.time())
        self._launch(route)
        return route

    def keep(self, route: Route, decision: Decision, booking: Booking) -> Reservation:
        """`route.RouteOwner.keep`."""
        ttl_ms = min(route.ttl_ms, int(self.settings.reservation_max_ttl_s * 1000))
        self.ledger.set_expiry(booking, self._loop.time() + ttl_ms / 1000)
        reservation = Reservation(booking.booking_id, route.request.request_id, decision, booking, ttl_ms)
        self.reservations.add(reservation)
        self.counts.reservations += 1
        return reservation

    def release_reservation(self, reservation_id: str) -> bool:
        """End a reservation early, whichever router made it; returns whether it was known here and lived."""
        reservation = self._take(reservation_id)
        if reservation is None:
            return False
        self._bookings.end_reservation(reservation)
        self._pump_if_freed()
        return True

    def place(self, flight: Flight) -> bool:
        """`request.Owner.place`."""
        request = flight.request
        if self._closing is not None:
            flight.fail(self._closing)
            return True
        try:
            reserved = self._reserved(flight)
            decision = reserved.decision if reserved is not None else self._decide_for(flight)
            if decision.must_wait:
                self._wait_for(flight, decision)
                return False
            booking = reserved.booking if reserved is not None else self._book(decision, request)
        except Overloaded as error:
            flight.error = error
            return False
        except Unavailable as error:
            if self._eligibility.may_come_back(flight.query):
                flight.error = error
                return False
            failure = flight.failure
            flight.fail(error if failure is None else Unavailable(f"{error.message}; before that: {failure.message}"))
            return True
        except RankwayError as error:
            flight.fail(error)
            return True
        except Exception:
            # One request's fault must not stop those that wait behind it.
            log.exception("a request could not be placed", request_id=request.request_id)
            flight.fail(EngineFailed("internal error"))
            return True
        return self._send(flight, decision, booking)

    def wait(self, flight: Flight, error: RankwayError) -> None:
        """`request.Owner.wait`."""
        if flight.stage is Stage.ENDED:
            return
        request = flight.request
        reason = flight.error or error
        max_age_s = None if isinstance(reason, Overloaded) else self.settings.failover_wait_s
        priority = FIRST if flight.answered_once else request.priority
        # What a request may be sent to decides whether it stands in others' way; one that waits for its warm target doesn't.
        pool = flight if flight.waiting_for is not None else flight.query
        tokens = len(flight.tokens) // 4
        try:
            flight.entry = self.queue.add(flight, tokens, priority, request.tenant, pool, self._loop.time(), max_age_s)
        except Overloaded as full:
            self._hold_no_more(flight)
            flight.fail(full if isinstance(reason, Overloaded) else reason)
        else:
            flight.stage = Stage.WAITING

    def stop_waiting(self, flight: Flight) -> None:
        """`request.Owner.stop_waiting`."""
        self._hold_no_more(flight)
        if flight.entry is not None:
            self.queue.remove(flight.entry)
            flight.entry = None

    def release(self, booking: Booking) -> None:
        """`request.Owner.release`."""
        self._bookings.release(booking)
        self._pump_if_freed()

    def answered(self, flight: Flight, cached_tokens: int | None) -> None:
        """`request.Owner.answered`."""
        decision = flight.decision
        if flight.booking is not None:
            self._bookings.prefilled(flight.booking)
            self._pump_if_freed()
        if decision is not None and cached_tokens is not None and not flight.answered_once:
            predicted = decision.overlap_blocks * decision.block_size
            self.counts.compared += 1
            self.counts.predicted_tokens += predicted
            self.counts.cached_tokens += cached_tokens
            self.counts.exact += predicted == cached_tokens

    def grown(self, booking: Booking, output_blocks: int) -> None:
        """`request.Owner.grown`."""
        self.ledger.grow(booking, output_blocks)

    def failed_at(self, flight: Flight, error: RankwayError, *, engine_broke: bool) -> bool:
        """`request.Owner.failed_at`."""
        decision = flight.decision
        if engine_broke and decision is not None:
            self._eligibility.set_aside(decision.place.instance, self._loop.time() + self.settings.set_aside_s)
        log.info(
            "attempt failed",
            request_id=flight.request.request_id,
            worker_id=decision.place.target.worker_id if decision is not None else "",
            attempts=flight.attempts,
            output_tokens=len(flight.generated) // 4,
            error=error.message,
        )
        return flight.attempts < self.settings.max_attempts

    def moves(self, flight: Flight) -> None:
        """`request.Owner.moves`."""
        if flight.answered_once:
            self.counts.migrations += 1
        else:
            self.counts.retries += 1

    def ended(self, flight: Flight, error: RankwayError | None) -> None:
        """`request.Owner.ended`."""
        self.flights.discard(flight)
        if not self.flights and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)
        if isinstance(flight, Route):
            return  # `requests` doesn't count it either
        if error is not None:
            self.counts.failed[error.code.name] += 1
        elif flight.left == 0:
            self.counts.finished += 1
            self.counts.prompt_tokens += flight.request.prompt_tokens
            self.counts.completion_tokens += len(flight.generated) // 4
        else:
            self.counts.cancelled += 1

    def _time(self, flight: Flight, until: float) -> None:
        """Give a flight its timer if its deadline comes before."""
        deadline = flight.request.deadline
        if deadline is not None and deadline < until and flight.timer is None:
            flight.timer = self._loop.call_at(deadline, flight.expire)

    def changed(self) -> None:
        """Somebody joined, left or is reached again: what waits may go now."""
        self._schedule_pump()

    def preferred(self, session_id: str, query: Query, now: float) -> int | None:
        """The slot of a session's last request; None: it has none, or the request is pinned."""
        place = self._affinity.target(session_id, now) if session_id and not query.pinned else None
        return self.policy.targets.find(place.target, place.epoch) if place is not None else None

    def sweep(self, now: float) -> None:
        """What time does: bookings and set-aside marks expire, requests have waited too long. Call it every second or so."""
        for flight in self.flights:
            self._time(flight, now + NEAR_S)
        for booking in self.ledger.expire(now):
            self._bookings.expired(booking)
        self.reservations.tidy()
        self._eligibility.expire(now)
        self._affinity.expire(now)
        for flight in self.queue.expire(now):
            flight.entry = None
            flight.fail(self._waited_too_long(flight, now))
        if len(self.queue):
            self._schedule_pump()

    def instance_left(self, instance: Instance) -> None:
        """The instance is gone: sessions and reservations there mean nothing now."""
        self._affinity.forget(instance)
        self.reservations.tidy()

    def refuse_new(self, error: RankwayError) -> None:
        """Fail what comes or waits from now on; what runs goes on."""
        self._closing = error
        for flight in self.queue.items():
            flight.fail(error)

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no request runs; returns whether that came within the timeout."""
        if self.flights:
            self._emptied = self._loop.create_future()
            await asyncio.wait([self._emptied], timeout=timeout_s)
        return not self.flights

    def fail_all(self, error: RankwayError) -> None:
        """End every request with an error; engines are told."""
        self._closing = error
        for flight in list(self.flights):
            flight.abandon(error)

    def _launch(self, flight: Flight) -> None:
        self.flights.add(flight)
        self._time(flight, flight.arrived + NEAR_S)
        self._loop.call_soon(self._begin, flight)

    def _begin(self, flight: Flight) -> None:
        if flight.stage is Stage.NEW and not flight.place() and flight.error is not None:
            self.wait(flight, flight.error)

    def _decide_for(self, flight: Flight) -> Decision:
        request = flight.request
        waited_s = 0.0
        if flight.waiting_for is not None:
            waited_s = self._loop.time() - flight.arrived
            self._hold_no_more(flight)
        return self._decide(flight.query, request, flight.tokens, waited_s)

    def _decide(self, query: Query, request: RouterRequest, tokens: bytes, waited_s: float) -> Decision:
        now = self._loop.time()
        prompt = Prompt(tokens, request.cache_salt, self.preferred(request.session_id, query, now), waited_s)
        self._choices += 1
        if self._choices % SAMPLE:
            decision = self.policy.decide(query, prompt, now, self._rng.getrandbits(64))
        else:
            began = time.perf_counter()
            decision = self.policy.decide(query, prompt, now, self._rng.getrandbits(64))
            self.choice_seconds.add(time.perf_counter() - began)
        if not decision.must_wait:
            self._recent.record(request.request_id, query, decision)
            self._affinity.keep(request.session_id, decision.place, now)
        return decision

    def _book(self, decision: Decision, request: RouterRequest) -> Booking:
        return self._bookings.book(decision, self._loop.time(), requests=request.sampling.n)

    def _reserved(self, flight: Flight) -> Reservation | None:
        reservation_id = flight.request.reservation_id
        if not reservation_id:
            return None
        reservation = self._take(reservation_id)
        if reservation is None:
            return None
        if reservation.decision.prompt_tokens != flight.request.prompt_tokens:
            self._bookings.end_reservation(reservation)
            return None
        return replace(reservation, booking=self._bookings.fulfil(reservation, self._loop.time()))

    def _take(self, reservation_id: str) -> Reservation | None:
        reservation = self.reservations.take(reservation_id)
        if reservation is None:
            self._bookings.remember_taken(reservation_id)
        return reservation

    def _send(self, flight: Flight, decision: Decision, booking: Booking) -> bool:
        link = self._links.get(decision.place.instance)
        deadline = flight.request.deadline
        timeout_ms = 0 if deadline is None else max(1, int((deadline - self._loop.time()) * 1000))
        try:
            if link is None:
                raise Unavailable(f"worker {decision.place.target.worker_id} is not connected")
            flight.send(link, decision, booking, timeout_ms)
        except RankwayError as error:
            self.release(booking)
            flight.tried = (*flight.tried, decision.place)
            flight.failure = error
            return self.place(flight)
        self.stop_waiting(flight)
        return True

    def _wait_for(self, flight: Flight, decision: Decision) -> None:
        """Hold the request for its full warm target."""
        blocks = decision.prefill_tokens / decision.block_size
        flight.waiting_for = (decision.slot, blocks)
        flight.error = Overloaded("the request's warm target is full")
        self.ledger.hold(decision.slot, blocks)

    def _hold_no_more(self, flight: Flight) -> None:
        if flight.waiting_for is not None:
            slot, blocks = flight.waiting_for
            flight.waiting_for = None
            self.ledger.hold(slot, -blocks)

    def _waited_too_long(self, flight: Flight, now: float) -> RankwayError:
        if isinstance(flight.error, Overloaded) or flight.error is None:
            waited_s = now - flight.arrived
            return Overloaded(f"every target was full for {waited_s:.1f} s", self.queue.retry_after_s(now))
        return flight.error

    def _pump_if_freed(self) -> None:
        if self.ledger.freed:
            self.ledger.freed = False
            self._schedule_pump()

    def _schedule_pump(self) -> None:
        if not self._pumping and len(self.queue):
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        self.queue.let_in(self._loop.time(), lambda flight: flight.place())
