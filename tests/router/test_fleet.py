"""The fleet: records by event, names, pins."""

from __future__ import annotations

import pytest
from harness.fleet import a_record
from hypothesis import given
from hypothesis import strategies as st

from rankway.errors import NotFound, RankOutOfRange, Unavailable, UnknownModel
from rankway.ranks import Instance
from rankway.registry.records import Gone, Put, Record, Snapshot, State
from rankway.router.fleet import Fleet


def a_fleet(*records: Record) -> Fleet:
    fleet = Fleet()
    fleet.apply(Snapshot(records))
    return fleet


def test_events_change_the_fleet() -> None:
    """A snapshot replaces, a put adds or updates, a gone removes; each says what changed."""
    w1, w2 = a_record("w1"), a_record("w2", 4)
    fleet = Fleet()
    assert fleet.apply(Snapshot((w1,))).joined == (w1,)
    assert fleet.apply(Put(w2)).joined == (w2,)
    assert not fleet.apply(Put(w2))
    draining = a_record("w2", 4, state=State.DRAINING)
    assert fleet.apply(Put(draining)).updated == (draining,)
    assert fleet.apply(Gone(Instance("w1", 1))).left == (w1,)
    assert not fleet.apply(Gone(Instance("w1", 1)))
    change = fleet.apply(Snapshot((w1,)))
    assert (change.joined, change.left) == ((w1,), (draining,))


def test_a_new_epoch_replaces_the_old_one_and_never_the_other_way() -> None:
    """A put of a newer epoch is a leave and a join; one of an older epoch, or its end, is nothing."""
    old, new = a_record("w1"), a_record("w1", epoch=2)
    fleet = a_fleet(old)
    change = fleet.apply(Put(new))
    assert (change.joined, change.left) == ((new,), (old,))
    assert not fleet.apply(Put(old))
    assert not fleet.apply(Gone(Instance("w1", 1)))
    assert fleet.record(Instance("w1", 2)) == new
    assert fleet.record(Instance("w1", 1)) is None


@given(st.lists(st.tuples(st.sampled_from(["put", "gone", "snapshot"]), st.integers(0, 2), st.integers(1, 3)), max_size=30))
def test_changes_add_up_to_the_fleet(steps: list[tuple[str, int, int]]) -> None:
    """Whoever follows the changes has the same members as the fleet."""
    fleet = Fleet()
    members: set[Instance] = set()
    for kind, worker, epoch in steps:
        record = a_record(f"w{worker}", epoch=epoch)
        event = {"put": Put(record), "gone": Gone(record.instance), "snapshot": Snapshot((record,))}[kind]
        change = fleet.apply(event)
        for left in change.left:
            members.remove(left.instance)
        for joined in change.joined:
            assert joined.instance not in members
            members.add(joined.instance)
    assert members == {record.instance for record in fleet.records.values()}


def test_names_of_models() -> None:
    """Canonical name, alias and adapter resolve; empty is the only model there is."""
    fleet = a_fleet(a_record("w1", model_aliases=("alias",), lora_adapters=("ada",), max_model_len=2048), a_record("w2", 4))
    card = fleet.resolve("", "")
    assert (card.model, card.lora, card.max_model_len, card.vocab_size, card.tokenizer) == ("m", "", 2048, 512, "bytes")
    assert fleet.resolve("alias", "").model == "m"
    assert fleet.resolve("ada", "").lora == "ada"
    with pytest.raises(UnknownModel, match=r"nope.*ada, alias, m"):
        fleet.resolve("nope", "")
    with pytest.raises(NotFound, match=r"dp_group='x'.*g"):
        fleet.resolve("m", "x")
    with pytest.raises(Unavailable):
        Fleet().resolve("m", "")


def test_an_empty_name_among_several_models_is_refused_with_their_names() -> None:
    """With two models the client must say which."""
    fleet = a_fleet(a_record("w1"), a_record("w2", dp_group="h", model="other"))
    with pytest.raises(UnknownModel, match="m, other"):
        fleet.resolve("", "")
    assert fleet.resolve("", "h").model == "other"


def test_an_adapter_counts_only_where_it_is() -> None:
    """Limits of an adapter are those of the workers that have it."""
    fleet = a_fleet(a_record("w1", lora_adapters=("ada",), max_model_len=1000), a_record("w2", 4, max_model_len=500))
    assert fleet.resolve("ada", "").max_model_len == 1000
    assert fleet.resolve("m", "").max_model_len == 500
    assert [record.worker_id for record in fleet.serving("m", "ada")] == ["w1"]


def test_served_models_name_everything_once_canonical_first() -> None:
    """/v1/models: canonical names, then aliases, then adapters."""
    fleet = a_fleet(a_record("w1", model_aliases=("b",), lora_adapters=("a",)), a_record("w2", 4, model_aliases=("b",)))
    assert [(served.name, served.model, served.is_lora) for served in fleet.served_models()] == [
        ("m", "m", False),
        ("b", "m", False),
        ("a", "m", True),
    ]


def test_pins_are_checked_against_what_is_there() -> None:
    """Unknown worker, wrong model, ranks outside window or group: each says what there is."""
    fleet = a_fleet(a_record("w1"), a_record("w2", 4), a_record("w3", dp_group="h", model="other"))
    card = fleet.resolve("m", "")
    fleet.check_pin(card, "", "w1", None)
    fleet.check_pin(card, "", "w2", 7)
    fleet.check_pin(card, "", "", 0)
    with pytest.raises(NotFound, match=r"worker_id='w9'.*w1, w2, w3"):
        fleet.check_pin(card, "", "w9", None)
    with pytest.raises(NotFound, match=r"w3.*doesn't serve model 'm'"):
        fleet.check_pin(card, "", "w3", None)
    with pytest.raises(RankOutOfRange, match=r"dp_rank=3: worker w2 owns the global ranks \[4, 8\)"):
        fleet.check_pin(card, "", "w2", 3)
    with pytest.raises(RankOutOfRange, match=r"dp_rank=8: DP group g owns the global ranks \[0, 8\)"):
        fleet.check_pin(card, "", "", 8)


def test_a_rank_whose_worker_is_gone_is_unavailable_not_out_of_range() -> None:
    """A rank of the group that nobody owns now may come back."""
    fleet = a_fleet(a_record("w1"))
    with pytest.raises(Unavailable, match=r"dp_rank=5.*\[0, 4\)"):
        fleet.check_pin(fleet.resolve("m", ""), "", "", 5)
