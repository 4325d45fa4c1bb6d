"""Windows of global ranks: which are allowed, and how global and local ranks map."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankway.errors import InvalidField, RankOutOfRange
from rankway.ranks import UINT32_MAX, DpRange, check_name


@st.composite
def windows(draw: st.DrawFn, most: int = UINT32_MAX) -> DpRange:
    start = draw(st.integers(0, most - 1))
    return DpRange(start, draw(st.integers(1, min(most - start, 1000))))


@given(st.integers(-(2**33), 2**33), st.integers(-(2**33), 2**33))
def test_allowed_windows(start_rank: int, size: int) -> None:
    """A window has at least one rank, starts at 0 or later and ends within uint32; anything else is refused by name."""
    allowed = start_rank >= 0 and size >= 1 and start_rank + size <= UINT32_MAX
    if allowed:
        assert DpRange(start_rank, size).end == start_rank + size
    else:
        with pytest.raises(InvalidField) as caught:
            DpRange(start_rank, size)
        assert caught.value.field in ("start_rank", "size")


@given(windows(), st.data())
def test_global_and_local(window: DpRange, data: st.DataObject) -> None:
    """Inside the window global → local → global is the identity, and local ranks are 0 … size-1."""
    dp_rank = data.draw(st.integers(window.start_rank, window.end - 1))
    local = window.to_local(dp_rank, "w1")
    assert 0 <= local < window.size
    assert window.to_global(local) == dp_rank


@given(windows(), st.integers(-10, UINT32_MAX + 10))
def test_outside(window: DpRange, dp_rank: int) -> None:
    """A rank outside the window is never mapped: the error names the rank, the owner and the window."""
    if dp_rank in window:
        assert window.start_rank <= dp_rank < window.end
        return
    with pytest.raises(RankOutOfRange) as caught:
        window.to_local(dp_rank, "worker w1")
    assert caught.value.message == f"dp_rank={dp_rank}: worker w1 owns the global ranks [{window.start_rank}, {window.end})"


@given(windows(most=2000), st.integers(-5, 2100))
def test_local_outside(window: DpRange, local_rank: int) -> None:
    """A local rank that the engine doesn't have is refused."""
    if 0 <= local_rank < window.size:
        assert window.to_global(local_rank) in window
    else:
        with pytest.raises(InvalidField):
            window.to_global(local_rank)


@given(windows(most=60), windows(most=60))
def test_overlap(a: DpRange, b: DpRange) -> None:
    """Two windows overlap exactly when they share a rank, whichever is asked."""
    shared = set(a.ranks()) & set(b.ranks())
    assert a.overlaps(b) == b.overlaps(a) == bool(shared)


@given(windows(most=60), st.integers(1, 80))
def test_within_the_group(window: DpRange, data_parallel_size: int) -> None:
    """A window belongs to a group exactly when its last rank does."""
    if window.end <= data_parallel_size:
        window.check_within(data_parallel_size)
    else:
        with pytest.raises(InvalidField, match=f"passes data_parallel_size={data_parallel_size}"):
            window.check_within(data_parallel_size)


def test_the_worker_b_case() -> None:
    """Worker B of two that own four ranks each: global 4-7 are its local 0-3, and global 3 isn't its."""
    window = DpRange(4, 4)
    assert window.ranks() == [4, 5, 6, 7]
    assert [window.to_local(rank, "B") for rank in window.ranks()] == [0, 1, 2, 3]
    with pytest.raises(RankOutOfRange, match=r"dp_rank=3: B owns the global ranks \[4, 8\)"):
        window.to_local(3, "B")


@given(st.text(max_size=70))
def test_names(value: str) -> None:
    """A name is 1 to 64 ASCII letters, digits, _ or -, so that it may stand in a NATS subject."""
    allowed = 1 <= len(value) <= 64 and all(c.isascii() and (c.isalnum() or c in "_-") for c in value)
    if allowed:
        assert check_name("worker_id", value) == value
    else:
        with pytest.raises(InvalidField, match="worker_id="):
            check_name("worker_id", value)
