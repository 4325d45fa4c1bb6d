"""Two engines of two ranks each, hybrid LB, the tiny model: what the engine promises to its worker, checked against vLLM."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import structlog
from harness.vllm_engines import QUICK_FLAGS, Live, count_finished, start
from harness.waiting import eventually, free_port

from rankway.errors import EngineFailed
from rankway.ranks import DpRange
from rankway.sampling import Sampling
from rankway.worker.engine import Finish

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

BLOCKS = 64
"""KV blocks of a rank, one of them vLLM's null block: few, so that blocks are evicted all the time."""


@dataclass
class Pair:
    a: Live
    b: Live
    finished: Counter[int]
    """Finished requests by global rank, as vLLM counts them."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tiny_model: str, tiny_adapter: Path) -> AsyncIterator[Pair]:
    finished: Counter[int] = Counter()
    undo = count_finished(finished)
    port = free_port()

    def flags(start_rank: int) -> list[str]:
        return [
            *QUICK_FLAGS,
            f"--num-gpu-blocks-override={BLOCKS}",
            f"--lora-modules=sql={tiny_adapter}",
            "--data-parallel-size=4",
            "--data-parallel-size-local=2",
            f"--data-parallel-start-rank={start_rank}",
            "--data-parallel-hybrid-lb",
            f"--data-parallel-rpc-port={port}",
        ]

    a, b = await asyncio.gather(start(tiny_model, *flags(0)), start(tiny_model, *flags(2)))
    yield Pair(a, b, finished)
    for live in (a, b):
        await live.engine.stop()
        live.running.cancel()
        await asyncio.gather(live.running, return_exceptions=True)
    undo()


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


async def test_windows_and_sizes(pair: Pair) -> None:
    """Each engine knows its window from vLLM's configuration, and its numbers are those of one rank."""
    assert (pair.a.info.window, pair.b.info.window) == (DpRange(0, 2), DpRange(2, 2))
    assert pair.b.info.data_parallel_size == 4
    assert pair.b.info.total_kv_blocks == BLOCKS - 1
    assert pair.b.info.block_size == 32
    assert pair.b.info.lora_adapters == ("sql",)


async def test_no_two_ranks_share_a_port(pair: Pair) -> None:
    """Four ranks on one host publish and replay on eight ports, all chosen by the system."""
    endpoints = [
        endpoint
        for live in (pair.a, pair.b)
        for stream in live.engine.caches.streams
        for endpoint in (stream.source.endpoint, stream.source.replay_endpoint)
    ]
    assert len(set(endpoints)) == len(endpoints) == 8


async def test_pinned_requests_land_on_their_rank(pair: Pair) -> None:
    """Ten requests pinned to each of the global ranks 0 to 3 are ten at each engine by vLLM's own count."""
    before = pair.finished.copy()
    for live in (pair.a, pair.b):
        for dp_rank in live.info.window.ranks():
            local = live.info.window.to_local(dp_rank, "worker")
            await asyncio.gather(*(live.ask(local, prompt(n, 20)) for n in range(10)))
    assert pair.finished - before == Counter({0: 10, 1: 10, 2: 10, 3: 10})


async def test_without_a_rank_vllm_balances_and_the_log_says_so(pair: Pair) -> None:
    """A request without dp_rank stays inside the window, spreads over it, and is logged as such."""
    before = pair.finished.copy()

    async def both_ranks_served() -> bool:
        # vLLM balances by counts that may be some 100 ms old, so a single burst may go to one rank.
        with structlog.testing.capture_logs() as logs:
            await asyncio.gather(*(pair.b.ask(None, prompt(n, 20), Sampling(max_tokens=8, ignore_eos=True)) for n in range(8)))
        assert sum("balances inside the window" in entry["event"] for entry in logs) == 8
        return set(pair.finished - before) == {2, 3}

    await eventually(both_ranks_served, timeout_s=10)


async def test_the_mirror_is_what_the_engine_holds(pair: Pair) -> None:
    """After 300 random requests with evictions, each rank's mirror predicts what vLLM takes from its cache, exactly."""
    rng = random.Random(4)
    stems = [prompt(1000 + n, rng.randrange(64, 320)) for n in range(6)]
    prompts = [
        stem[: rng.randrange(33, len(stem))] + prompt(n, rng.randrange(200)) for n, stem in enumerate(rng.choices(stems, k=300))
    ]
    limit = asyncio.Semaphore(16)

    async def one(live: Live, rank: int, tokens: list[int]) -> None:
        async with limit:
            await live.ask(rank, tokens, Sampling(max_tokens=rng.randrange(1, 40), ignore_eos=True))

    places = [(rng.choice((pair.a, pair.b)), rng.randrange(2)) for _ in prompts]
    await asyncio.gather(*(one(live, rank, tokens) for (live, rank), tokens in zip(places, prompts, strict=True)))
    await asyncio.gather(pair.a.quiet(), pair.b.quiet())

    for live in (pair.a, pair.b):
        for rank in range(2):
            mirror = live.sink.mirrors[rank]
            assert live.sink.removed(rank) > 100, "the cache was too large for the test"
            assert 0 < len(mirror) <= live.info.total_kv_blocks
            assert (mirror.counts.orphans, mirror.counts.unknown_removals, mirror.counts.malformed) == (0, 0, 0)
            assert live.sink.lost == []
            for tokens in rng.sample(prompts, 25):
                predicted = live.predicted(rank, tokens)
                assert (await live.ask(rank, tokens)).cached == predicted
                await live.quiet()


async def test_a_reset_of_an_idle_engine_leaves_nothing_behind(pair: Pair) -> None:
    """After a reset nothing is cached; vLLM's own late announcement of it doesn't take away what came since."""
    live = pair.a
    tokens = prompt(77, 200)
    await live.ask(0, tokens)
    await live.ask(1, tokens)
    await live.quiet()
    assert live.predicted(0, tokens) == 192
    assert await live.engine.reset_prefix_cache(None) == [0, 1]
    for mirror in live.sink.mirrors:  # what the worker does with the answer
        mirror.clear()
    assert (await live.ask(0, tokens)).cached == 0
    await live.quiet()
    assert live.predicted(0, tokens) == 192
    assert len(live.sink.mirrors[0]) == 6
    assert len(live.sink.mirrors[1]) == 0
    assert (await live.ask(0, tokens)).cached == 192


async def test_one_rank_is_reset_alone(pair: Pair) -> None:
    """A reset of one rank leaves its neighbour's cache."""
    live = pair.b
    tokens = prompt(78, 100)
    await asyncio.gather(live.ask(0, tokens), live.ask(1, tokens))
    await live.quiet()
    assert await live.engine.reset_prefix_cache(live.info.window.to_local(3, "b")) == [1]
    live.sink.mirrors[1].clear()
    assert (await live.ask(0, tokens)).cached == 96
    assert (await live.ask(1, tokens)).cached == 0


async def test_a_cache_in_use_is_not_reset(pair: Pair) -> None:
    """While requests use blocks vLLM refuses, and the rank isn't among those that were reset; no event is lost by that."""
    live = pair.a
    _, answer, ended = live.send(0, prompt(5, 100), Sampling(max_tokens=200, ignore_eos=True))
    await eventually(lambda: answer.outputs > 2)
    assert await live.engine.reset_prefix_cache(None) == [1]
    live.sink.mirrors[1].clear()
    await ended.wait()
    await live.quiet()
    assert live.predicted(0, prompt(5, 100)) == 96


async def test_loads_tell_what_runs_and_what_waits(pair: Pair) -> None:
    """Twelve requests on a rank of eight places: eight run, four wait, blocks are in use; then all is back at zero."""
    live = pair.b
    steps = live.sink.steps[1]
    sent = [live.send(1, prompt(n, 40), Sampling(max_tokens=150, ignore_eos=True)) for n in range(12)]
    peak = await eventually(
        lambda: next((load for load in [live.engine.loads()[1]] if (load.running, load.waiting) == (8, 4)), None)
    )
    assert peak.used_blocks >= 8
    assert live.engine.loads()[0].running == 0
    await asyncio.gather(*(ended.wait() for _, _, ended in sent))
    await live.quiet()
    assert live.sink.steps[1] > steps + 150
    idle = live.engine.loads()[1]
    assert (idle.running, idle.waiting, idle.used_blocks, idle.prefill_tokens) == (0, 0, 0, 0)


async def test_preemptions_and_queue_times_are_reported(pair: Pair) -> None:
    """Requests that outgrow the cache preempt each other; the load counts it, and the time they queued."""
    live = pair.a
    before = live.engine.loads()[1].preemptions
    answers = await asyncio.gather(
        *(live.ask(1, prompt(200 + n, 150), Sampling(max_tokens=250, ignore_eos=True)) for n in range(10))
    )
    assert all(len(answer.tokens) == 250 for answer in answers)
    load = live.engine.loads()[1]
    assert load.preemptions > before
    assert load.queue_time_ms > 0


async def test_a_salted_prompt_never_matches_an_unsalted_one(pair: Pair) -> None:
    """The cache salt reaches vLLM and the canonical hashes alike."""
    live = pair.a
    tokens = prompt(60, 130)
    assert (await live.ask(0, tokens, cache_salt="pepper")).cached == 0
    assert (await live.ask(0, tokens)).cached == 0
    assert (await live.ask(0, tokens, cache_salt="chili")).cached == 0
    await live.quiet()
    for salt in ("", "pepper", "chili"):
        assert live.predicted(0, tokens, cache_salt=salt) == 128
        assert (await live.ask(0, tokens, cache_salt=salt)).cached == 128
    assert live.predicted(0, tokens, cache_salt="salt") == 0


async def test_an_adapter_has_blocks_of_its_own(pair: Pair) -> None:
    """A LoRA adapter's name reaches vLLM and the canonical hashes alike, and its weights change the answer."""
    live = pair.b
    tokens = prompt(61, 130)
    sampling = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
    plain = await live.ask(0, tokens, sampling)
    adapted = await live.ask(0, tokens, sampling, lora="sql")
    assert (plain.cached, adapted.cached) == (0, 0)
    assert plain.tokens != adapted.tokens
    await live.quiet()
    assert live.predicted(0, tokens, lora="sql") == 128
    assert (await live.ask(0, tokens, sampling, lora="sql")).cached == 128


async def test_sampling_parameters_pass_through(pair: Pair) -> None:
    """seed, logit_bias, stop_token_ids, min_tokens, logprobs and max_tokens mean to vLLM what they mean to OpenAI's clients."""
    live = pair.a
    tokens = prompt(62, 50)

    async def ask(**fields: object) -> object:
        return await live.ask(0, tokens, Sampling(**{"max_tokens": 12, "ignore_eos": True, **fields}))  # type: ignore[arg-type]

    first, again, other = await ask(seed=1), await ask(seed=1), await ask(seed=2)
    assert first.tokens == again.tokens != other.tokens  # type: ignore[attr-defined]
    biased = await ask(logit_bias={99: 100.0})
    assert biased.tokens == [99] * 12  # type: ignore[attr-defined]
    stopped = await ask(logit_bias={99: 100.0}, stop_token_ids=(99,), min_tokens=3)
    assert stopped.finish is Finish.STOP  # type: ignore[attr-defined]
    assert len(stopped.tokens) == 4  # type: ignore[attr-defined]
    scored = await ask(logprobs=3, temperature=0)
    assert [len(entry.top) for entry in scored.logprobs] == [3] * 12  # type: ignore[attr-defined]
    assert all(entry.top[0][1] == entry.logprob for entry in scored.logprobs)  # type: ignore[attr-defined]


async def test_resumed_requests_go_on_where_they_were(pair: Pair) -> None:
    """Prompt and tokens so far give the rest that the whole request would have given; limits count from the prompt."""
    live = pair.a
    tokens = prompt(63, 40)
    whole = await live.ask(0, tokens, Sampling(max_tokens=20, temperature=0, ignore_eos=True))
    rest = await live.ask(1, tokens, Sampling(max_tokens=20, temperature=0, ignore_eos=True), resume=whole.tokens[:8])
    assert rest.tokens == whole.tokens[8:]
    assert rest.finish is Finish.LENGTH


async def test_what_vllm_refuses_has_a_name(pair: Pair) -> None:
    """A request that vLLM refuses ends with vLLM's reason, and the engine goes on."""
    answer = await pair.a.ask(0, prompt(1, 30), Sampling(max_tokens=4, logprobs=20), lora="")
    assert answer.error is None
    refused = await pair.a.ask(0, [600], Sampling(max_tokens=4))
    assert refused.error is not None
    assert "600" in str(refused.error)
    assert (await pair.a.ask(0, prompt(1, 30))).error is None


@pytest.mark.parametrize("stage", ["prefill", "queued", "decode"])
async def test_an_abort_frees_the_engine(pair: Pair, stage: str) -> None:
    """A request given up during prefill, while queued or while decoding leaves no count and no block behind within 2 s."""
    live = pair.b
    busy = [
        live.send(0, prompt(300 + n, 60), Sampling(max_tokens=400, ignore_eos=True)) for n in range(8 if stage == "queued" else 0)
    ]
    if busy:
        await eventually(lambda: live.engine.loads()[0].running == 8)
    request_id, answer, _ = live.send(0, prompt(400, 900), Sampling(max_tokens=100, ignore_eos=True))
    if stage == "decode":
        await eventually(lambda: answer.outputs > 3)
    elif stage == "queued":
        await eventually(lambda: live.engine.loads()[0].waiting == 1)
    else:
        await eventually(lambda: live.engine.loads()[0].running == 1)
    live.engine.abort(request_id)
    outputs = answer.outputs
    for other, _, _ in busy:
        live.engine.abort(other)

    def idle() -> bool:
        load = live.engine.loads()[0]
        return (load.running, load.waiting, load.used_blocks) == (0, 0, 0)

    async def resets() -> bool:
        return list(await live.engine.reset_prefix_cache(live.info.window.to_local(2, "b"))) == [0]  # vLLM: no block is in use

    await eventually(idle, timeout_s=2)
    await eventually(resets, timeout_s=2)
    live.sink.mirrors[0].clear()
    assert answer.outputs == outputs


async def test_an_engine_that_dies_takes_its_window_and_no_other(pair: Pair) -> None:
    """kill -9 of a rank's process: its worker's requests end with the cause, `run` raises it, the other window serves on."""
    request = pair.b.send(0, prompt(500, 50), Sampling(max_tokens=900, ignore_eos=True))
    await eventually(lambda: request[1].outputs > 2)
    (victim,) = (child for child in psutil.Process().children(recursive=True) if "EngineCore_DP3" in " ".join(child.cmdline()))
    victim.kill()
    await asyncio.wait_for(request[2].wait(), 5)
    assert isinstance(request[1].error, EngineFailed)
    with pytest.raises(EngineFailed, match=rf"EngineCore_DP3 \(pid {victim.pid}\) ended with signal 9"):
        await asyncio.wait_for(pair.b.running, 5)
    assert (await pair.a.ask(1, prompt(501, 50))).finish is Finish.LENGTH
