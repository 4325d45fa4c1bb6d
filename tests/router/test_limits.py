"""Token buckets."""

from __future__ import annotations

import pytest

from rankway.errors import Overloaded
from rankway.router.limits import RateLimit


def test_a_burst_then_the_rate() -> None:
    """`burst` at once, then one each 1/rate seconds; the refusal says how long to wait."""
    limit = RateLimit(rate_per_s=2.0, burst=3)
    for _ in range(3):
        limit.take("k", 0.0)
    with pytest.raises(Overloaded) as refused:
        limit.take("k", 0.0)
    assert refused.value.retry_after_s == pytest.approx(0.5)
    limit.take("k", 0.5)
    with pytest.raises(Overloaded):
        limit.take("k", 0.5)
    assert limit.refused == 2


def test_keys_dont_share() -> None:
    """One key's burst leaves another's bucket full."""
    limit = RateLimit(1.0, 1)
    limit.take("a", 0.0)
    limit.take("b", 0.0)


def test_a_rate_of_0_is_no_limit() -> None:
    """Nothing is refused or kept."""
    limit = RateLimit(0.0, 1)
    for _ in range(100):
        limit.take("k", 0.0)
    assert len(limit) == 0


def test_keys_are_bounded() -> None:
    """Made-up keys don't fill the memory."""
    limit = RateLimit(1.0, 1, max_keys=10)
    for i in range(100):
        limit.take(f"k{i}", 0.0)
    assert len(limit) == 10
