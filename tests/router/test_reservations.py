"""Reservations among routers: each may repeat, fulfil or release what another made; pure, and over real gRPC and NATS."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Any

import grpc
import grpc.aio
import pytest
from harness.fake_worker import STOP, FakeWorker
from harness.fleet import Parts, a_record
from harness.nats import NatsServer
from harness.router import TestRouter
from harness.waiting import eventually
from hypothesis import given
from hypothesis import strategies as st

from rankway import rpc
from rankway.blocks import pack_tokens
from rankway.errors import Overloaded, Unavailable
from rankway.ranks import GlobalRank, Target
from rankway.registry.records import Record
from rankway.router.active_updates import BOOKING_TTL_S, Updates
from rankway.router.bookings import TAKEN, Batch, OtherBookings, OwnBookings
from rankway.router.eligibility import Query
from rankway.router.ledger import Booking
from rankway.router.policy import Prompt
from rankway.router.reservations import Reservation, Reservations
from rankway.router.targets import Place
from rankway.v1 import events_pb2, generate_pb2, generate_pb2_grpc, router_pb2, router_pb2_grpc, types_pb2

RECORD = a_record("w", 0, 1, data_parallel_size=1, endpoint="w:1")
PLACE = Place(Target("w", GlobalRank(0)), 1)
TTL_MS = 20_000


class PureRouter:
    """What a router knows of bookings and reservations, of one rank, without any I/O."""

    listening = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts = Parts()
        self.parts.join(RECORD)
        self.ledger = self.parts.ledger
        self.reservations = Reservations()
        self.own = OwnBookings(self.ledger, name, self)
        self.others = OtherBookings(self.ledger, self.own, self.reservations, self._member, BOOKING_TTL_S)
        self.running: list[Booking] = []
        self._updates = Updates(self.parts.targets, self.reservations)
        self._seq = 0

    def group_of(self, slot: int) -> str:
        return "g"

    def notify(self) -> None: ...

    def _member(self, place: Place) -> tuple[int, Record] | None:
        slot = self.parts.targets.find(place.target, place.epoch)
        return None if slot is None or not self.ledger.is_open(slot) else (slot, RECORD)

    def reserve(self, request_id: str, now: float) -> Reservation:
        """Route."""
        known = self.reservations.of_request(request_id)
        if known is not None:
            return known
        decision = self.parts.policy.decide(Query("m"), Prompt(pack_tokens(list(range(40)))), now, 0)
        booking = self.own.book(decision, now, requests=1, expires_at=now + TTL_MS / 1000)
        reservation = Reservation(booking.booking_id, request_id, decision, booking, TTL_MS)
        self.reservations.add(reservation)
        return reservation

    def release(self, reservation_id: str) -> bool:
        """Release."""
        reservation = self._take(reservation_id)
        if reservation is not None:
            self.own.end_reservation(reservation)
        return reservation is not None

    def generate(self, reservation_id: str, now: float) -> None:
        """Generate with a reservation, until `finish`."""
        reservation = self._take(reservation_id)
        if reservation is not None:
            self.running.append(self.own.fulfil(reservation, now))

    def finish(self) -> None:
        """All that runs here ends."""
        for booking in self.running:
            self.own.release(booking)
        self.running.clear()

    def sweep(self, now: float) -> None:
        for booking in self.ledger.expire(now):
            self.own.expired(booking)
        self.reservations.tidy()

    def says(self, now: float, *, full: bool = False) -> list[events_pb2.ActiveUpdate]:
        """What goes out now."""
        batch = Batch({b.booking_id: b for b in self.ledger.bookings() if b.own}) if full else self.own.take().get("g", Batch())
        if full:
            self.own.told_in_full()
        updates = list(self._updates.of(batch, now, full=full)) if full or batch else []
        for update in updates:
            self._seq += 1
            update.router_id, update.router_epoch, update.seq = self.name, 1, self._seq
        return updates

    def hears(self, updates: list[events_pb2.ActiveUpdate], now: float) -> None:
        for update in updates:
            self.others.apply("g", update, now)

    def _take(self, reservation_id: str) -> Reservation | None:
        reservation = self.reservations.take(reservation_id)
        if reservation is None:
            self.own.remember_taken(reservation_id)
        return reservation


def talk(*routers: PureRouter, now: float = 0.0) -> None:
    """Everybody says what is new and hears the others, until nobody has anything more to say."""
    while True:
        said = [(router, router.says(now)) for router in routers]
        if not any(updates for _, updates in said):
            return
        for router, updates in said:
            for other in routers:
                if other is not router:
                    other.hears(updates, now)


def booked(*routers: PureRouter) -> list[int]:
    return [len(list(router.ledger.bookings())) for router in routers]


def test_a_reservation_is_the_same_everywhere() -> None:
    """What another router answers to the same request_id is what its maker answered, ttl included."""
    first, second = PureRouter("a"), PureRouter("b")
    made = first.reserve("r", 0.0)
    talk(first, second)
    known = second.reserve("r", 0.0)
    assert (known.reservation_id, known.request_id, known.ttl_ms) == (made.reservation_id, "r", TTL_MS)
    assert known.decision == made.decision
    assert (made.booking.own, known.booking.own) == (True, False)
    assert (first.reservations.own, second.reservations.own) == (1, 0)
    assert booked(first, second) == [1, 1]


@pytest.mark.parametrize("releaser", [0, 1, 2])
def test_a_release_anywhere_ends_it_everywhere(releaser: int) -> None:
    """The booking ends at its maker and at the third router too; to release it again, anywhere, is harmless."""
    routers = [PureRouter(name) for name in "abc"]
    made = routers[0].reserve("r", 0.0)
    talk(*routers)
    assert booked(*routers) == [1, 1, 1]
    assert routers[releaser].release(made.reservation_id)
    talk(*routers)
    assert booked(*routers) == [0, 0, 0]
    for router in routers:
        assert not router.release(made.reservation_id)
        assert len(router.reservations) == 0
        assert not any(router.ledger.loads.prefill_tokens)


@pytest.mark.parametrize("server", [0, 1])
def test_a_request_takes_the_booking_over(server: int) -> None:
    """Wherever its request comes, everybody counts it once, past the reservation's ttl, until it ends."""
    routers = [PureRouter(name) for name in "abc"]
    made = routers[0].reserve("r", 0.0)
    talk(*routers)
    routers[server].generate(made.reservation_id, 0.0)
    talk(*routers)
    for router in routers:
        assert len(router.reservations) == 0
        assert router.ledger.loads.prefill_tokens[0] == 40
        router.sweep(TTL_MS / 1000 + 1)
    assert booked(*routers) == [1, 1, 1]
    routers[server].finish()
    talk(*routers)
    assert booked(*routers) == [0, 0, 0]


def test_a_reservation_that_isnt_taken_expires_everywhere() -> None:
    """Each router ends it by its own clock."""
    first, second = PureRouter("a"), PureRouter("b")
    first.reserve("r", 0.0)
    talk(first, second)
    for router in (first, second):
        router.sweep(TTL_MS / 1000)
        assert len(router.reservations) == 0
    assert booked(first, second) == [0, 0]


def test_a_reservation_goes_with_its_target() -> None:
    """A router that has lost the target neither knows the reservation nor learns it again."""
    first, second = PureRouter("a"), PureRouter("b")
    first.reserve("r", 0.0)
    talk(first, second)
    second.ledger.close(0)
    second.hears(first.says(0.0, full=True), 0.0)
    second.reservations.tidy()
    assert second.reservations.of_request("r") is None
    assert booked(first, second) == [1, 0]


def test_a_late_router_learns_reservations() -> None:
    """A full update tells what is reserved, and what isn't any more."""
    first, late = PureRouter("a"), PureRouter("b")
    kept, used = first.reserve("kept", 0.0), first.reserve("used", 0.0)
    talk(first)
    first.generate(used.reservation_id, 0.0)
    late.hears(first.says(0.0, full=True), 0.0)
    assert late.reservations.find(kept.reservation_id) is not None
    assert late.reservations.find(used.reservation_id) is None
    assert booked(late) == [2]


def test_a_full_update_tells_whose_request_has_come() -> None:
    """A router that missed it learns that the booking waits for no request any more, and keeps the booking."""
    first, second = PureRouter("a"), PureRouter("b")
    made = first.reserve("r", 0.0)
    talk(first, second)
    first.generate(made.reservation_id, 0.0)
    first.says(0.0)  # lost
    assert second.reservations.find(made.reservation_id) is not None
    second.hears(first.says(0.0, full=True), 0.0)
    assert second.reservations.find(made.reservation_id) is None
    assert booked(first, second) == [1, 1]


def test_a_release_that_was_lost_is_told_again() -> None:
    """As long as the maker lists what ended elsewhere, it is told; meanwhile it isn't believed."""
    first, second = PureRouter("a"), PureRouter("b")
    made = first.reserve("r", 0.0)
    talk(first, second)
    assert second.release(made.reservation_id)
    second.says(0.0)  # lost
    second.hears(first.says(0.0, full=True), 0.0)
    assert second.reservations.of_request("r") is None
    assert booked(first, second) == [1, 0]
    talk(first, second)
    assert booked(first, second) == [0, 0]
    assert not second.own.took(made.reservation_id)


def test_only_so_many_ends_are_remembered() -> None:
    """Ids that nobody ever lists, from whatever clients make up, take a bounded place: the oldest goes first."""
    router = PureRouter("a")
    for number in range(TAKEN + 1):
        assert not router.release(f"id-{number}")
    assert not router.own.took("id-0")
    assert router.own.took("id-1")
    assert router.own.took(f"id-{TAKEN}")


@pytest.mark.parametrize("end", ["release", "generate"])
def test_a_client_may_be_faster_than_the_announcement(end: str) -> None:
    """A router that is asked for a reservation which it has not heard of yet ends it when it does."""
    first, second = PureRouter("a"), PureRouter("b")
    made = first.reserve("r", 0.0)
    if end == "release":
        assert not second.release(made.reservation_id)
    else:
        second.generate(made.reservation_id, 0.0)
    talk(first, second)
    assert booked(first, second) == [0, 0]
    assert len(first.reservations) == len(second.reservations) == 0


def test_two_routers_asked_at_once_agree_afterwards() -> None:
    """Both reservations live by their ids, and everybody repeats the same one; when it ends, the other."""
    first, second = PureRouter("a"), PureRouter("b")
    one, other = first.reserve("r", 0.0), second.reserve("r", 0.0)
    talk(first, second)
    assert first.reserve("r", 0.0).reservation_id == second.reserve("r", 0.0).reservation_id == one.reservation_id
    assert second.release(one.reservation_id)
    talk(first, second)
    assert first.reserve("r", 0.0).reservation_id == second.reserve("r", 0.0).reservation_id == other.reservation_id


def test_a_request_that_runs_at_its_maker_survives_a_release_elsewhere() -> None:
    """When a release crosses the request's announcement, the request's booking stays with whoever made it."""
    first, second = PureRouter("a"), PureRouter("b")
    made = first.reserve("r", 0.0)
    talk(first, second)
    first.generate(made.reservation_id, 0.0)
    assert second.release(made.reservation_id)
    talk(first, second)
    second.hears(first.says(0.0, full=True), 0.0)
    assert booked(first, second) == [1, 1]
    first.finish()
    talk(first, second)
    assert booked(first, second) == [0, 0]


STEP = st.tuples(st.sampled_from(["reserve", "release", "generate", "finish"]), st.integers(0, 2), st.integers(0, 3))


@given(st.lists(STEP, max_size=40), st.randoms(use_true_random=False))
def test_whatever_is_lost_full_updates_end_in_one_state(steps: list[tuple[str, int, int]], rng: random.Random) -> None:
    """Updates that are lost, repeated or late: once full ones have come through, all routers count the same bookings and know the
    same reservations, and none of these lives whose request has come or that a client released.
    """
    routers = [PureRouter(name) for name in "abc"]
    wires = {(i, j): deque[events_pb2.ActiveUpdate]() for i in range(3) for j in range(3) if i != j}
    ids: list[str] = []
    over: set[str] = set()
    for kind, number, which in steps:
        router = routers[number]
        if kind == "reserve":
            ids.append(router.reserve(f"r{which}", 0.0).reservation_id)
        elif kind == "finish":
            router.finish()
        elif ids:
            reservation_id = ids[which % len(ids)]
            over.add(reservation_id)
            _ = router.release(reservation_id) if kind == "release" else router.generate(reservation_id, 0.0)
        for i, speaker in enumerate(routers):
            for update in speaker.says(0.0, full=rng.random() < 0.1):
                for j in range(3):
                    if i != j and rng.random() < 0.7:
                        wires[i, j].extend([update] * rng.randint(1, 2))
        for (_, j), wire in wires.items():
            while wire and rng.random() < 0.5:
                routers[j].hears([wire.popleft()], 0.0)
    for (_, j), wire in wires.items():
        routers[j].hears(list(wire), 0.0)
    for _ in range(2):
        for speaker in routers:
            said = speaker.says(0.0, full=True)
            for other in routers:
                if other is not speaker:
                    other.hears(said, 0.0)
        talk(*routers)
    expected = sorted(b.booking_id for router in routers for b in router.ledger.bookings() if b.own)
    living = {reservation_id for reservation_id in ids if any(r.reservations.find(reservation_id) for r in routers)}
    assert not living & over
    for router in routers:
        assert sorted(booking.booking_id for booking in router.ledger.bookings()) == expected
        assert {each for each in ids if router.reservations.find(each)} == living
        assert set(expected) == living | {b.booking_id for each in routers for b in each.running}
        assert router.ledger.loads.prefill_tokens[0] == 40 * len(expected)


class Client:
    """A client of one router's gRPC API."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.open_channel(address)
        self._routing = router_pb2_grpc.RouterStub(self._channel)
        self._generation = generate_pb2_grpc.GenerationStub(self._channel)

    async def route(self, request_id: str, ttl_ms: int = 0) -> router_pb2.RouteResponse:
        request = router_pb2.RouteRequest(request=a_request(request_id=request_id), ttl_ms=ttl_ms)
        return await self._routing.Route(request, timeout=5)

    async def release(self, reservation_id: str) -> bool:
        return (await self._routing.Release(router_pb2.ReleaseRequest(reservation_id=reservation_id), timeout=5)).released

    async def generate(self, reservation_id: str) -> list[Any]:
        call = self._generation.Generate(a_request(reservation_id=reservation_id), timeout=5)
        return [message async for message in call]

    async def close(self) -> None:
        await self._channel.close()


def a_request(**fields: Any) -> generate_pb2.GenerateRequest:
    sampling = types_pb2.SamplingParams(max_tokens=4)
    return generate_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=range(40)), sampling=sampling, **fields)


@pytest.fixture
async def clients(sharing: Any) -> Any:
    """Makes routers that share, each with a client."""
    opened: list[Client] = []

    async def make(router_id: str) -> tuple[TestRouter, Client]:
        router = await sharing(router_id)
        client = Client(await router.serve())
        opened.append(client)
        return router, client

    make.workers = sharing.workers  # type: ignore[attr-defined]
    yield make
    for client in opened:
        await client.close()


def knows(router: TestRouter, route: router_pb2.RouteResponse) -> bool:
    return router.parts.dispatcher.reservations.find(route.reservation_id) is not None


async def test_routers_repeat_and_release_each_others_reservations(clients: Any) -> None:
    """The same request_id gets the same answer from each router, a late one too; a release at any of them ends it at all."""
    (first, at_first), (second, at_second) = await clients("r1"), await clients("r2")
    for release_at in (at_first, at_second):
        route = await at_first.route("mine", ttl_ms=60_000)
        await eventually(lambda route=route: knows(second, route))
        assert await at_second.route("mine") == route
        assert await release_at.release(route.reservation_id)
        await eventually(lambda: first.is_idle() and second.is_idle())
        assert not await at_first.release(route.reservation_id)
        assert not await at_second.release(route.reservation_id)
    route = await at_first.route("mine")
    late, at_late = await clients("r3")
    await eventually(lambda: knows(late, route))
    assert await at_late.route("mine") == route


async def test_a_request_goes_to_what_another_router_reserved(clients: Any) -> None:
    """Generate at a router that didn't make the reservation: its target, one booking everywhere, none afterwards."""
    (first, at_first), (second, at_second) = await clients("r1"), await clients("r2")
    for worker in clients.workers:
        worker.on_start = lambda seen: seen.delta([1], finish=STOP)
    for number in range(8):
        route = await at_first.route(f"request-{number}")
        await eventually(lambda route=route: knows(second, route))
        routed = (await at_second.generate(route.reservation_id))[0].routed
        assert (routed.worker_id, routed.dp_rank) == (route.worker_id, route.dp_rank)
        await eventually(lambda: first.is_idle() and second.is_idle())


async def test_a_release_during_an_outage_of_nats_is_made_good(nats_server: NatsServer, one_worker: FakeWorker) -> None:
    """Each router does alone what it can; once they hear each other again, the reservation has ended at its maker too."""
    routers = [TestRouter(share_bookings=True, router_id=f"r{i}", nats_url=nats_server.url) for i in range(2)]
    try:
        for router in routers:
            await router.join(one_worker)
            await eventually(lambda router=router: router.parts.sharing.connected)
        first, second = (router.parts.dispatcher for router in routers)
        reservation = (await routers[0].reserve(request_id="r", ttl_ms=60_000)[1].end()).reservation
        await eventually(lambda: second.reservations.find(reservation.reservation_id) is not None)
        nats_server.kill()
        await eventually(lambda: not any(router.parts.sharing.connected for router in routers))
        assert second.release_reservation(reservation.reservation_id)
        assert (await routers[0].reserve(request_id="r")[1].end()).reservation is reservation
        nats_server.start()
        await eventually(lambda: all(router.is_idle() for router in routers), 10)
        assert not first.release_reservation(reservation.reservation_id)
    finally:
        await asyncio.gather(*(router.close() for router in routers))


async def test_a_route_waits_in_the_queue_of_all_requests(make_router: Any, one_worker: FakeWorker) -> None:
    """At the limit it waits in its order among them; its reservation fills the target as a request does."""
    router = await make_full_router(make_router, one_worker)
    running, _ = router.send(40)
    await one_worker.next_start()
    _, second = router.send(50, priority=1)
    _, first = router.reserve(60, priority=-1)
    await eventually(lambda: len(router.parts.dispatcher.queue) == 2)
    running.cancel()
    reservation = (await first.end()).reservation
    assert reservation.decision.prompt_tokens == 60
    assert len(router.parts.dispatcher.queue) == 1
    assert router.parts.dispatcher.release_reservation(reservation.reservation_id)
    seen = await one_worker.next_start()
    assert len(seen.prompt) == 50
    seen.delta([1], finish=STOP)
    await second.end()
    assert router.is_idle()
    counts = router.parts.dispatcher.counts
    assert (counts.requests, counts.cancelled, counts.finished, counts.reservations) == (2, 1, 1, 1)


async def test_a_route_is_bounded_as_every_waiting_request(make_router: Any, one_worker: FakeWorker) -> None:
    """RESOURCE_EXHAUSTED with retry_after_s beyond the queue's number, and when its age has passed; nothing is booked for it."""
    router = await make_full_router(make_router, one_worker, queue_requests=1, queue_age_s=0.2)
    running, _ = router.send(40)
    await one_worker.next_start()
    sinks = [router.reserve(40)[1] for _ in range(2)]
    for sink in sinks:
        await sink.end()
        assert isinstance(sink.error, Overloaded)
        assert sink.error.retry_after_s > 0
    counts = router.parts.dispatcher.queue.counts
    assert (counts.rejected, counts.expired) == (1, 1)
    running.cancel()
    assert router.is_idle()


async def test_routes_of_one_request_that_wait_get_one_reservation(make_router: Any, one_worker: FakeWorker) -> None:
    """A client that asks again while its Route waits is answered once a target has room, both times the same."""
    router = await make_full_router(make_router, one_worker)
    running, _ = router.send(40)
    await one_worker.next_start()
    sinks = [router.reserve(40, request_id="r")[1] for _ in range(2)]
    await eventually(lambda: len(router.parts.dispatcher.queue) == 2)
    running.cancel()
    first, second = [(await sink.end()).reservation for sink in sinks]
    assert first is second
    assert router.parts.dispatcher.counts.reservations == 1
    assert router.parts.dispatcher.release_reservation(first.reservation_id)
    assert router.is_idle()


@pytest.mark.parametrize("server", ["direct", "grpcio"])
async def test_a_route_that_waits_ends_with_its_call(make_router: Any, one_worker: FakeWorker, server: str) -> None:
    """Cancelled, past its deadline, or at a router that stops: it waits no more and nothing is booked for it."""
    router = await make_full_router(make_router, one_worker, grpc_server=server)
    queue = router.parts.dispatcher.queue
    running, _ = router.send(40)
    await one_worker.next_start()
    async with rpc.open_channel(await router.serve()) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        call = stub.Route(router_pb2.RouteRequest(request=a_request()))
        await eventually(lambda: len(queue) == 1)
        call.cancel()
        await eventually(lambda: len(queue) == 0)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Route(router_pb2.RouteRequest(request=a_request()), timeout=0.3)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: len(queue) == 0)
        answer = asyncio.ensure_future(stub.Route(router_pb2.RouteRequest(request=a_request())))
        await eventually(lambda: len(queue) == 1)
        router.parts.dispatcher.refuse_new(Unavailable("the router is stopping"))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await answer
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    running.cancel()
    assert router.is_idle()


async def make_full_router(make_router: Any, worker: FakeWorker, **settings: Any) -> TestRouter:
    """A router whose only target takes one request at a time."""
    worker.record = a_record("w1", 0, 1, data_parallel_size=1, max_num_seqs=1)
    router: TestRouter = await make_router(worker, limit_running=1.0, **settings)
    return router
