"""Session affinity."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankway.ranks import GlobalRank, Instance, Target
from rankway.router.affinity import Affinity
from rankway.router.targets import Place

A = Place(Target("w1", GlobalRank(0)), 1)
B = Place(Target("w2", GlobalRank(4)), 1)


def test_a_session_is_kept_for_its_ttl_after_its_last_request() -> None:
    """Each request renews; after the TTL the session is forgotten."""
    affinity = Affinity(10.0)
    affinity.keep("s", A, 0.0)
    assert affinity.target("s", 9.0) == A
    affinity.keep("s", B, 9.0)
    assert affinity.target("s", 18.0) == B
    assert affinity.target("s", 19.0) is None
    assert len(affinity) == 0


def test_sessions_of_an_instance_that_left_are_dropped() -> None:
    """Its cache is gone with it; a new epoch isn't the same place."""
    affinity = Affinity(10.0)
    affinity.keep("a", A, 0.0)
    affinity.keep("b", B, 0.0)
    affinity.forget(Instance("w1", 1))
    assert affinity.target("a", 1.0) is None
    assert affinity.target("b", 1.0) == B


def test_a_ttl_of_0_turns_it_off() -> None:
    """Nothing is kept, nor is anything for requests without a session."""
    affinity = Affinity(0.0)
    affinity.keep("s", A, 0.0)
    assert len(affinity) == 0
    affinity = Affinity(10.0)
    affinity.keep("", A, 0.0)
    assert len(affinity) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 3)), max_size=50))
def test_never_more_sessions_than_allowed_and_the_latest_are_kept(steps: list[tuple[int, float]]) -> None:
    """The session unused for longest goes first; expiry leaves only living ones."""
    affinity = Affinity(5.0, max_sessions=4)
    now = 0.0
    last: dict[str, float] = {}
    for session, pause in steps:
        now += pause
        last.pop(f"s{session}", None)
        last[f"s{session}"] = now
        affinity.keep(f"s{session}", A, now)
        assert len(affinity) <= 4
    affinity.expire(now)
    for session_id, at in list(last.items())[-4:]:
        assert affinity.target(session_id, now) == (A if at + 5.0 > now else None)
