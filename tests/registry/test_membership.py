"""The window map of a DP group: every reason to refuse a worker, by example and by property."""

from __future__ import annotations

import itertools

import pytest
from harness.registry import record
from hypothesis import given
from hypothesis import strategies as st

from rankway.errors import Conflict, Mismatch, Outdated, RankwayError
from rankway.ranks import DpRange, Instance
from rankway.registry import membership
from rankway.registry.membership import Group
from rankway.registry.records import Record


def admit_all(*records: Record) -> Group:
    group = None
    for each in records:
        group = membership.admit(group, each, dead=())
    assert group is not None
    return group


def test_windows_side_by_side() -> None:
    """Workers whose windows touch and don't overlap share a group."""
    group = admit_all(record("w1", 0, 4), record("w2", 4, 4))
    assert {worker_id: claim.window for worker_id, claim in group.claims.items()} == {"w1": DpRange(0, 4), "w2": DpRange(4, 4)}


def test_overlap_names_both_sides() -> None:
    """An overlapping window is a Conflict that names both windows and both workers."""
    group = admit_all(record("w1", 0, 4))
    with pytest.raises(Conflict) as caught:
        membership.admit(group, record("w2", 3, 4), dead=())
    assert caught.value.message == "window [3, 7) of worker w2 overlaps window [0, 4) of worker w1 in DP group g"


def test_the_dead_are_no_obstacle() -> None:
    """A window whose worker holds no lease may be taken, and leaves the map."""
    group = admit_all(record("w1", 0, 4))
    newer = membership.admit(group, record("w2", 2, 4), dead={Instance("w1", 1000)})
    assert set(newer.claims) == {"w2"}


@pytest.mark.parametrize(
    ("field", "value", "theirs"),
    [("block_size", 32, "16"), ("data_parallel_size", 16, "8"), ("model", "model-b", "'model-a'")],
)
def test_common_facts(field: str, value: object, theirs: str) -> None:
    """block_size, data_parallel_size and model are the group's as long as another worker lives in it."""
    group = admit_all(record("w1", 0, 4))
    other = record("w2", 4, 4, **{field: value})
    assert membership.rivals(group, other) == [Instance("w1", 1000)]
    with pytest.raises(Mismatch) as caught:
        membership.admit(group, other, dead=())
    assert caught.value.message == f"{field}={value!r} of worker w2 differs from {field}={theirs} of DP group g (worker w1)"
    alone = membership.admit(group, other, dead={Instance("w1", 1000)})
    assert getattr(alone, field) == value


def test_a_lone_worker_may_change_its_group() -> None:
    """The next life of a group's only worker may come with another window, model or block size."""
    group = admit_all(record("w1", 0, 4), record("w1", 0, 8, epoch=2000, block_size=32, model="model-b"))
    assert (group.block_size, group.model, group.claims["w1"].window) == (32, "model-b", DpRange(0, 8))


def test_older_epoch() -> None:
    """An earlier life of a live worker is Outdated; the message names both epochs."""
    with pytest.raises(Outdated, match="epoch 999 of worker w1 is older than epoch 1000 on record"):
        membership.check_succession(record(), record(epoch=999))


def test_other_group() -> None:
    """A worker_id lives in one DP group at a time, whatever its epoch."""
    with pytest.raises(Conflict, match=r"worker w1 \(epoch 2000\) of DP group h: .* lives in DP group g \(epoch 1000"):
        membership.check_succession(record(), record(dp_group="h", epoch=2000))


def test_one_epoch_two_workers() -> None:
    """Two processes with one worker_id and epoch are a Conflict; the same record is none."""
    membership.check_succession(record(), record())
    with pytest.raises(Conflict, match=r"registered with endpoint='127.0.0.1:7001', this one has endpoint='127.0.0.1:7002'"):
        membership.check_succession(record(), record(endpoint="127.0.0.1:7002"))


def test_encoding() -> None:
    """A map that went through the store is equal to itself."""
    group = admit_all(record("w1", 0, 4), record("w2", 4, 4))
    assert membership.decode(membership.encode(group)) == group


steps = st.lists(
    st.tuples(
        st.sampled_from(["register", "die"]),
        st.sampled_from(["w1", "w2", "w3", "w4"]),
        st.integers(0, 7),
        st.integers(1, 4),
        st.sampled_from([16, 16, 16, 32]),
    ),
    max_size=40,
)


@given(steps)
def test_no_sequence_admits_an_overlap(steps: list[tuple[str, str, int, int, int]]) -> None:
    """Whatever registers and dies, live workers never overlap, agree on the block size, and are all in the map."""
    group: Group | None = None
    live: dict[str, Record] = {}
    for epoch, (action, worker_id, start, size, block_size) in enumerate(steps, start=1):
        if action == "die":
            live.pop(worker_id, None)
            continue
        new = record(worker_id, start, size, epoch=epoch, block_size=block_size, data_parallel_size=12)
        rivals = membership.rivals(group, new) if group else []
        dead = {r for r in rivals if r.worker_id not in live or live[r.worker_id].epoch != r.epoch}
        expected_refusal = any(
            other.window.overlaps(new.window) or other.block_size != block_size
            for other in live.values()
            if other.worker_id != worker_id
        )
        try:
            group = membership.admit(group, new, dead)
        except RankwayError:
            assert expected_refusal
            continue
        assert not expected_refusal
        live[worker_id] = new
        for a, b in itertools.combinations(live.values(), 2):
            assert not a.window.overlaps(b.window)
            assert a.block_size == b.block_size
        assert all(group.claims[w].window == r.window and group.claims[w].epoch == r.epoch for w, r in live.items())
