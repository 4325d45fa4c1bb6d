"""vLLM's events, sequence numbers, flags, loads and parameters, without vLLM."""

from __future__ import annotations

import contextlib
from array import array
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankway.errors import InvalidField, Mismatch
from rankway.ranks import DpRange, LocalRank
from rankway.sampling import Sampling
from rankway.worker.engine import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent, EngineRequest
from rankway.worker.vllm_events import ClearFence, Continuity, EventDecoder, MalformedBatch, Verdict
from rankway.worker.vllm_flags import Assigned, DpConfig, DpFlags, group_flags, placement
from rankway.worker.vllm_loads import RankLoads
from rankway.worker.vllm_sampling import sampling_arguments, to_logprobs

STORED = BlockStored([11, 12], 10, [1, 2, 3, 4], 2, lora_name="sql", extra_keys=[["sql"], None])


def payload(*events: Any, ts: float = 5.0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), 0])


def stored_map(**fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": 10,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": 1,
        "medium": "GPU",
        "lora_name": "sql",
        "extra_keys": [["sql"], None],
        **fields,
    }


class TestDecoder:
    def test_maps_with_a_type_key_decode(self) -> None:
        """Events of today's releases are maps; keys that we don't know are ignored."""
        events = EventDecoder().decode(
            3, payload(stored_map(session_id="s"), {"type": "BlockRemoved", "block_hashes": [11]}, {"type": "AllBlocksCleared"})
        )
        assert (events.seq, events.ts) == (3, 5.0)
        assert list(events.events) == [STORED, BlockRemoved([11]), AllBlocksCleared()]

    def test_arrays_decode_to_the_same(self) -> None:
        """Events of older releases are arrays that begin with their type; trailing fields may be missing."""
        stored = ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, 1, "GPU", "sql", [["sql"], None]]
        events = EventDecoder().decode(0, payload(stored, ["BlockRemoved", [11]], ["AllBlocksCleared"])).events
        assert list(events) == [STORED, BlockRemoved([11]), AllBlocksCleared()]

    def test_the_oldest_arrays_have_no_lora_name(self) -> None:
        """A release that knew no lora_name still gives tokens, parent and hashes."""
        (event,) = EventDecoder().decode(0, payload(["BlockStored", [7], None, [1, 2], 2, None, "GPU"])).events
        assert event == BlockStored([7], None, [1, 2], 2)

    def test_hashes_may_be_bytes(self) -> None:
        """vLLM can be told to publish whole hashes instead of 64-bit numbers."""
        (event,) = EventDecoder().decode(0, payload(stored_map(block_hashes=[b"a" * 32, b"b" * 32]))).events
        assert isinstance(event, BlockStored)
        assert event.block_hashes == [b"a" * 32, b"b" * 32]

    @pytest.mark.parametrize("fields", [{"medium": "CPU"}, {"medium": "STORAGE"}, {"locality": "REMOTE"}])
    def test_other_tiers_are_left_out(self, fields: dict[str, Any]) -> None:
        """A block on a CPU, on storage or elsewhere is not one that this rank's GPU holds."""
        decoder = EventDecoder()
        assert list(decoder.decode(0, payload(stored_map(**fields))).events) == []
        assert decoder.counts.other_tiers == 1

    def test_only_full_attention_counts(self) -> None:
        """Of a hybrid model's groups only the full-attention one says that the prefix is cached, in removals too."""
        decoder = EventDecoder()
        batch = decoder.decode(
            0,
            payload(
                stored_map(group_idx=0, kv_cache_spec_kind="sliding_window"),
                stored_map(group_idx=1, kv_cache_spec_kind="full_attention"),
                {"type": "BlockRemoved", "block_hashes": [11], "group_idx": 0},
                {"type": "BlockRemoved", "block_hashes": [12], "group_idx": 1},
            ),
        )
        assert list(batch.events) == [STORED, BlockRemoved([12])]
        assert decoder.counts.other_groups == 2

    def test_a_second_full_attention_group_is_not_a_second_copy(self) -> None:
        """Two full-attention groups announce each block twice; it counts once."""
        events = [stored_map(group_idx=group, kv_cache_spec_kind="full_attention") for group in (0, 1)]
        assert list(EventDecoder().decode(0, payload(*events)).events) == [STORED]

    def test_unknown_events_are_counted_and_skipped(self) -> None:
        """A type that a later release adds doesn't stop the rest."""
        decoder = EventDecoder()
        assert list(decoder.decode(0, payload({"type": "BlockPinned"}, stored_map())).events) == [STORED]
        assert decoder.counts.unknown_types == 1

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"\xc1",
            msgspec.msgpack.encode(7),
            msgspec.msgpack.encode([1.0]),
            payload({"type": "BlockStored"}),
            payload({}),
            payload(3),
        ],
    )
    def test_what_is_no_batch_is_refused(self, raw: bytes) -> None:
        """A payload that can't be read is an error, never an empty batch."""
        with pytest.raises(MalformedBatch):
            EventDecoder().decode(0, raw)

    @given(st.binary(max_size=64))
    def test_no_payload_breaks_it(self, raw: bytes) -> None:
        """Any bytes either decode or raise MalformedBatch."""
        with contextlib.suppress(MalformedBatch):
            EventDecoder().decode(0, raw)


class TestContinuity:
    def test_in_order(self) -> None:
        """seq begins at 0 and each batch follows the last."""
        continuity = Continuity()
        for seq in range(3):
            assert continuity.judge(seq, 1.0 + seq) is Verdict.NEXT
            continuity.applied(seq, 1.0 + seq)

    def test_a_hole_is_a_gap(self) -> None:
        """A batch that doesn't follow the last one isn't applied before the missing ones."""
        assert Continuity().judge(1, 1.0) is Verdict.GAP

    def test_an_overlap_is_seen(self) -> None:
        """What a replay brought already comes again on the live stream, and is dropped."""
        continuity = Continuity()
        for seq in range(5):
            continuity.applied(seq, 10.0 + seq)
        assert continuity.judge(3, 13.0) is Verdict.SEEN

    def test_a_younger_step_back_is_a_restart(self) -> None:
        """seq has no epoch: a smaller seq with a later time comes from a publisher that began anew."""
        continuity = Continuity()
        for seq in range(5):
            continuity.applied(seq, 10.0 + seq)
        assert continuity.judge(0, 15.0) is Verdict.RESTARTED

    def test_a_batch_that_cannot_be_read_is_not_waited_for(self) -> None:
        """The batch after an unreadable one follows."""
        continuity = Continuity()
        continuity.skip(0)
        assert continuity.judge(1, 1.0) is Verdict.NEXT

    @given(st.lists(st.integers(0, 20), max_size=60))
    def test_each_batch_is_applied_once_and_in_order(self, arrivals: list[int]) -> None:
        """Whatever arrives in whatever order and number, what is applied is 0, 1, 2 … without repeats."""
        continuity = Continuity()
        applied = []
        for seq in arrivals:
            if continuity.judge(seq, float(seq)) is Verdict.NEXT:
                continuity.applied(seq, float(seq))
                applied.append(seq)
        assert applied == list(range(len(applied)))


class TestClearFence:
    OLD, NEW, CLEARED = BlockRemoved([1]), BlockRemoved([2]), AllBlocksCleared()

    def test_events_pass_while_nothing_is_reset(self) -> None:
        """Without a reset of ours everything passes, vLLM's own clears too."""
        assert ClearFence().filter([self.OLD, self.CLEARED, self.NEW]) == [self.OLD, self.CLEARED, self.NEW]

    def test_the_past_is_dropped_up_to_vllms_own_clear(self) -> None:
        """After a reset, late news of the time before is dropped and news after vLLM's announcement counts."""
        fence = ClearFence()
        fence.hold()
        assert fence.release(cleared=True) == []
        assert fence.filter([self.OLD]) == []
        assert fence.filter([self.OLD, self.CLEARED, self.NEW]) == [self.NEW]
        assert fence.filter([self.OLD]) == [self.OLD]

    def test_news_that_overtakes_the_answer_is_kept(self) -> None:
        """vLLM's announcement and blocks stored since may arrive before the answer to the reset: they count after it."""
        fence = ClearFence()
        fence.hold()
        assert fence.filter([self.OLD, self.CLEARED, self.NEW]) == []
        assert fence.release(cleared=True) == [self.NEW]
        assert fence.filter([self.NEW]) == [self.NEW]

    def test_a_refused_reset_loses_nothing(self) -> None:
        """If vLLM refuses, all that was kept back is delivered in order."""
        fence = ClearFence()
        fence.hold()
        fence.filter([self.OLD])
        fence.filter([self.NEW])
        assert fence.release(cleared=False) == [self.OLD, self.NEW]

    def test_two_resets_wait_for_two_clears(self) -> None:
        """Resets of an idle engine pile up; all their announcements come with its next step."""
        fence = ClearFence()
        for _ in range(2):
            fence.hold()
            fence.release(cleared=True)
        assert fence.filter([self.CLEARED, self.CLEARED, self.NEW]) == [self.NEW]

    @given(st.lists(st.lists(st.sampled_from([OLD, NEW]), max_size=3), max_size=6), st.integers(0, 6))
    def test_where_the_answer_comes_does_not_matter(self, after: list[list[EngineEvent]], answer_at: int) -> None:
        """However late the answer is, exactly the events after vLLM's own clear are delivered, in order."""
        fence = ClearFence()
        fence.hold()
        delivered: list[EngineEvent] = []
        for position, events in enumerate([[self.OLD, self.CLEARED], *after]):
            if position == answer_at:
                delivered += fence.release(cleared=True)
            delivered += fence.filter(events)
        if answer_at > len(after):
            delivered += fence.release(cleared=True)
        assert delivered == [event for events in after for event in events]


def config(size: int, local: int, rank: int = 0, *, hybrid: bool = False, external: bool = False) -> DpConfig:
    return DpConfig(size, local, rank, hybrid, external)


class TestPlacement:
    @pytest.mark.parametrize(
        ("flags", "after", "assigned", "window", "size", "balancing"),
        [
            (DpFlags(8, 4, 4, hybrid_lb=True), config(8, 4, 4, hybrid=True), Assigned(), DpRange(4, 4), 8, "hybrid"),
            (DpFlags(8, 1, 5, hybrid_lb=True), config(8, 1, 5, external=True), Assigned(8, 5, 1), DpRange(5, 1), 8, "external"),
            (DpFlags(4, 4, hybrid_lb=True), config(4, 4), Assigned(), DpRange(0, 4), 4, "internal"),
            (DpFlags(4), config(4, 4), Assigned(4, 0, 4), DpRange(0, 4), 4, "internal"),
            (DpFlags(4, 2), config(4, 2), Assigned(), DpRange(0, 4), 4, "internal"),
            (DpFlags(), config(1, 1), Assigned(), DpRange(0, 1), 1, "independent"),
            (DpFlags(), config(1, 1), Assigned(8, 6, 1), DpRange(6, 1), 8, "independent"),
        ],
    )
    def test_the_window_is_that_of_the_normalised_config(
        self, flags: DpFlags, after: DpConfig, assigned: Assigned, window: DpRange, size: int, balancing: str
    ) -> None:
        """What vLLM made of the flags decides; a dense engine without DP flags takes the window that the operator assigns."""
        place = placement(flags, after, assigned)
        assert (place.window, place.data_parallel_size, place.balancing) == (window, size, balancing)

    @pytest.mark.parametrize(
        ("flags", "after", "assigned", "named"),
        [
            (DpFlags(8, None, 4), config(8, 8), Assigned(), "--data-parallel-start-rank=4"),
            (DpFlags(8, 4, 6, hybrid_lb=True), config(8, 4, 6, hybrid=True), Assigned(), "pass --data-parallel-size 8"),
            (DpFlags(4, 4, 2), config(4, 4, 2), Assigned(), "starts at rank 0"),
            (DpFlags(1, None, None, 3), config(1, 1), Assigned(), "--data-parallel-rank=3"),
            (DpFlags(), config(1, 1), Assigned(8, 4, 4), "--data-parallel-hybrid-lb"),
            (DpFlags(), config(1, 1), Assigned(4, 4, 1), "passes data_parallel_size=4"),
        ],
    )
    def test_what_vllm_would_drop_is_refused(self, flags: DpFlags, after: DpConfig, assigned: Assigned, named: str) -> None:
        """A flag without effect, or a window past the end of the group, is an error that names it."""
        with pytest.raises(InvalidField, match=named):
            placement(flags, after, assigned)

    @pytest.mark.parametrize("assigned", [Assigned(4, 4, 4), Assigned(8, 0, 4), Assigned(8, 4, 2)])
    def test_two_opinions_about_the_window_are_refused(self, assigned: Assigned) -> None:
        """Rankway's own window options must say what vLLM's configuration says, and the message names both."""
        with pytest.raises(Mismatch, match=r"\[4, 8\) of 8"):
            placement(DpFlags(8, 4, 4, hybrid_lb=True), config(8, 4, 4, hybrid=True), assigned)

    def test_who_is_waited_for(self) -> None:
        """A hybrid or external engine waits for the others of its group; the message says which."""
        later = placement(DpFlags(8, 4, 4, hybrid_lb=True), config(8, 4, 4, hybrid=True), Assigned())
        first = placement(DpFlags(8, 4, 0, hybrid_lb=True), config(8, 4, 0, hybrid=True), Assigned())
        alone = placement(DpFlags(4), config(4, 4), Assigned())
        assert "owns global rank 0" in later.waits_for
        assert "[4, 8)" in first.waits_for
        assert alone.waits_for == ""

    def test_a_window_becomes_flags(self) -> None:
        """Part of a group is hybrid LB, a whole one needs its size alone."""
        assert group_flags(4, DpRange(0, 4)) == ["--data-parallel-size=4"]
        assert "--data-parallel-start-rank=2" in group_flags(4, DpRange(2, 2))


class TestLoads:
    def test_reports_become_loads(self) -> None:
        """Usage becomes blocks of the rank; the queue time is the mean since the last look."""
        loads = RankLoads(2)
        loads.blocks_per_rank = 100
        for _ in range(9):
            loads.began(LocalRank(1), 10)
        loads.reported(LocalRank(1), 3, 4, 2, 0.25)
        loads.iterated(LocalRank(1), 2, [0.1, 0.3])
        load = loads.now()[1]
        assert (load.running, load.waiting, load.deferred, load.used_blocks, load.preemptions) == (3, 4, 2, 25, 2)
        assert load.queue_time_ms == pytest.approx(200)
        assert load.prefill_tokens == 90
        assert loads.now()[1].queue_time_ms == 0

    def test_an_idle_engine_has_no_load(self) -> None:
        """After an abort vLLM takes no step and its last report stands: what is over caps it."""
        loads = RankLoads(1)
        loads.blocks_per_rank = 100
        loads.began(LocalRank(0), 10)
        loads.reported(LocalRank(0), 1, 0, 0, 0.5)
        loads.prefilled(LocalRank(0), 10)
        loads.ended(LocalRank(0))
        load = loads.now()[0]
        assert (load.running, load.used_blocks, load.prefill_tokens) == (0, 0, 0)

    def test_a_request_without_a_rank_may_run_anywhere(self) -> None:
        """Where vLLM chose the rank, each rank's report may count it."""
        loads = RankLoads(2)
        loads.began(None, 10)
        loads.reported(LocalRank(1), 1, 0, 0, 0.0)
        assert [load.running for load in loads.now()] == [0, 1]


@dataclass
class FakeLogprob:
    logprob: float
    rank: int | None


def request(sampling: Sampling, resumed: list[int] | None = None) -> EngineRequest:
    tokens = array("I", [1, 2, 3, *(resumed or [])])
    return EngineRequest("r", tokens, 3, sampling, LocalRank(0), emit=lambda _output: None)


class TestSampling:
    def test_parameters_keep_their_meaning(self) -> None:
        """OpenAI's names go over as they are; text is the worker's business."""
        given_ = Sampling(
            max_tokens=7, temperature=0.5, top_p=0.9, top_k=-1, seed=3, logprobs=2, stop=("x",), logit_bias={4: 1.5}
        )
        arguments = sampling_arguments(request(given_))
        assert arguments["max_tokens"] == 7
        assert arguments["top_k"] == 0
        assert (arguments["temperature"], arguments["seed"], arguments["logprobs"], arguments["logit_bias"]) == (
            0.5,
            3,
            2,
            {4: 1.5},
        )
        assert arguments["detokenize"] is False
        assert "stop" not in arguments

    def test_resumed_tokens_shrink_the_limits(self) -> None:
        """max_tokens and min_tokens count from the end of the client's prompt."""
        arguments = sampling_arguments(request(Sampling(max_tokens=10, min_tokens=4), [8, 8, 9]))
        assert (arguments["max_tokens"], arguments["min_tokens"]) == (7, 1)

    def test_resumed_tokens_keep_their_penalties(self) -> None:
        """vLLM takes resumed tokens for prompt: their presence and frequency penalties become biases."""
        sampling = Sampling(max_tokens=10, presence_penalty=1.0, frequency_penalty=0.5, logit_bias={8: 3.0})
        assert sampling_arguments(request(sampling, [8, 8, 9]))["logit_bias"] == {8: 3.0 - 2.0, 9: -1.5}

    def test_a_resumed_seed_does_not_repeat_itself(self) -> None:
        """The draws after a move aren't those of the beginning, and are the same each time."""
        first = sampling_arguments(request(Sampling(max_tokens=9, seed=5)))["seed"]
        moved = [sampling_arguments(request(Sampling(max_tokens=9, seed=5), [8, 9]))["seed"] for _ in range(2)]
        assert moved[0] == moved[1] != first

    def test_logprobs_are_best_first(self) -> None:
        """The sampled token's own, and as many of the likeliest as were asked for."""
        positions = [{5: FakeLogprob(-3.0, 9), 6: FakeLogprob(-0.1, 1), 7: FakeLogprob(-0.5, 2)}]
        (entry,) = to_logprobs([5], positions, 2)
        assert (entry.token_id, entry.logprob, entry.top) == (5, -3.0, ((6, -0.1), (7, -0.5)))
        assert to_logprobs([5], positions, None) == []
