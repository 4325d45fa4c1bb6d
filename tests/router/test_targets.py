"""Slots of targets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankway.ranks import GlobalRank, Instance, Target
from rankway.router.targets import Holder, Targets

T0, T1 = Target("w1", GlobalRank(0)), Target("w1", GlobalRank(1))


def test_a_target_keeps_its_slot_while_anybody_holds_it() -> None:
    """The fleet and the index name the same target by one slot, whoever comes first, until both have dropped it."""
    targets = Targets()
    slot = targets.hold(T0, 1, Holder.INDEX)
    assert targets.hold(T0, 1, Holder.FLEET) == slot
    assert not targets.drop(slot, Holder.INDEX)
    assert targets.find(T0, 1) == slot
    assert targets.drop(slot, Holder.FLEET)
    assert targets.find(T0, 1) is None
    assert targets.place(slot) is None


def test_a_new_epoch_is_another_slot() -> None:
    """What was counted for a worker's old life can't reach its new one."""
    targets = Targets()
    old = targets.hold(T0, 1, Holder.FLEET)
    new = targets.hold(T0, 2, Holder.FLEET)
    assert old != new
    assert targets.slots(Instance("w1", 1)) == {0: old}
    assert targets.slots(Instance("w1", 2)) == {0: new}


def test_the_lowest_free_slot_is_reused_first() -> None:
    """Tables by slot stay dense."""
    targets = Targets()
    slots = [targets.hold(Target("w", GlobalRank(rank)), 1, Holder.FLEET) for rank in range(5)]
    for slot in (3, 1):
        targets.drop(slots[slot], Holder.FLEET)
    assert targets.hold(T1, 9, Holder.FLEET) == 1
    assert len(targets) == 5


def test_dropping_a_free_slot_changes_nothing() -> None:
    """A second drop is harmless."""
    targets = Targets()
    slot = targets.hold(T0, 1, Holder.FLEET)
    assert targets.drop(slot, Holder.FLEET)
    assert targets.drop(slot, Holder.INDEX)
    assert targets.held(Holder.FLEET) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.sampled_from(list(Holder)), st.booleans()), max_size=60))
def test_no_two_targets_share_a_slot(steps: list[tuple[int, int, Holder, bool]]) -> None:
    """After any sequence of holds and drops, living targets and slots map one to one."""
    targets = Targets()
    held: dict[tuple[int, int], Holder] = {}
    for rank, epoch, holder, hold in steps:
        target = Target("w", GlobalRank(rank))
        if hold:
            targets.hold(target, epoch, holder)
            held[rank, epoch] = held.get((rank, epoch), Holder(0)) | holder
        elif (slot := targets.find(target, epoch)) is not None:
            held[rank, epoch] &= ~holder
            assert targets.drop(slot, holder) == (not held[rank, epoch])
    living = {key for key, holders in held.items() if holders}
    slots = {key: targets.find(Target("w", GlobalRank(key[0])), key[1]) for key in living}
    assert None not in slots.values()
    assert len(set(slots.values())) == len(living)
    for (rank, epoch), slot in slots.items():
        place = targets.place(slot if slot is not None else -1)
        assert place is not None
        assert (place.target.dp_rank, place.epoch) == (rank, epoch)
