"""The wait queue: bounded, ordered, fair."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankway.errors import Overloaded
from rankway.router.admission import Entry, QueueLimits, WaitQueue


def a_queue(**limits: float) -> WaitQueue[str]:
    return WaitQueue(QueueLimits(**limits))  # type: ignore[arg-type]


def put(queue: WaitQueue[str], item: str, *, now: float = 0.0, **fields: Any) -> Entry[str]:
    """Let `item` wait; tokens 10, priority 0, one tenant and one pool unless given."""
    given = {"tokens": 10, "priority": 0, "tenant": "", "pool": "p"} | fields
    return queue.add(item, now=now, **given)


def order(queue: WaitQueue[str]) -> list[str]:
    """The order in which everything would be let in."""
    went: list[str] = []

    def take(item: str) -> bool:
        went.append(item)
        return True

    queue.let_in(1.0, take)
    return went


def test_lower_priority_numbers_go_first_then_arrival() -> None:
    """(priority, arrival) is the order."""
    queue = a_queue()
    put(queue, "late", priority=5)
    put(queue, "first")
    put(queue, "second")
    put(queue, "urgent", priority=-1)
    assert order(queue) == ["urgent", "first", "second", "late"]
    assert len(queue) == 0
    assert queue.tokens == 0


def test_tenants_share_by_tokens() -> None:
    """A tenant with a hundred requests doesn't keep another one's few waiting."""
    queue = a_queue()
    for i in range(6):
        put(queue, f"big{i}", tenant="big")
    put(queue, "small0", tenant="small")
    put(queue, "small1", tenant="small")
    assert order(queue)[:4] == ["big0", "small0", "big1", "small1"]


def test_a_tenant_of_long_prompts_gets_fewer_turns() -> None:
    """Fair means equal tokens, not equal requests."""
    queue = a_queue()
    for i in range(3):
        put(queue, f"long{i}", tenant="long", tokens=100)
        put(queue, f"short{i}", tenant="short", tokens=50)
    assert order(queue) == ["long0", "short0", "short1", "long1", "short2", "long2"]


def test_pauses_earn_nothing() -> None:
    """A tenant that was silent while others were served starts level with them."""
    queue = a_queue()
    for i in range(20):
        put(queue, f"a{i}", tenant="a")
    went: list[str] = []

    def ten(item: str) -> bool:
        went.append(item)
        return len(went) <= 10

    queue.let_in(0.0, ten, most=1)
    for i in range(5):
        put(queue, f"b{i}", tenant="b")
    rest = order(queue)
    assert rest[:4] in (["b0", "a10", "b1", "a11"], ["a10", "b0", "a11", "b1"])


def test_a_full_queue_refuses_with_a_delay() -> None:
    """Beyond its number or its tokens the queue says Overloaded, and when to come again."""
    queue = a_queue(entries=2, tokens=100)
    put(queue, "a", tokens=10)
    put(queue, "b", tokens=10)
    with pytest.raises(Overloaded) as refused:
        put(queue, "c")
    assert refused.value.retry_after_s > 0
    queue = a_queue(entries=10, tokens=100)
    put(queue, "a", tokens=90)
    with pytest.raises(Overloaded):
        put(queue, "b", tokens=20)
    assert queue.counts.rejected == 1


def test_one_request_longer_than_the_bound_may_wait_alone() -> None:
    """An empty queue takes any request: otherwise it could never be served."""
    queue = a_queue(tokens=100)
    put(queue, "huge", tokens=1000)
    assert len(queue) == 1


def test_requests_expire_by_age() -> None:
    """What has waited for age_s is handed out, and is gone."""
    queue = a_queue(age_s=5.0)
    put(queue, "old", now=0.0)
    put(queue, "new", now=3.0)
    assert queue.oldest_age_s(4.0) == 4.0
    assert queue.expire(5.0) == ["old"]
    assert order(queue) == ["new"]


def test_a_blocked_pool_doesnt_block_others() -> None:
    """When one entry finds no target, those of its pool are skipped and others still go, in order."""
    queue = a_queue()
    for i in range(3):
        put(queue, f"pinned{i}", pool="full")
        put(queue, f"free{i}", pool="open")
    asked: list[str] = []

    def place(item: str) -> bool:
        asked.append(item)
        return item.startswith("free")

    assert queue.let_in(0.0, place) == 3
    assert asked == ["pinned0", "free0", "free1", "free2"]
    assert order(queue) == ["pinned0", "pinned1", "pinned2"]


def test_the_retry_delay_follows_the_rate() -> None:
    """The delay is the queue's length at the rate at which requests were let in last, within bounds."""
    queue = a_queue(entries=1000)
    for i in range(64):
        put(queue, f"r{i}")
    for i in range(32):
        first = queue.items()[0]
        queue.let_in(i * 0.1, first.__eq__, most=1)
    assert queue.retry_after_s(3.2) == pytest.approx(32 / (32 / 3.2), rel=0.2)


def test_a_tenant_that_is_done_is_forgotten() -> None:
    """Names of tenants don't pile up."""
    queue = a_queue()
    for i in range(50):
        put(queue, f"r{i}", tenant=f"t{i}")
    order(queue)
    queue.expire(0.0)
    assert not queue._tenants


STEP = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 3), st.integers(-2, 2), st.integers(0, 2)),
    st.tuples(st.just("remove"), st.integers(0, 40), st.just(0), st.just(0)),
    st.tuples(st.just("let_in"), st.integers(0, 4), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("expire"), st.integers(0, 3), st.just(0), st.just(0)),
)


@given(st.lists(STEP, max_size=60))
def test_every_request_leaves_once(steps: list[tuple[str, int, int, int]]) -> None:
    """Whatever happens, each entry is let in, expired, removed, or still there: exactly one of these."""
    queue: WaitQueue[int] = WaitQueue(QueueLimits(entries=8, tokens=1000, age_s=5))
    entries: list[Entry[int]] = []
    left: list[int] = []
    now = 0.0
    for kind, a, b, c in steps:
        now += 1
        if kind == "add":
            try:
                entries.append(queue.add(len(entries), 10 * (a + 1), b, f"t{a}", c, now))
            except Overloaded:
                assert len(queue) == 8
        elif kind == "remove" and entries:
            entry = entries[a % len(entries)]
            if not entry.gone:
                left.append(entry.item)
            queue.remove(entry)
        elif kind == "let_in":
            allowed = [entry.item for entry in entries if not entry.gone and entry.pool != b][:a]
            went: list[int] = []

            def place(item: int, allowed: list[int] = allowed, went: list[int] = went) -> bool:
                if item in allowed:
                    went.append(item)
                return item in allowed

            queue.let_in(now, place)
            left += went
        elif kind == "expire":
            left += queue.expire(now)
    remaining = queue.items()
    assert sorted([*left, *remaining]) == list(range(len(entries)))
    assert queue.tokens == sum(entries[item].tokens for item in remaining)
    rest: list[int] = []
    queue.let_in(now, lambda item: rest.append(item) is None, most=1000)
    assert sorted(rest) == sorted(remaining)
    assert [entries[i].priority for i in rest] == sorted(entries[i].priority for i in rest)
