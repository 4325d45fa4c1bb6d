"""The ledger: bookings at once, reports without counting twice."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankway.blocks import hash_chain, pack_tokens
from rankway.router.ledger import RECENT_STEPS, Booking, Ledger, RecentTerm, Report, SlotLimits


def blocks(count: int, start: int = 0) -> bytes:
    """The hashes of a prompt of `count` blocks."""
    return hash_chain(pack_tokens(list(range(start, start + 16 * count))), 16, 7)


def a_ledger(*, slots: int = 2, recent: RecentTerm | None = None, limits: SlotLimits | None = None) -> Ledger:
    ledger = Ledger(recent or RecentTerm())
    for slot in range(slots):
        ledger.open(slot, limits or SlotLimits())
    return ledger


def test_a_booking_counts_at_once_and_its_prefill_until_the_first_token() -> None:
    """Tokens to prefill count until the first token, blocks until the end."""
    ledger = a_ledger()
    booking = ledger.book("a", 1, 100, 36, blocks(6), 0.0)
    assert (ledger.loads.prefill_tokens[1], ledger.loads.decode_blocks[1], ledger.requests(1)) == (36, 6, 1)
    ledger.prefilled(booking)
    assert (ledger.loads.prefill_tokens[1], ledger.loads.decode_blocks[1]) == (0, 6)
    assert ledger.end(booking)
    assert (ledger.loads.decode_blocks[1], ledger.requests(1)) == (0, 0)
    assert not ledger.end(booking)


def test_blocks_shared_by_requests_count_once() -> None:
    """Two requests with the same prompt use its blocks once."""
    ledger = a_ledger()
    first = ledger.book("a", 0, 96, 96, blocks(6), 0.0)
    ledger.book("b", 0, 96, 1, blocks(6), 0.0)
    assert ledger.loads.decode_blocks[0] == 6
    ledger.end(first)
    assert ledger.loads.decode_blocks[0] == 6


def test_output_blocks_grow_and_go() -> None:
    """Blocks that output fills count as they grow, until the request ends."""
    ledger = a_ledger()
    booking = ledger.book("a", 0, 96, 96, blocks(6), 0.0)
    ledger.grow(booking, 2)
    assert ledger.loads.decode_blocks[0] == 8
    ledger.grow(booking, 3)
    assert ledger.loads.decode_blocks[0] == 9
    ledger.end(booking)
    assert ledger.loads.decode_blocks[0] == 0


def test_a_report_that_shows_what_was_booked_changes_nothing() -> None:
    """When the report catches up with the bookings they aren't counted twice."""
    ledger = a_ledger()
    ledger.book("a", 0, 96, 96, blocks(6), 0.0)
    ledger.report(0, Report(running=1, used_blocks=7, prefill_tokens=96, load_seq=1), 0.1)
    assert (ledger.loads.prefill_tokens[0], ledger.loads.decode_blocks[0], ledger.requests(0)) == (96, 6, 1)


def test_a_report_that_is_late_by_one_isnt_foreign_load() -> None:
    """A report that still shows a request which has ended meanwhile adds nothing."""
    ledger = a_ledger()
    booking = ledger.book("a", 0, 96, 96, blocks(6), 0.0)
    ledger.prefilled(booking)
    ledger.end(booking)
    ledger.report(0, Report(running=1, used_blocks=7, prefill_tokens=96, load_seq=1), 0.1)
    assert (ledger.loads.prefill_tokens[0], ledger.loads.decode_blocks[0], ledger.requests(0)) == (0, 0, 0)


def test_what_nobody_booked_counts_as_foreign_load() -> None:
    """Load that bookings don't explain is somebody's, and counts until a report no longer shows it."""
    ledger = a_ledger()
    ledger.report(0, Report(running=3, waiting=1, used_blocks=50, prefill_tokens=400, load_seq=1), 0.0)
    assert (ledger.loads.prefill_tokens[0], ledger.loads.decode_blocks[0], ledger.requests(0)) == (400, 50, 4)
    ledger.report(0, Report(load_seq=2), 0.1)
    assert (ledger.loads.prefill_tokens[0], ledger.loads.decode_blocks[0], ledger.requests(0)) == (0, 0, 0)


def test_prefill_that_the_engine_has_done_is_credited() -> None:
    """A long prompt that is half computed counts half, once the engine has seen it for sure; a new one counts in full."""
    ledger = a_ledger()
    ledger.book("long", 0, 8000, 8000, blocks(1), 0.0)
    ledger.report(0, Report(running=1, prefill_tokens=8000, load_seq=1), 0.1)
    ledger.report(0, Report(running=1, prefill_tokens=5000, load_seq=2), 0.2)
    assert ledger.loads.prefill_tokens[0] == 5000
    ledger.book("new", 0, 300, 300, blocks(1), 0.25)
    assert ledger.loads.prefill_tokens[0] == 5300
    ledger.report(0, Report(running=2, prefill_tokens=2000, load_seq=3), 0.3)
    assert ledger.loads.prefill_tokens[0] == 2300


def test_a_burst_within_one_report_interval_counts_in_full() -> None:
    """A report that hasn't seen the last requests doesn't take them away."""
    ledger = a_ledger()
    ledger.report(0, Report(load_seq=1), 0.0)
    for i in range(10):
        ledger.book(f"r{i}", 0, 160, 160, blocks(10, 1000 * i), 0.01)
    ledger.report(0, Report(load_seq=2), 0.02)
    assert (ledger.loads.prefill_tokens[0], ledger.loads.decode_blocks[0]) == (1600, 100)


def test_a_report_that_is_older_than_the_last_is_dropped() -> None:
    """Loads may arrive in any order; the newest stays."""
    ledger = a_ledger()
    assert ledger.report(0, Report(running=1, load_seq=5), 0.0)
    assert not ledger.report(0, Report(running=9, load_seq=4), 0.1)
    assert ledger.requests(0) == 1


def test_a_report_that_is_too_old_says_nothing() -> None:
    """Foreign load is forgotten when no report has come for a while."""
    ledger = a_ledger()
    ledger.report(0, Report(running=3, used_blocks=50, prefill_tokens=400, load_seq=1), 0.0)
    ledger.expire(10.0)
    assert (ledger.loads.prefill_tokens[0], ledger.loads.decode_blocks[0], ledger.requests(0)) == (0, 0, 0)
    assert ledger.last_report(0) is None


def test_bookings_expire_unless_renewed() -> None:
    """A booking with an expiry ends by itself; renewing moves the end, None takes it away."""
    ledger = a_ledger()
    short = ledger.book("short", 0, 16, 16, blocks(1), 0.0, expires_at=1.0)
    renewed = ledger.book("renewed", 0, 16, 16, blocks(1), 0.0, expires_at=1.0)
    kept = ledger.book("kept", 0, 16, 16, blocks(1), 0.0, expires_at=1.0)
    ledger.set_expiry(renewed, 2.0)
    ledger.set_expiry(kept, None)
    assert ledger.expire(1.5) == [short]
    assert ledger.expire(2.5) == [renewed]
    assert not kept.ended


def test_counters_belong_to_an_epoch() -> None:
    """A slot that is closed and opened again begins from nothing; a booking of its old life does nothing more."""
    ledger = a_ledger(recent=RecentTerm(1.0, 1.0), limits=SlotLimits(requests=1))
    booking = ledger.book("a", 0, 96, 96, blocks(6), 0.0)
    assert ledger.close(0) == [booking]
    ledger.open(0)
    assert all_zero(ledger)
    assert not ledger.full
    ledger.prefilled(booking)
    ledger.grow(booking, 5)
    assert not ledger.end(booking)
    assert all_zero(ledger)


def test_a_slot_at_a_limit_is_full_until_something_ends() -> None:
    """Full and freed are told as they happen; an idle slot is never full."""
    ledger = a_ledger(limits=SlotLimits(requests=2, prefill_tokens=100, blocks=50))
    first = ledger.book("a", 0, 16, 16, blocks(1), 0.0)
    assert not ledger.full
    second = ledger.book("b", 0, 16, 16, blocks(1), 0.0)
    assert ledger.full == {0}
    assert ledger.full_among(bytearray([1, 1])) == [0]
    assert ledger.full_among(bytearray([0, 1])) == []
    ledger.end(first)
    assert not ledger.full
    assert ledger.freed
    ledger.end(second)
    huge = ledger.book("huge", 0, 1000, 1000, blocks(60), 0.0)
    assert ledger.full == {0}
    ledger.end(huge)
    assert not ledger.full


def test_foreign_load_alone_never_fills_a_slot() -> None:
    """A slot with nothing of ours is tried, however busy others keep it."""
    ledger = a_ledger(limits=SlotLimits(requests=1))
    ledger.report(0, Report(running=10, load_seq=1), 0.0)
    assert not ledger.full


def test_the_recent_term_halves_in_its_half_life_and_ends_at_zero() -> None:
    """Each dispatch adds its weight; it fades by half every half-life, and to nothing."""
    ledger = a_ledger(recent=RecentTerm(weight=2.0, half_life_s=1.0))
    ledger.end(ledger.book("a", 0, 16, 16, blocks(1), 0.0))
    assert ledger.loads.recent[0] == 2.0
    ledger.decay(1.0)
    assert ledger.loads.recent[0] == pytest.approx(1.0, rel=0.05)
    ledger.decay(1.0 + 1 / (4 * RECENT_STEPS))
    assert ledger.loads.recent[0] == pytest.approx(1.0, rel=0.05)
    ledger.decay(60.0)
    assert ledger.loads.recent[0] == 0.0


def test_weight_0_turns_the_recent_term_off() -> None:
    """With a weight of 0 dispatches leave no trace."""
    ledger = a_ledger(recent=RecentTerm(weight=0.0))
    ledger.book("a", 0, 16, 16, blocks(1), 0.0)
    assert ledger.loads.recent[0] == 0.0


def test_bookings_of_other_routers_add_no_recent_term() -> None:
    """Only this router's own dispatches are its recent ones."""
    ledger = a_ledger(recent=RecentTerm(weight=1.0))
    ledger.book("other", 0, 16, 16, blocks(1), 0.0, own=False)
    assert ledger.loads.recent[0] == 0.0


STEP = st.one_of(
    st.tuples(st.just("book"), st.integers(0, 11), st.integers(0, 2), st.integers(1, 200)),
    st.tuples(st.just("prefilled"), st.integers(0, 11), st.just(0), st.just(0)),
    st.tuples(st.just("grow"), st.integers(0, 11), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("end"), st.integers(0, 11), st.just(0), st.just(0)),
    st.tuples(st.just("report"), st.integers(0, 2), st.integers(0, 300), st.integers(0, 5)),
    st.tuples(st.just("reopen"), st.integers(0, 2), st.just(0), st.just(0)),
)


@given(st.lists(STEP, max_size=80))
def test_nothing_is_ever_negative_and_all_is_zero_in_the_end(steps: list[tuple[str, int, int, int]]) -> None:
    """Whatever comes in whatever order: no entry goes below 0, and after every end and an empty report all are 0."""
    ledger = a_ledger(slots=3, recent=RecentTerm(1.0, 0.5), limits=SlotLimits(requests=3, prefill_tokens=300, blocks=40))
    bookings: dict[int, Booking] = {}
    seq, now = 0, 0.0
    for kind, a, b, c in steps:
        now += 0.05
        if kind == "book":
            bookings[a] = ledger.book(f"b{a}", b, c, c, blocks(c // 16, 16 * (a % 3)), now, own=a % 2 == 0)
        elif kind == "report":
            seq += 1
            ledger.report(a, Report(running=c, used_blocks=b, prefill_tokens=b, load_seq=seq), now)
        elif kind == "reopen":
            ledger.close(a)
            ledger.open(a, SlotLimits(requests=2))
        elif a in bookings:
            action = {"prefilled": ledger.prefilled, "end": ledger.end}.get(kind)
            if action is not None:
                action(bookings[a])
            else:
                ledger.grow(bookings[a], b)
        loads = ledger.loads
        assert min(loads.prefill_tokens) >= 0
        assert min(loads.decode_blocks) >= 0
        assert min(loads.recent) >= 0
    for booking in bookings.values():
        ledger.end(booking)
    for slot in range(3):
        for _ in range(3):
            seq += 1
            ledger.report(slot, Report(load_seq=seq), now)
    ledger.decay(now + 100)
    assert all_zero(ledger)
    assert not ledger.full
    assert not list(ledger.bookings())


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.randoms())
def test_the_order_in_which_bookings_end_doesnt_matter(sizes: list[int], rng: random.Random) -> None:
    """Any order of prefilled and end leaves the same: nothing."""
    ledger = a_ledger(slots=1)
    bookings = [ledger.book(f"b{i}", 0, size, size, blocks(size // 16), 0.0) for i, size in enumerate(sizes)]
    ledger.report(0, Report(prefill_tokens=sum(sizes) // 2, load_seq=1), 0.0)
    actions = [(ledger.prefilled, b) for b in bookings] + [(ledger.end, b) for b in bookings]
    rng.shuffle(actions)
    for action, booking in actions:
        action(booking)
    assert all_zero(ledger)


def all_zero(ledger: Ledger) -> bool:
    loads = ledger.loads
    return not any(loads.prefill_tokens) and not any(loads.decode_blocks) and not any(loads.recent)
