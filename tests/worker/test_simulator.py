"""The simulated rank: vLLM's scheduling and caching rules, by example and by property."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from typing import Any

import pytest
from harness.worker_simulation import VOCABULARY, Drive, serve, sim_request, simulator, texts
from hypothesis import given
from hypothesis import strategies as st

from rankway.blocks import hash_chain, root_hash, unpack_hashes
from rankway.errors import InvalidField
from rankway.worker.engine import AllBlocksCleared, BlockRemoved, BlockStored, Finish
from rankway.worker.mirror import Mirror, MirrorCounts
from rankway.worker.simulator import SimConfig, Simulator


def test_output_is_words_of_exactly_max_tokens() -> None:
    """By default nothing but max_tokens ends the output, and a byte-level answer reads as text."""
    drive = serve(simulator(), sim_request("a", range(10), max_tokens=40))
    text = texts(drive.tokens("a"))
    assert len(text) == 40
    assert text.replace(" ", "").isalpha()
    assert drive.outputs["a"][-1].finish is Finish.LENGTH


def test_max_model_len_ends_the_output() -> None:
    """A request without max_tokens stops where prompt and output fill the model's length."""
    request = sim_request("a", range(90))
    request.sampling = type(request.sampling)(max_tokens=None)
    assert len(serve(simulator(), request).tokens("a")) == 10


def test_equal_prompts_and_seeds_give_equal_tokens() -> None:
    """Tokens depend on the prompt and the seed, not on the company or the batch."""
    alone = serve(simulator(), sim_request("a", range(10), 20, sampling={"seed": 7}))
    crowd = serve(
        simulator(max_num_batched_tokens=5),
        *(sim_request(str(i), range(i, i + 9), 20) for i in range(6)),
        sim_request("a", range(10), 20, sampling={"seed": 7}),
        sim_request("b", range(10), 20, sampling={"seed": 8}),
    )
    assert alone.tokens("a") == crowd.tokens("a") != crowd.tokens("b")


def test_choices_of_an_unseeded_request_differ() -> None:
    """Without a seed the choices of one request get different tokens, the same ones every time."""
    drive = serve(simulator(), sim_request("a", range(10), 20), sim_request("b", range(10), 20, index=1))
    assert drive.tokens("a") != drive.tokens("b")


@given(cut=st.integers(1, 29), seed=st.integers(-(2**63), 2**63 - 1))
def test_a_moved_request_goes_on_as_it_would_have(cut: int, seed: int) -> None:
    """Prompt and output so far, sent to another instance, continue with the same tokens and the same end."""
    whole = serve(simulator(eos=0.1), sim_request("a", range(10), 30, sampling={"seed": seed}))
    tokens = whole.tokens("a")
    if cut >= len(tokens):
        return
    moved = sim_request("a", [*range(10), *tokens[:cut]], 30, prompt_len=10, sampling={"seed": seed})
    rest = serve(simulator(eos=0.1, block_size=8), moved)
    assert rest.tokens("a") == tokens[cut:]
    assert rest.outputs["a"][-1].finish is whole.outputs["a"][-1].finish


def test_the_last_token_is_always_computed_again() -> None:
    """A fully cached, aligned prompt of n blocks finds n-1 of them."""
    drive = serve(simulator(), sim_request("a", range(16), 1))
    drive.simulator.submit(sim_request("b", range(16), 1), drive.now)
    drive.simulator.submit(sim_request("c", range(17), 1), drive.now)
    drive.finish()
    assert (drive.cached_tokens("a"), drive.cached_tokens("b"), drive.cached_tokens("c")) == (0, 12, 16)


def test_a_second_copy_of_a_block_is_announced_too() -> None:
    """The recomputed last block of an aligned prompt is a second physical copy with the same hash."""
    drive = serve(simulator(), sim_request("a", range(16), 1), sim_request("b", range(16), 1))
    stored = Counter(h for event in drive.events if isinstance(event, BlockStored) for h in event.block_hashes)
    assert sorted(stored.values()) == [1, 1, 1, 2]
    assert sorted(drive.simulator.cache.cached_hashes().values()) == [1, 1, 1, 2]


def test_only_full_blocks_are_cached() -> None:
    """Blocks are announced when they are full, output included, each with its tokens and its parent."""
    drive = serve(simulator(), sim_request("a", range(6), 4))
    first, second = (event for event in drive.events if isinstance(event, BlockStored))
    assert (list(first.token_ids), first.parent_block_hash) == ([0, 1, 2, 3], None)
    # 6 prompt tokens and the first 3 of 4 output tokens have been computed: the last one never is.
    assert list(second.token_ids) == [4, 5, *drive.tokens("a")[:2]]
    assert second.parent_block_hash == first.block_hashes[0]


def test_the_oldest_free_block_is_evicted_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    """Eviction is least recently used, from the tail of a prompt on."""
    drive = serve(simulator(total_blocks=10, max_model_len=40), sim_request("old", range(16), 1))
    drive.simulator.submit(sim_request("new", range(100, 123), 1), drive.now)
    drive.finish()
    hashes = [h for event in drive.events if isinstance(event, BlockStored) for h in event.block_hashes]
    removed = [h for event in drive.events if isinstance(event, BlockRemoved) for h in event.block_hashes]
    assert removed == []
    drive.simulator.submit(sim_request("third", range(200, 209), 1), drive.now)
    drive.finish()
    removed = [h for event in drive.events if isinstance(event, BlockRemoved) for h in event.block_hashes]
    assert removed == [hashes[3], hashes[2], hashes[1]]


def test_a_long_prompt_is_prefilled_in_chunks_beside_decodes() -> None:
    """No step has more tokens than max_num_batched_tokens, and running requests go on while a long prompt is prefilled."""
    drive = Drive(simulator(max_num_batched_tokens=16))
    drive.simulator.submit(sim_request("short", range(4), 20), 0.0)
    drive.step()
    drive.simulator.submit(sim_request("long", range(100, 160), 1), 0.0)
    steps_until_long = 0
    while "long" not in drive.outputs:
        drive.step()
        steps_until_long += 1
    assert steps_until_long == 5  # 15 + 15 + 15 + 15 tokens beside the decoding one, then the token
    assert len(drive.outputs["short"]) == 5


def test_no_more_requests_run_than_max_num_seqs() -> None:
    """Requests beyond max_num_seqs wait, in order of priority and then of arrival."""
    drive = Drive(simulator(max_num_seqs=1))
    for name, priority in (("first", 0), ("late", 5), ("urgent", -1), ("second", 0)):
        drive.simulator.submit(sim_request(name, range(4), 2, priority=priority), 0.0)
    drive.step()
    assert (drive.simulator.load().running, drive.simulator.load().waiting) == (1, 3)
    drive.finish()
    assert list(drive.outputs) == ["urgent", "first", "second", "late"]


def test_without_blocks_what_matters_least_is_preempted_and_computed_again() -> None:
    """The youngest of the lowest priority gives up its blocks, and its output is what it would have been."""
    requests = [("a", 0), ("b", 0), ("c", 0)]
    small = simulator(total_blocks=12, max_model_len=48)
    drive = serve(small, *(sim_request(name, range(i, i + 8), 20, priority=p) for i, (name, p) in enumerate(requests)))
    assert small.load().preemptions > 0
    assert list(dict.fromkeys(sorted(drive.outputs, key=lambda name: len(drive.outputs[name])))) == ["a", "b", "c"]
    roomy = serve(simulator(), *(sim_request(name, range(i, i + 8), 20) for i, (name, _) in enumerate(requests)))
    for name, _ in requests:
        assert drive.tokens(name) == roomy.tokens(name)


def test_time_is_prefill_rate_and_decode_step() -> None:
    """The first token comes after prompt / rate, each further one after a decode step; speedup divides both."""
    for speedup in (1.0, 4.0):
        drive = Drive(simulator(prefill_tokens_per_s=100.0, decode_ms=20.0, speedup=speedup))
        drive.simulator.submit(sim_request("a", range(50), 2), 0.0)
        times = []
        while drive.step():
            times += [drive.now] * (len(drive.outputs.get("a", [])) - len(times))
        assert times == pytest.approx([0.5 / speedup, 0.52 / speedup])


def test_infinite_speedup_takes_no_time() -> None:
    """With speedup inf every step is due at once."""
    assert serve(simulator(speedup=float("inf")), sim_request("a", range(50), 30)).now == 0.0


def test_an_aborted_request_frees_its_blocks_at_once() -> None:
    """Abort works while a request waits, prefills or decodes; nothing of it comes out afterwards."""
    for steps in range(4):
        drive = Drive(simulator(max_num_seqs=1, max_num_batched_tokens=8))
        drive.simulator.submit(sim_request("a", range(12), 9), 0.0)
        drive.simulator.submit(sim_request("waiting", range(12), 9), 0.0)
        for _ in range(steps):
            drive.step()
        before = len(drive.outputs.get("a", []))
        assert drive.simulator.abort("waiting")
        assert drive.simulator.abort("a")
        assert not drive.simulator.abort("a")
        assert drive.simulator.cache.used_blocks == 0
        drive.finish()
        assert len(drive.outputs.get("a", [])) == before
        assert "waiting" not in drive.outputs


def test_an_end_of_sequence_respects_min_tokens_and_ignore_eos() -> None:
    """The end of sequence comes only after min_tokens, and never with ignore_eos."""
    for prompt in range(20):
        drive = serve(
            simulator(eos=1.0),
            sim_request("a", [prompt], 50),
            sim_request("b", [prompt], 50, sampling={"min_tokens": 10}),
            sim_request("c", [prompt], 50, sampling={"ignore_eos": True}),
        )
        assert drive.tokens("a") == [257]
        assert drive.outputs["a"][-1].finish is Finish.STOP
        assert 10 < len(drive.tokens("b")) < 50
        assert 257 not in drive.tokens("c")
        assert len(drive.tokens("c")) == 50


def test_a_stop_token_ends_the_output_after_min_tokens() -> None:
    """stop_token_ids end the output with their token as its last, but not within the first min_tokens."""
    free = serve(simulator(), sim_request("a", range(10), 40)).tokens("a")
    first = free.index(32)
    second = free.index(32, first + 1)
    drive = serve(
        simulator(),
        sim_request("a", range(10), 40, sampling={"stop_token_ids": (32,)}),
        sim_request("b", range(10), 40, sampling={"stop_token_ids": (32,), "min_tokens": first + 1}),
    )
    assert drive.tokens("a") == free[: first + 1]
    assert drive.tokens("b") == free[: second + 1]


def test_logprobs_are_those_of_the_sampled_token_and_best_first() -> None:
    """Every token has its log probability and as many alternatives as asked for, best first, adding up to at most 1."""
    drive = serve(simulator(), sim_request("a", range(10), 10, sampling={"logprobs": 3}))
    for output in drive.outputs["a"]:
        (entry,) = output.logprobs
        assert entry.token_id == output.tokens[0]
        assert len(entry.top) == 3
        assert len({token for token, _ in entry.top}) == 3
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
        assert entry.logprob < 0
    none = serve(simulator(), sim_request("a", range(10), 1, sampling={"logprobs": 0}))
    assert none.outputs["a"][0].logprobs[0].top == ()


def test_adapters_and_salts_share_nothing() -> None:
    """LoRA name and cache salt separate prompts; the event names them as vLLM does."""
    small = simulator()
    serve(small, sim_request("plain", range(8), 1))
    for fields, keys in (
        ({"lora": "a"}, [("a",), ("a",)]),
        ({"cache_salt": "s"}, [("s",), None]),
        ({"lora": "a", "cache_salt": "s"}, [("a", "s"), ("a",)]),
    ):
        drive = serve(small, sim_request("x", range(8), 1, **fields))
        assert drive.cached_tokens("x") == 0
        (event,) = (event for event in drive.events if isinstance(event, BlockStored))
        assert list(event.extra_keys or ()) == keys
        assert event.lora_name == fields.get("lora")


def test_a_reset_empties_the_cache_under_running_requests() -> None:
    """After a reset nothing matches, running requests finish unharmed and cache nothing that hangs on forgotten blocks."""
    drive = Drive(simulator())
    drive.simulator.submit(sim_request("a", range(16), 20), 0.0)
    drive.step()
    drive.step()
    drive.simulator.reset_prefix_cache()
    drive.finish()
    assert isinstance(drive.events[-1], AllBlocksCleared)
    assert drive.simulator.cache.cached_hashes() == {}
    assert drive.tokens("a") == serve(simulator(), sim_request("a", range(16), 20)).tokens("a")
    drive.simulator.submit(sim_request("b", range(16), 1), drive.now)
    drive.finish()
    assert drive.cached_tokens("b") == 0


def test_a_cache_smaller_than_the_model_is_refused() -> None:
    """A rank whose cache couldn't hold one longest request is refused: such a request would wait for ever."""
    with pytest.raises(InvalidField, match="max_model_len=100"):
        SimConfig(total_blocks=10, block_size=4, max_model_len=100)


_REQUESTS = st.builds(
    dict,
    tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40),
    max_tokens=st.integers(1, 20),
    priority=st.integers(0, 2),
    lora=st.sampled_from(["", "", "x"]),
)
_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), _REQUESTS),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("reset"), st.none()),
    ),
    max_size=40,
)


def play(actions: list[Any], drive: Drive, check: Any = lambda: None) -> Drive:
    """Apply random actions, then let everything finish; `check` after each."""
    submitted = 0
    for action, argument in actions:
        if action == "submit":
            fields = dict(argument)
            drive.simulator.submit(
                sim_request(str(submitted), fields.pop("tokens"), fields.pop("max_tokens"), **fields), drive.now
            )
            submitted += 1
        elif action == "step":
            for _ in range(argument):
                drive.step()
        elif action == "abort":
            drive.simulator.abort(str(argument))
        else:
            drive.simulator.reset_prefix_cache()
        check()
    drive.finish(20_000)
    check()
    return drive


@given(_ACTIONS)
def test_blocks_are_never_lost_and_events_tell_the_cache(actions: list[Any]) -> None:
    """used + free == total at all times, idle means nothing used, and the events replay to exactly what the cache holds."""
    drive = Drive(simulator(total_blocks=16, max_model_len=61, max_num_batched_tokens=16))
    cache = drive.simulator.cache

    def check() -> None:
        assert cache.used_blocks + cache.free_blocks == cache.total_blocks
        assert cache.used_blocks >= 0

    play(actions, drive, check)
    assert cache.used_blocks == 0
    drive.events += cache.events
    copies: Counter[int] = Counter()
    for event in drive.events:
        if isinstance(event, BlockStored):
            copies.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            copies.subtract(event.block_hashes)
            assert min(copies.values()) >= 0
        else:
            copies.clear()
    assert +copies == Counter(cache.cached_hashes())


@given(_ACTIONS)
def test_the_mirror_of_a_rank_is_its_cache(actions: list[Any]) -> None:
    """After any history, resets included, the mirror holds exactly the canonical hashes of what the cache holds."""
    drive = play(actions, Drive(simulator(total_blocks=16, max_model_len=61, max_num_batched_tokens=16)))
    events = [*drive.events, *drive.simulator.cache.events]
    mirror = Mirror("m", 4)
    mirror.apply(events)
    prefixes: dict[Any, tuple[str, tuple[int, ...]]] = {None: ("", ())}
    for event in events:
        if isinstance(event, BlockStored):
            _, tokens = prefixes[event.parent_block_hash]
            for i, engine_hash in enumerate(event.block_hashes):
                prefixes[engine_hash] = (event.lora_name or "", (*tokens, *event.token_ids[: 4 * (i + 1)]))
    held = (prefixes[engine_hash] for engine_hash in drive.simulator.cache.cached_hashes())
    assert set(mirror.snapshot()) == {unpack_hashes(hash_chain(tokens, 4, root_hash("m", lora)))[-1] for lora, tokens in held}
    assert mirror.counts == MirrorCounts()


@given(_ACTIONS)
def test_the_same_actions_give_the_same_history(actions: list[Any]) -> None:
    """The simulator is deterministic: outputs, events and times repeat."""
    first, second = (play(actions, Drive(simulator(total_blocks=16, max_model_len=61))) for _ in range(2))
    assert (first.outputs, first.events, first.now) == (second.outputs, second.events, second.now)


@given(st.lists(_REQUESTS, min_size=1, max_size=30))
def test_nobody_starves(requests: list[dict[str, Any]]) -> None:
    """Everything submitted to a rank that is far too small ends, with as many tokens as asked for."""
    drive = Drive(simulator(total_blocks=16, max_model_len=61, max_num_batched_tokens=8))
    play([("submit", request) for request in requests], drive)
    assert [len(drive.tokens(str(i))) for i in range(len(requests))] == [request["max_tokens"] for request in requests]


def test_a_thousand_ranks_in_virtual_time() -> None:
    """The same class runs for a thousand ranks in one thread, deterministically and lean."""
    config = SimConfig(total_blocks=16_384, max_model_len=131_072)

    def study() -> tuple[float, int]:
        ranks = [Simulator(config, VOCABULARY) for _ in range(1000)]
        due: list[tuple[float, int]] = []
        for request in range(2000):
            rank = request * 7919 % 1000
            arrival = request * 0.001
            if ranks[rank].due is None and ranks[rank].idle:
                due.append((arrival, rank))
            ranks[rank].submit(sim_request(str(request), array("I", [request % 50] * 100), 5), arrival)
        heapq.heapify(due)
        now, tokens = 0.0, 0
        while due:
            now, rank = heapq.heappop(due)
            result = ranks[rank].step(now)
            tokens += len(result.outputs)
            if result.next_due is not None:
                heapq.heappush(due, (result.next_due, rank))
        return now, tokens

    assert study() == study()
    assert study()[1] == 10_000
