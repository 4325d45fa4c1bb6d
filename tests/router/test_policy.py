"""The choice: the design's own pair, who is eligible, full targets, ties, logs."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from dataclasses import replace

import pytest
import structlog
from harness.fleet import Parts, a_prompt, a_record
from hypothesis import given
from hypothesis import strategies as st

from rankway.choice import Weights
from rankway.errors import Overloaded, Unavailable
from rankway.ranks import Instance
from rankway.registry.records import Gone, Put, State
from rankway.router.eligibility import Query
from rankway.router.ledger import RecentTerm, SlotLimits
from rankway.router.policy import Decision, PolicySettings

ANY = Query("m")


def two_workers(**settings: object) -> Parts:
    """w1 owns ranks 0-3, w2 ranks 4-7."""
    parts = Parts(PolicySettings(**settings))  # type: ignore[arg-type]
    parts.join(a_record("w1", 0, 4))
    parts.join(a_record("w2", 4, 4))
    return parts


def decide(parts: Parts, query: Query = ANY, prompt: object = 196, seed: int = 1, **fields: object) -> Decision:
    return parts.policy.decide(query, a_prompt(prompt, **fields), 0.0, seed)  # type: ignore[arg-type]


def book(parts: Parts, decision: Decision, name: str = "b") -> None:
    """Book a decision, and let its blocks be cached."""
    parts.ledger.book(name, decision.slot, decision.prompt_tokens, decision.prefill_tokens, decision.hashes, 0.0)


def log_to(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """Have the policy's lines of this level captured: a logger of its own, since the other keeps the stream it began with."""
    logger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )
    monkeypatch.setattr("rankway.router.policy.log", logger)
    monkeypatch.setattr("rankway.logs._threshold", getattr(logging, level.upper()))


def test_the_designs_pair() -> None:
    """196 tokens, block size 16, idle: 24.250 everywhere; the repeat costs 12.250 where it was and 24.250 elsewhere."""
    parts = two_workers()
    first = decide(parts)
    assert (first.cost, first.overlap_blocks) == (24.25, 0)
    parts.index.store(first.slot, first.hashes)
    again = decide(parts, seed=2)
    assert (again.slot, again.cost, again.overlap_blocks, again.prefill_tokens) == (first.slot, 12.25, 12, 4)
    section = parts.eligibility.sections(ANY)[0]
    costs = {term.slot: term.cost for term in parts.policy.terms(section, again.hashes, 196)}
    assert len(costs) == 8
    assert costs.pop(first.slot) == 12.25
    assert set(costs.values()) == {24.25}


def test_the_log_lines_have_the_designs_shape(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One Formula line per candidate at debug and one Selected line at info, the fields also as keys."""
    log_to(capsys, monkeypatch, "debug")
    parts = two_workers()
    slot = parts.slot("w2", 6)
    hashes = decide(parts).hashes
    parts.index.store(slot, hashes)
    parts.index.store(slot, [1, 2])
    capsys.readouterr()
    decide(parts)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    formulas = [line for line in lines if line["event"].startswith("Formula")]
    assert len(formulas) == 8
    assert formulas[6]["event"] == (
        "Formula for worker_id=w2 dp_rank=6 with 12 cached blocks: "
        "12.250 = 1.0 * prefill_blocks + decode_blocks = 1.0 * 0.250 + 12.000"
    )
    assert {key: formulas[6][key] for key in ("worker_id", "dp_rank", "cached_blocks", "cost", "prefill_blocks")} == {
        "worker_id": "w2",
        "dp_rank": 6,
        "cached_blocks": 12,
        "cost": 12.25,
        "prefill_blocks": 0.25,
    }
    selected = lines[-1]
    assert selected["event"] == (
        "Selected worker: worker_id=w2 dp_rank=6, logit: 12.250, cached blocks: 12, tree size: 14, total blocks: 158788"
    )
    assert (selected["level"], selected["tree_size"], selected["total_blocks"]) == ("info", 14, 158788)


def test_formulas_are_computed_only_when_they_are_logged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At info level no candidate's terms are computed."""
    parts = two_workers()
    log_to(capsys, monkeypatch, "info")
    monkeypatch.setattr(parts.policy, "terms", lambda *_: pytest.fail("computed"))
    decide(parts)
    assert "Selected worker" in capsys.readouterr().err


def test_ties_go_to_the_smallest_tree_then_at_random() -> None:
    """Equal costs: the target with the fewest blocks; among those every one gets its share."""
    parts = two_workers()
    for rank in range(6):
        parts.index.store(parts.slot("w1" if rank < 4 else "w2", rank), [1000 + rank])
    picked = Counter(decide(parts, seed=seed).slot for seed in range(200))
    assert set(picked) == {parts.slot("w2", 6), parts.slot("w2", 7)}
    assert min(picked.values()) > 60


def test_a_burst_spreads_before_any_report() -> None:
    """What was sent counts at once: 16 equal requests on 8 ranks are at most 2 more on one than on another."""
    parts = two_workers()
    for i in range(16):
        prompt = list(range(1000 * i, 1000 * i + 64))
        book(parts, decide(parts, prompt=prompt, seed=i), f"b{i}")
    assert set(Counter(booking.slot for booking in parts.ledger.bookings()).values()) == {2}


def test_paced_requests_spread_by_the_recent_term() -> None:
    """Requests that come one by one don't pile onto the rank with the smallest tree when the recent term is on."""
    parts = Parts(recent=RecentTerm(weight=1.0, half_life_s=10.0))
    parts.join(a_record("w1", 0, 4))
    for rank in range(1, 4):
        parts.index.store(parts.slot("w1", rank), [rank])
    slots = []
    for i in range(4):
        decision = decide(parts, prompt=list(range(1000 * i, 1000 * i + 64)))
        slots.append(decision.slot)
        booking = parts.ledger.book(f"b{i}", decision.slot, 64, 64, decision.hashes, 0.0)
        parts.ledger.end(booking)
    assert sorted(slots) == [parts.slot("w1", rank) for rank in range(4)]


def test_liveness_comes_before_the_best_prefix() -> None:
    """A worker that doesn't answer isn't chosen, whatever it holds."""
    parts = two_workers()
    slot = parts.slot("w1", 2)
    parts.index.store(slot, decide(parts).hashes)
    assert decide(parts).slot == slot
    parts.eligibility.disconnect(Instance("w1", 1))
    assert decide(parts).place.target.worker_id == "w2"
    parts.eligibility.connect(Instance("w1", 1))
    assert decide(parts).slot == slot


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": State.DRAINING}, "worker is DRAINING"),
        ({"state": State.STARTING}, "worker is STARTING"),
        ({"draining_ranks": (0, 1, 2, 3)}, "rank drains"),
    ],
)
def test_who_is_not_ready_isnt_chosen(change: dict[str, object], reason: str) -> None:
    """Starting and draining workers and draining ranks get nothing; alone, they make the request UNAVAILABLE, in words."""
    parts = Parts()
    parts.join(replace(a_record("w1", 0, 4), **change))  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match=reason):
        decide(parts)
    parts.join(a_record("w2", 4, 4))
    assert decide(parts).place.target.worker_id == "w2"


def test_a_draining_rank_is_left_out_alone() -> None:
    """A drain of one rank leaves the worker's others."""
    parts = Parts()
    parts.join(a_record("w1", 0, 2, draining_ranks=(1,)))
    assert {decide(parts, seed=seed).place.target.dp_rank for seed in range(20)} == {0}


def test_pins() -> None:
    """A worker without a rank: its best rank; a rank without a worker: that rank; both: exactly there; 0 is a rank."""
    parts = two_workers()
    parts.index.store(parts.slot("w2", 5), decide(parts).hashes)
    assert decide(parts).place.target.dp_rank == 5
    assert decide(parts, Query("m", worker_id="w1")).place.target.worker_id == "w1"
    assert decide(parts, Query("m", worker_id="w2")).place.target.dp_rank == 5
    for rank in range(8):
        assert decide(parts, Query("m", dp_rank=rank)).place.target.dp_rank == rank
    assert decide(parts, Query("m", worker_id="w1", dp_rank=0)).slot == parts.slot("w1", 0)


def test_a_target_that_failed_the_request_is_left_out() -> None:
    """The next attempt goes elsewhere."""
    parts = two_workers()
    tried = decide(parts).place
    assert all(decide(parts, replace(ANY, excluded=(tried,)), seed=seed).place != tried for seed in range(30))


def test_a_worker_set_aside_is_used_only_when_nobody_else_is_there() -> None:
    """After a failure others come first; alone, it is better than nobody."""
    parts = two_workers()
    parts.eligibility.set_aside(Instance("w1", 1), 5.0)
    assert {decide(parts, seed=seed).place.target.worker_id for seed in range(20)} == {"w2"}
    parts.eligibility.set_aside(Instance("w2", 1), 5.0)
    assert {decide(parts, seed=seed).place.target.worker_id for seed in range(30)} == {"w1", "w2"}
    parts.eligibility.expire(5.0)
    assert len(parts.eligibility.all_eligible()) == 8


def test_an_unknown_index_scores_by_load_alone() -> None:
    """A rank whose index is unknown has no overlap, whatever the index says."""
    parts = two_workers()
    slot = parts.slot("w1", 0)
    hashes = decide(parts).hashes
    parts.index.store(slot, hashes)
    parts.ledger.loads.known[slot] = 0
    assert decide(parts, Query("m", dp_rank=0)).overlap_blocks == 0


def test_a_prompt_that_is_held_whole_still_prefills_its_last_token() -> None:
    """192 tokens in 12 cached blocks count 11: the engine computes the last token again."""
    parts = two_workers()
    slot = parts.slot("w1", 0)
    parts.index.store(slot, decide(parts, prompt=192).hashes)
    decision = decide(parts, prompt=192)
    assert (decision.slot, decision.overlap_blocks, decision.prefill_tokens) == (slot, 11, 16)


def test_models_adapters_salts_and_groups_are_kept_apart() -> None:
    """Only who serves the model, adapter and group is eligible; each has hashes of its own."""
    parts = Parts()
    parts.join(a_record("w1", 0, 2, lora_adapters=("ada",)))
    parts.join(a_record("w2", 0, 2, dp_group="h", model="other"))
    parts.join(a_record("w3", 0, 2, dp_group="i"))
    assert {decide(parts, Query("m", "ada"), seed=s).place.target.worker_id for s in range(10)} == {"w1"}
    assert {decide(parts, Query("other"), seed=s).place.target.worker_id for s in range(10)} == {"w2"}
    assert {decide(parts, Query("m"), seed=s).place.target.worker_id for s in range(20)} == {"w1", "w3"}
    assert {decide(parts, Query("m", dp_group="i"), seed=s).place.target.worker_id for s in range(10)} == {"w3"}
    hashes = {
        decide(parts, Query("m", "ada")).hashes,
        decide(parts).hashes,
        decide(parts, cache_salt="s").hashes,
        decide(parts, Query("other")).hashes,
    }
    assert len(hashes) == 4
    with pytest.raises(Unavailable, match="no worker serves"):
        decide(parts, Query("m", "unheard"))


def test_groups_with_different_block_sizes_compare_in_tokens() -> None:
    """A warm target of another block size wins over a cold one, and each is hashed in its own size."""
    parts = Parts()
    parts.join(a_record("w1", 0, 1))
    parts.join(a_record("w2", 0, 1, dp_group="h", block_size=64))
    section = next(s for s in parts.eligibility.sections(ANY) if s.block_size == 64)
    parts.index.store(parts.slot("w2", 0), parts.policy.hashes(ANY, a_prompt(196), section.block_size))
    decision = decide(parts)
    assert (decision.place.target.worker_id, decision.block_size, decision.overlap_blocks) == ("w2", 64, 3)


def test_full_targets_are_left_out_until_all_are() -> None:
    """A target at its limits takes nothing while another has room; when all are full the request must wait."""
    parts = Parts()
    for i, worker in enumerate(("w1", "w2")):
        parts.join(a_record(worker, i, 1), limits=SlotLimits(requests=1))
    first = decide(parts, prompt=64)
    book(parts, first)
    second = decide(parts, prompt=64)
    assert second.slot != first.slot
    book(parts, second, "c")
    with pytest.raises(Overloaded):
        decide(parts, prompt=64)


def test_a_full_warm_target_keeps_its_requests_while_that_is_cheaper() -> None:
    """A request waits for the full rank that holds its prompt; time and those who wait too make moving cheaper."""
    parts = Parts(PolicySettings(hold_blocks_per_s=100))
    for i, worker in enumerate(("w1", "w2")):
        parts.join(a_record(worker, i, 1), limits=SlotLimits(requests=1))
    warm = parts.slot("w1", 0)
    hashes = parts.policy.hashes(ANY, a_prompt(1600), 16)
    parts.index.store(warm, hashes)
    parts.ledger.book("running", warm, 1600, 1600, hashes, 0.0)
    parts.ledger.prefilled(next(iter(parts.ledger.bookings())))
    held = decide(parts, prompt=1600)
    assert (held.slot, held.must_wait) == (warm, True)
    later = decide(parts, prompt=1600, waited_s=1.5)
    assert (later.slot, later.must_wait) == (parts.slot("w2", 1), False)
    parts.ledger.hold(warm, 150)
    crowded = decide(parts, prompt=1600)
    assert (crowded.slot, crowded.must_wait) == (parts.slot("w2", 1), False)
    parts.ledger.hold(warm, -150)
    assert not decide(parts, prompt=list(range(9000, 9064))).must_wait


def test_a_sessions_last_target_is_kept_unless_it_is_much_dearer() -> None:
    """Affinity holds within its slack, and only for a target that is eligible."""
    parts = two_workers(affinity_blocks=10)
    slot = parts.slot("w2", 7)
    parts.index.store(slot, [1, 2, 3])
    assert decide(parts, preferred=slot).slot == slot
    parts.ledger.book("b", slot, 160, 160, b"", 0.0)
    assert decide(parts, preferred=slot).slot == slot
    parts.ledger.book("c", slot, 160, 160, b"", 0.0)
    assert decide(parts, preferred=slot).slot != slot
    parts.eligibility.disconnect(Instance("w2", 1))
    assert decide(parts, preferred=slot).place.target.worker_id == "w1"


def test_round_robin_takes_turns() -> None:
    """Every eligible target in turn, whatever it holds; a pin is respected."""
    parts = two_workers(name="round_robin")
    parts.index.store(0, decide(parts).hashes)
    ranks = [int(decide(parts, seed=seed).place.target.dp_rank) for seed in range(16)]
    assert sorted(Counter(ranks).values()) == [2] * 8
    assert decide(parts, Query("m", dp_rank=3)).place.target.dp_rank == 3


def test_temperature_spreads_choices() -> None:
    """Above 0 dearer targets are chosen too, cheaper ones more often."""
    parts = two_workers(weights=Weights(temperature=0.5))
    slot = parts.slot("w1", 0)
    parts.index.store(slot, decide(parts).hashes)
    picked = Counter(decide(parts, seed=seed * 7919).slot for seed in range(500))
    assert len(picked) == 8
    assert picked.most_common(1)[0][0] == slot


def test_a_worker_that_leaves_is_gone_from_the_choice() -> None:
    """After Gone nobody is sent there; a new epoch of the same worker begins anew."""
    parts = two_workers()
    parts.fleet.apply(Gone(Instance("w1", 1)))
    parts.eligibility.forget(Instance("w1", 1))
    assert {decide(parts, seed=seed).place.target.worker_id for seed in range(20)} == {"w2"}
    parts.fleet.apply(Put(a_record("w1", 0, 4, epoch=2)))
    parts.eligibility.changed()
    assert {decide(parts, seed=seed).place.target.worker_id for seed in range(20)} == {"w2"}
    parts.join(a_record("w1", 0, 4, epoch=2))
    assert {decide(parts, seed=seed).place.epoch for seed in range(30)} == {1, 2}


@given(st.data())
def test_who_is_eligible_has_no_reason_against_it(data: st.DataObject) -> None:
    """Pins and failed attempts leave exactly those targets whose reason is empty, whoever is connected, drains or is new."""
    parts = Parts()
    for number in range(3):
        fields = {"draining_ranks": data.draw(st.sets(st.integers(2 * number, 2 * number + 1)).map(frozenset))}
        record = a_record(f"w{number}", 2 * number, 2, block_size=data.draw(st.sampled_from([16, 32])), **fields)
        parts.join(record, connected=data.draw(st.booleans()))
    everybody = parts.eligibility.members(ANY)
    places = [parts.targets.place(slot) for _, _, slot in everybody]
    excluded = data.draw(st.lists(st.sampled_from(places), max_size=3, unique=True))
    worker_id, dp_rank = data.draw(st.sampled_from(["", "w0", "w1", "gone"])), data.draw(st.none() | st.integers(0, 7))
    query = Query("m", "", "", worker_id, dp_rank, tuple(excluded))
    masks = [section.mask for section in parts.eligibility.sections(query)]
    eligible = {slot for mask in masks for slot, flag in enumerate(mask) if flag}
    assert eligible == {slot for record, rank, slot in everybody if not parts.eligibility.reason(record, rank, query)}
