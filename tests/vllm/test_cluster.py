"""A whole cluster as a user starts it, `rankway up --engine vllm`: two workers of two ranks, hybrid LB, SmolLM2."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import grpc.aio
import pytest
from harness.calls import generate, http, request
from harness.cluster import Cluster
from harness.waiting import eventually

from rankway import rpc
from rankway.v1 import (
    generate_pb2_grpc,
    indexer_pb2,
    indexer_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

BENCH = Path(__file__).parents[2] / "bench" / "vllm_routing.py"
BLOCK = 32


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """bench/vllm_routing.py: the same cluster and the same conversations as `make bench-vllm`, fewer of them."""
    spec = importlib.util.spec_from_file_location("vllm_routing", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_routing"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cluster(bench: ModuleType) -> Iterator[Cluster]:
    model = os.environ.get("DEMO_MODEL") or str(Path(__file__).parents[2] / "models" / "smollm2-135m-instruct")
    if not Path(model, "config.json").exists():
        pytest.fail(f"no model in {model}: make demo-model")
    with bench.cluster(model) as running:
        yield running


def chat(
    cluster: Cluster, messages: list[dict[str, str]], headers: dict[str, str] | None = None, **fields: Any
) -> dict[str, Any]:
    """A chat completion, and the answer's headers under "headers"."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 32, **fields}
    answer = http(f"{cluster.http}/v1/chat/completions", body, headers, timeout_s=120)
    assert answer.status == 200, answer.body
    return {**answer.json(), "headers": answer.headers}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def records(cluster: Cluster) -> list[registry_pb2.WorkerRecord]:
    async with rpc.open_channel(cluster.address("registry")) as channel:
        listed = await registry_pb2_grpc.RegistryStub(channel).List(registry_pb2.ListRequest())
        return sorted(listed.records, key=lambda record: record.dp_range.start_rank)


def test_a_real_model_answers_sensibly(cluster: Cluster) -> None:
    """SmolLM2 by HTTP knows the capital of France, and the engine counts the prompt's tokens as the router does."""
    messages = user("What is the capital of France? Answer in one sentence.")
    answer = chat(cluster, messages)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    counted = http(f"{cluster.http}/tokenize", {"messages": messages}).json()
    assert answer["usage"]["prompt_tokens"] == counted["count"] == len(counted["tokens"])


def test_stop_strings_and_logprobs(cluster: Cluster) -> None:
    """Stop strings end the text before them; logprobs come with their tokens' text."""
    messages = user("What is the capital of France? Answer in one sentence.")
    stopped = chat(cluster, messages, stop=["Paris"])
    assert "Paris" not in stopped["choices"][0]["message"]["content"]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    scored = chat(cluster, messages, max_tokens=4, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert len(scored) == 4
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in scored)


def test_each_global_rank_is_reached(cluster: Cluster) -> None:
    """A request pinned to a global rank lands there, whichever worker owns it; a rank that isn't one is refused by name."""
    for dp_rank in range(4):
        answer = chat(cluster, user("Hi"), {"x-rankway-dp-rank": str(dp_rank)}, max_tokens=2)
        assert answer["headers"]["x-rankway-dp-rank"] == str(dp_rank)
        assert answer["headers"]["x-rankway-worker-id"] == f"worker-{dp_rank // 2}"
    refused = http(f"{cluster.http}/v1/chat/completions", {"messages": user("Hi")}, {"x-rankway-dp-rank": "4"})
    assert refused.status == 400
    assert b"dp_rank=4" in refused.body


async def test_foreign_ranks_are_refused_at_the_worker(cluster: Cluster) -> None:
    """Straight to worker B (global ranks 2 and 3): 1 and 4 are OUT_OF_RANGE naming its window, 2 is its first rank."""
    second = (await records(cluster))[1]
    async with rpc.open_channel(second.endpoint) as channel:
        stub = generate_pb2_grpc.GenerationStub(channel)
        for dp_rank in (1, 4):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await generate(stub, request([1, 2, 3], dp_rank=dp_rank))
            assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
            assert "[2, 4)" in (refused.value.details() or "")
        assert (await generate(stub, request([1, 2, 3], dp_rank=2))).usage.completion_tokens == 4


def test_a_warm_prompt_is_five_times_faster(cluster: Cluster, bench: ModuleType) -> None:
    """On one rank, a prompt of about 1,000 tokens has its first token at least five times sooner the second time."""
    text = bench.sentence(random.Random(11), 900)

    def first_token_s() -> tuple[float, int, int]:
        begun = time.perf_counter()
        usage = chat(cluster, user(text), {"x-rankway-dp-rank": "1"}, max_tokens=1)["usage"]
        return time.perf_counter() - begun, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    cold, prompt_tokens, cached = first_token_s()
    assert 900 < prompt_tokens < 1500
    assert cached < BLOCK * 2
    warm = [first_token_s() for _ in range(3)]
    assert all(cached == (prompt_tokens - 1) // BLOCK * BLOCK for _, _, cached in warm)
    assert min(seconds for seconds, _, _ in warm) < cold / 5


def test_what_is_predicted_is_what_vllm_does(cluster: Cluster, bench: ModuleType) -> None:
    """Over a calm multi-turn run, overlap times block size is what vLLM took from its cache, for 95 % of requests at least."""
    turns = []
    for number in range(6):
        address = cluster.address("router", "http")
        turns += bench.converse(
            address, f"calm-{number % 4}-{number}", 3, "Be brief. " + bench.sentence(random.Random("calm"), 80), 8
        )
    exact = sum(turn.predicted_tokens == turn.cached_tokens for turn in turns)
    assert exact / len(turns) >= 0.95, [(turn.predicted_tokens, turn.cached_tokens) for turn in turns]
    assert sum(turn.cached_tokens for turn in turns) > 0
    metrics = http(cluster.metrics_url("router")).body.decode()
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("rankway_router_predictions"))
    assert float(values["rankway_router_predictions_exact_total"]) / float(values["rankway_router_predictions_total"]) >= 0.9


async def test_a_reset_clears_the_index_of_an_idle_cluster(cluster: Cluster) -> None:
    """ResetPrefixCache at a worker's admin API: the indexer forgets the rank's blocks although the engine takes no step."""
    tokens = random.Random(5).choices(range(1000, 40_000), k=200)
    (record, *_) = await records(cluster)
    find = indexer_pb2.FindMatchesRequest(token_ids=types_pb2.TokenIds(ids=tokens), model=record.model, dp_group=record.dp_group)
    async with rpc.open_channel(cluster.address("indexer")) as to_indexer, rpc.open_channel(record.endpoint) as to_worker:
        indexer = indexer_pb2_grpc.IndexerStub(to_indexer)

        async def overlaps() -> dict[int, int]:
            return {match.dp_rank: match.overlap_blocks for match in (await indexer.FindMatches(find)).matches}

        async def cached() -> bool:
            return await overlaps() == {0: 6}

        async def forgotten() -> bool:
            return await overlaps() == {}

        await generate(generate_pb2_grpc.GenerationStub(to_worker), request(tokens, dp_rank=0, max_tokens=1))
        await eventually(cached)
        await worker_pb2_grpc.WorkerStub(to_worker).ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(dp_rank=0))
        await eventually(forgotten, timeout_s=1)


def test_kv_aware_routing_beats_round_robin(cluster: Cluster, bench: ModuleType) -> None:
    """The same conversations by both policies: the KV-aware one takes more of their tokens from the caches."""
    rows = {
        policy: bench.measure(cluster, policy, conversations=5, turns=3, at_once=2, max_tokens=4) for policy in bench.POLICIES
    }
    sys.stdout.write(bench.table(list(rows.values())) + "\n")
    assert rows["kv"].cached_share > rows["round_robin"].cached_share + 0.1
