"""Bookings between routers: what is told, what is learnt, over a pure ledger and over real NATS."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.fake_worker import STOP, FakeWorker
from harness.fleet import a_record
from harness.nats import NatsServer
from harness.router import TestRouter
from harness.waiting import eventually
from hypothesis import given
from hypothesis import strategies as st

from rankway.blocks import hash_chain, pack_tokens
from rankway.bus import BusStatus
from rankway.ranks import GlobalRank, Target
from rankway.router.bookings import OtherBookings, OwnBookings
from rankway.router.fleet import Fleet
from rankway.router.ledger import Ledger, RecentTerm
from rankway.router.policy import Decision
from rankway.router.reservations import Reservations
from rankway.router.settings import RouterSettings
from rankway.router.sharing import Sharing
from rankway.router.targets import Place, Targets
from rankway.v1 import events_pb2

HASHES = hash_chain(pack_tokens(list(range(64))), 16, 1)


def a_ledger() -> Ledger:
    ledger = Ledger(RecentTerm())
    ledger.open(0)
    return ledger


PLACE = Place(Target("w", GlobalRank(0)), 1)
RECORD = a_record("w", 0, 1, data_parallel_size=1, epoch=1, dp_group="g")


def others(ledger: Ledger) -> OtherBookings:
    """Knows worker "w", epoch 1, rank 0 as slot 0."""
    own = OwnBookings(ledger, "r1")
    return OtherBookings(ledger, own, Reservations(), lambda place: (0, RECORD) if place == PLACE else None, ttl_s=30.0)


def update(seq: int, *, booked: Sequence[str] = (), **fields: Any) -> events_pb2.ActiveUpdate:
    """What router r2 says in its first life, unless told otherwise."""
    given = {"router_id": "r2", "router_epoch": fields.pop("epoch", 1)} | fields
    message = events_pb2.ActiveUpdate(seq=seq, **given)
    for booking_id in booked:
        message.booked.add(
            booking_id=booking_id, worker_id="w", epoch=1, prefill_tokens=64, block_hashes=HASHES, ttl_ms=10_000, requests=1
        )
    return message


def test_others_bookings_count_until_they_are_released() -> None:
    """Booked, prefilled, released: the ledger follows each."""
    ledger = a_ledger()
    known = others(ledger)
    assert known.apply("g", update(1, booked=["a"]), 0.0)
    assert (ledger.loads.prefill_tokens[0], ledger.loads.decode_blocks[0]) == (64, 4)
    assert known.apply("g", update(2, prefilled=["a"]), 0.0)
    assert (ledger.loads.prefill_tokens[0], ledger.loads.decode_blocks[0]) == (0, 4)
    assert known.apply("g", update(3, released=["a"]), 0.0)
    assert ledger.loads.decode_blocks[0] == 0


def test_a_hole_in_the_seqs_asks_for_everything() -> None:
    """A lost update is noticed with the next one; a full one mends it."""
    ledger = a_ledger()
    known = others(ledger)
    assert known.apply("g", update(1, booked=["a"]), 0.0)
    assert not known.apply("g", update(3, booked=["c"]), 0.0)
    assert known.apply("g", update(4, full=True, booked=["b", "c"]), 0.0)
    assert {booking.booking_id for booking in ledger.bookings()} == {"b", "c"}


def test_a_router_that_is_heard_first_in_the_middle_is_asked() -> None:
    """Starting late means asking; a full update is enough at any seq."""
    assert not others(a_ledger()).apply("g", update(17, booked=["a"]), 0.0)
    assert others(a_ledger()).apply("g", update(17, full=True), 0.0)


def test_late_and_repeated_updates_change_nothing() -> None:
    """An update that comes again, or of a router's old life, is dropped."""
    ledger = a_ledger()
    known = others(ledger)
    known.apply("g", update(1, epoch=2, booked=["a"]), 0.0)
    known.apply("g", update(2, epoch=2, released=["a"]), 0.0)
    assert known.apply("g", update(1, epoch=2, booked=["a"]), 0.0)
    assert known.apply("g", update(9, epoch=1, booked=["b"]), 0.0)
    assert not list(ledger.bookings())


def test_a_restarted_router_has_none_of_its_old_bookings() -> None:
    """A new router_epoch forgets what the old one booked."""
    ledger = a_ledger()
    known = others(ledger)
    known.apply("g", update(1, booked=["a"]), 0.0)
    known.apply("g", update(1, epoch=2, booked=["b"]), 0.0)
    assert [booking.booking_id for booking in ledger.bookings()] == ["b"]


def test_bookings_of_a_silent_router_expire() -> None:
    """What isn't repeated ends by itself; the router is forgotten."""
    ledger = a_ledger()
    known = others(ledger)
    known.apply("g", update(1, booked=["a"]), 0.0)
    ledger.expire(10.0)
    assert not list(ledger.bookings())
    known.tidy(61.0)
    assert known.routers == 0


def test_bookings_on_targets_that_are_not_known_are_passed_over() -> None:
    """A worker that this router has not heard of yet costs nothing."""
    ledger = a_ledger()
    message = update(1)
    message.booked.add(booking_id="x", worker_id="unheard", epoch=1, prefill_tokens=1, ttl_ms=1000)
    assert others(ledger).apply("g", message, 0.0)
    assert not list(ledger.bookings())


STEP = st.tuples(st.sampled_from(["book", "prefilled", "release"]), st.integers(0, 5))


@given(st.lists(STEP, max_size=30), st.sets(st.integers(0, 30)), st.randoms())
def test_a_full_update_mends_whatever_was_lost(steps: list[tuple[str, int]], lost: set[int], rng: Any) -> None:
    """Whichever updates are lost or repeated, after a full one the ledger has exactly the router's bookings."""
    ledger = a_ledger()
    known = others(ledger)
    living: set[str] = set()
    seq = 0
    for kind, number in steps:
        booking_id = f"b{number}-{seq}" if kind == "book" else next(iter(sorted(living)), "none")
        seq += 1
        if kind == "book":
            living.add(booking_id)
            message = update(seq, booked=[booking_id])
        elif kind == "prefilled":
            message = update(seq, prefilled=[booking_id])
        else:
            living.discard(booking_id)
            message = update(seq, released=[booking_id])
        if seq not in lost:
            for _ in range(rng.randint(1, 2)):
                known.apply("g", message, 0.0)
    assert known.apply("g", update(seq + 1, full=True, booked=sorted(living)), 0.0)
    assert {booking.booking_id for booking in ledger.bookings()} == living
    known.apply("g", update(seq + 2, full=True), 0.0)
    assert ledger.loads.decode_blocks[0] == 0


def booked(router: TestRouter) -> int:
    return len(list(router.parts.ledger.bookings()))


class Listeners:
    """An audience that listens, of one DP group."""

    listening = True

    def group_of(self, slot: int) -> str:
        return "g"

    def notify(self) -> None: ...


def test_what_a_full_update_told_is_released_for_the_others_too() -> None:
    """A booking that a full update told before its batch went out is told again when it ends."""
    ledger = a_ledger()
    own = OwnBookings(ledger, "r1", Listeners())
    decision = Decision(0, PLACE, "w:1", 1.0, 0, 16, 64, HASHES)
    booking = own.book(decision, 0.0, requests=1)
    own.told_in_full()
    own.release(booking)
    assert own.take()["g"].released == [booking.booking_id]


async def test_routers_learn_each_others_bookings(sharing: Any) -> None:
    """What one router books the other counts, until it ends; a router that starts late learns what there is."""
    first, second = await sharing("r1"), await sharing("r2")
    flights = [first.send(64)[0] for _ in range(3)]
    await eventually(lambda: booked(second) == 3)
    assert list(second.parts.ledger.loads.decode_blocks) == list(first.parts.ledger.loads.decode_blocks)
    late = await sharing("r3")
    await eventually(lambda: booked(late) == 3)
    for flight in flights:
        flight.cancel()
    await eventually(lambda: booked(second) == booked(late) == 0)
    assert not any(second.parts.ledger.loads.prefill_tokens)


async def test_four_routers_under_a_burst_dont_herd(sharing: Any) -> None:
    """4 routers × 64 requests on 8 ranks at once: no rank gets above twice the mean."""
    routers = [await sharing(f"r{i}") for i in range(4)]
    sinks = [
        router.send(list(range(1000 * i + 10 * n, 1000 * i + 10 * n + 64)))[1]
        for n in range(64)
        for i, router in enumerate(routers)
    ]
    await eventually(lambda: all(sink.target is not None for sink in sinks))
    counts = Counter(sink.target.target for sink in sinks)
    assert len(counts) == 8
    assert max(counts.values()) <= 2 * 256 / 8
    for worker in sharing.workers:
        worker.on_start = lambda seen: seen.delta([1], finish=STOP)
        while not worker.started.empty():
            worker.started.get_nowait().delta([1], finish=STOP)
    for sink in sinks:
        await sink.end()
    await eventually(lambda: all(booked(router) == 0 for router in routers), 10)


async def test_sharing_survives_an_outage_of_nats(nats_server: NatsServer) -> None:
    """While NATS is away requests go on; afterwards bookings are known again."""
    worker = FakeWorker(a_record("w1", 0, 1, data_parallel_size=1))
    routers = [TestRouter(share_bookings=True, router_id=f"r{i}", nats_url=nats_server.url) for i in range(2)]
    try:
        for router in routers:
            await router.join(worker)
            await eventually(lambda router=router: router.parts.sharing.connected)
        nats_server.kill()
        await eventually(lambda: not routers[0].parts.sharing.connected)
        flight, _ = routers[0].send(64)
        await worker.next_start()
        nats_server.start()
        await eventually(lambda: booked(routers[1]) == 1, 10)
        flight.cancel()
        await eventually(lambda: booked(routers[1]) == 0)
    finally:
        await asyncio.gather(*(router.close() for router in routers))
        await worker.kill()


async def test_every_reconnect_makes_good_what_was_lost() -> None:
    """After each reconnect, not the first alone, all is told again and asked for again."""
    ledger, clock = a_ledger(), asyncio.get_running_loop().time
    sharing = Sharing(RouterSettings(), "r", 1, Fleet(), Targets(), ledger, OwnBookings(ledger, "r"), Reservations(), clock)
    status = BusStatus()
    mending = asyncio.create_task(sharing._after_reconnects(status))
    try:
        for _ in range(3):
            status.reconnected.set()
            await eventually(lambda: sharing._full_wanted.is_set() and sharing._missed.is_set())
            sharing._full_wanted.clear()
            sharing._missed.clear()
    finally:
        mending.cancel()
        await asyncio.wait({mending})
