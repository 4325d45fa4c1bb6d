"""What a newcomer is promised, word for word, on a cluster that `rankway up` started."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from typing import Any

import grpc
import nats
import pytest
from harness.calls import fresh_tokens, generate, http, request
from harness.cluster import Cluster
from harness.waiting import eventually

from rankway import rpc
from rankway.v1 import events_pb2, generate_pb2_grpc, registry_pb2, registry_pb2_grpc, router_pb2, router_pb2_grpc, types_pb2

RANKS = range(8)
CHAT = {
    "messages": [
        {"role": "system", "content": "You are a patient assistant who explains distributed systems to engineers."},
        {"role": "user", "content": "What is a data-parallel rank?"},
    ],
    "max_tokens": 8,
}


async def test_the_designs_pair(
    cluster: Cluster, generation: generate_pb2_grpc.GenerationAsyncStub, router: router_pb2_grpc.RouterAsyncStub
) -> None:
    """196 tokens cost 24.250 on every idle rank; the repeat costs 12.250 on the rank that has them, 24.250 elsewhere."""
    prompt = fresh_tokens(196)
    await idle(router)
    since = len(cluster.lines)
    first = await generate(generation, request(prompt))
    formulas, selected = await choice_lines(cluster, since)
    assert sorted((r["dp_rank"], r["cost"]) for r in formulas) == [(rank, 24.25) for rank in RANKS]
    assert first.routed.cost == 24.25
    assert first.usage.prompt_tokens == 196
    assert first.usage.cached_tokens == 0

    await repeat_is_known(cluster, prompt)
    since = len(cluster.lines)
    repeat = await generate(generation, request(prompt))
    assert repeat.where == first.where
    assert (repeat.routed.overlap_blocks, repeat.routed.cost) == (12, 12.25)
    assert (repeat.usage.prompt_tokens, repeat.usage.cached_tokens) == (196, 192)
    assert repeat.text == first.text

    formulas, selected = await choice_lines(cluster, since)
    assert sorted((r["dp_rank"], r["cost"]) for r in formulas) == [
        (rank, 12.25 if rank == first.routed.dp_rank else 24.25) for rank in RANKS
    ]
    worker_id, dp_rank = first.where
    mine = next(r for r in formulas if r["dp_rank"] == dp_rank)
    assert mine["event"] == (
        f"Formula for worker_id={worker_id} dp_rank={dp_rank} with 12 cached blocks: "
        "12.250 = 1.0 * prefill_blocks + decode_blocks = 1.0 * 0.250 + 12.000"
    )
    assert (mine["worker_id"], mine["level"]) == (worker_id, "debug")
    assert re.fullmatch(
        rf"Selected worker: worker_id={worker_id} dp_rank={dp_rank}, logit: 12\.250, cached blocks: 12, "
        r"tree size: \d+, total blocks: \d+",
        selected["event"],
    )
    assert (selected["worker_id"], selected["dp_rank"], selected["level"]) == (worker_id, dp_rank, "info")


async def choice_lines(cluster: Cluster, since: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The Formula lines and the Selected line of one choice."""

    def complete() -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
        records = cluster.records(since)
        formulas = [r for r in records if r["event"].startswith("Formula for ")]
        selected = [r for r in records if r["event"].startswith("Selected worker: ")]
        return (formulas, selected[0]) if len(formulas) == len(RANKS) and len(selected) == 1 else None

    result: tuple[list[dict[str, Any]], dict[str, Any]] = await eventually(complete)
    return result


async def repeat_is_known(cluster: Cluster, prompt: list[int], blocks: int = 12) -> None:
    """Wait until the router's replica has the prompt's blocks and nothing runs any more (Explain books nothing)."""
    async with rpc.open_channel(cluster.router) as channel:
        stub = router_pb2_grpc.RouterStub(channel)

        async def known() -> bool:
            answer = await stub.Explain(router_pb2.ExplainRequest(request=request(prompt)), timeout=5)
            idle = all(c.queued_prefill_tokens == 0 and c.decode_blocks == blocks for c in answer.candidates)
            return idle and max(c.overlap_blocks for c in answer.candidates) == blocks

        await eventually(known)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_chat_twice_by_curl(cluster: Cluster, stream: bool) -> None:
    """A chat that is sent again is answered from the cache, streamed or not."""
    question = {**CHAT, "messages": [*CHAT["messages"], {"role": "user", "content": f"Streamed: {stream}"}]}  # type: ignore[misc]
    if stream:
        question |= {"stream": True, "stream_options": {"include_usage": True}}
    first = await asyncio.to_thread(curl_chat, cluster, question, stream)
    await until_cached(cluster, question)
    second = await asyncio.to_thread(curl_chat, cluster, question, stream)
    assert second["prompt_tokens"] == first["prompt_tokens"]
    assert second["prompt_tokens_details"]["cached_tokens"] > 0


def curl_chat(cluster: Cluster, question: dict[str, Any], stream: bool) -> Any:
    """The usage of a chat completion, asked with curl."""
    command = ["curl", "-sS", "--fail-with-body", f"{cluster.http}/v1/chat/completions", "-d", json.dumps(question)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if not stream:
        return json.loads(answer)["usage"]
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    assert events[-1] == "[DONE]"
    return json.loads(events[-2])["usage"]


async def until_cached(cluster: Cluster, question: dict[str, Any]) -> None:
    """Wait until Explain sees an overlap for the chat."""
    chat = types_pb2.ChatMessages(messages=[types_pb2.ChatMessage(**message) for message in question["messages"]])
    async with rpc.open_channel(cluster.router) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        subject = router_pb2.ExplainRequest(request={"chat": chat})

        async def cached() -> bool:
            answer = await stub.Explain(subject, timeout=5)
            return any(c.overlap_blocks for c in answer.candidates)

        await eventually(cached)


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/ready", "/metrics"])
def test_plain_endpoints_answer(cluster: Cluster, path: str) -> None:
    """What a load balancer, a scraper and an SDK ask for is there."""
    assert http(cluster.http + path).status == 200


def test_completions_answer(cluster: Cluster) -> None:
    """/v1/completions takes a text and token ids alike."""
    by_text = http(f"{cluster.http}/v1/completions", {"prompt": "Hello", "max_tokens": 4, "temperature": 0}).json()
    by_ids = http(f"{cluster.http}/v1/completions", {"prompt": list(b"Hello"), "max_tokens": 4, "temperature": 0}).json()
    assert by_text["usage"]["prompt_tokens"] == by_ids["usage"]["prompt_tokens"] == 5
    assert by_text["choices"][0]["text"] == by_ids["choices"][0]["text"]


@pytest.mark.parametrize("dp_rank", RANKS)
async def test_a_pin_lands_exactly_there(generation: generate_pb2_grpc.GenerationAsyncStub, dp_rank: int) -> None:
    """A global rank is a rank of the group, 0 included, whichever worker owns it."""
    answer = await generate(generation, request(fresh_tokens(40), dp_rank=dp_rank))
    assert answer.where == (f"worker-{dp_rank // 4}", dp_rank)


async def test_a_rank_outside_the_group_is_refused(generation: generate_pb2_grpc.GenerationAsyncStub) -> None:
    """dp_rank 8 of 8 is OUT_OF_RANGE, and the message names the ranks there are."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate(generation, request(fresh_tokens(40), dp_rank=8))
    assert refused.value.code() == grpc.StatusCode.OUT_OF_RANGE
    assert "dp_rank=8" in str(refused.value.details())
    assert "[0, 8)" in str(refused.value.details())


async def test_a_worker_refuses_a_rank_that_is_not_its_own(cluster: Cluster) -> None:
    """Worker B (4-7) answers dp_rank 3 with OUT_OF_RANGE and its window; its engine hears nothing of it."""
    before = events_of(cluster, "worker-1")
    async with rpc.open_channel(cluster.address("worker-1")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(generate_pb2_grpc.GenerationStub(channel), request(fresh_tokens(64), dp_rank=3))
    assert refused.value.code() == grpc.StatusCode.OUT_OF_RANGE
    assert "[4, 8)" in str(refused.value.details())
    assert events_of(cluster, "worker-1") == before


def events_of(cluster: Cluster, worker: str) -> list[str]:
    """The worker's metrics of what its engine was given and what it stored."""
    text = http(cluster.metrics_url(worker)).body.decode()
    return [line for line in text.splitlines() if re.match(r"rankway_worker_(requests|kv_|prompt_tokens)", line)]


async def test_a_pin_to_a_worker_takes_its_best_rank(cluster: Cluster, generation: generate_pb2_grpc.GenerationAsyncStub) -> None:
    """worker_id without dp_rank: the rank of that worker that holds the prefix."""
    prompt = fresh_tokens(196)
    first = await generate(generation, request(prompt, dp_rank=6))
    await repeat_is_known(cluster, prompt)
    pinned = await generate(generation, request(prompt, worker_id="worker-1"))
    assert pinned.where == first.where == ("worker-1", 6)
    elsewhere = await generate(generation, request(prompt, worker_id="worker-0"))
    assert elsewhere.routed.worker_id == "worker-0"


async def test_a_worker_straight_without_rank_says_so(cluster: Cluster) -> None:
    """A worker that gets no dp_rank lets its engine balance, says in Routed that no rank was chosen, and logs it."""
    since = len(cluster.lines)
    async with rpc.open_channel(cluster.address("worker-0")) as channel:
        answer = await generate(generate_pb2_grpc.GenerationStub(channel), request(fresh_tokens(40)))
    assert not answer.routed.HasField("dp_rank")
    await eventually(lambda: [r for r in cluster.records(since) if r["process"] == "worker-0" and "dp_rank" in r["event"]])


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"dp_range": {"start_rank": 0, "size": 0}}, "INVALID_ARGUMENT", ["size"]),
        ({"dp_range": {"start_rank": 4294967295, "size": 4}}, "INVALID_ARGUMENT", ["size=4", "4294967299"]),
        ({"dp_range": {"start_rank": 6, "size": 4}}, "INVALID_ARGUMENT", ["[6, 10)", "8"]),
        ({"dp_range": {"start_rank": 2, "size": 2}}, "ALREADY_EXISTS", ["[2, 4)", "worker-0", "[0, 4)"]),
        ({"block_size": 32, "dp_range": {"start_rank": 4, "size": 1}}, "FAILED_PRECONDITION", ["32", "16"]),
        ({"data_parallel_size": 16, "dp_range": {"start_rank": 8, "size": 4}}, "FAILED_PRECONDITION", ["16", "8"]),
        ({"model": "other", "dp_range": {"start_rank": 4, "size": 1}}, "FAILED_PRECONDITION", ["other"]),
        ({"worker_id": "worker-0", "epoch": 1}, "ABORTED", ["worker-0", "epoch"]),
        ({"worker_id": "a.b"}, "INVALID_ARGUMENT", ["worker_id", "a.b"]),
    ],
)
async def test_registry_refuses_with_both_sides_named(
    cluster: Cluster, change: dict[str, Any], code: str, named: list[str]
) -> None:
    """Each refusal has its own code and names what was asked and what stands against it."""
    async with rpc.open_channel(cluster.address("registry")) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        records = (await stub.List(registry_pb2.ListRequest())).records
        intruder = registry_pb2.WorkerRecord()
        intruder.CopyFrom(next(r for r in records if r.worker_id == "worker-0"))
        intruder.worker_id = "intruder"
        intruder.MergeFrom(registry_pb2.WorkerRecord(**{k: v for k, v in change.items() if k != "dp_range"}))
        if "dp_range" in change:
            intruder.dp_range.CopyFrom(types_pb2.DpRange(**change["dp_range"]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Register(registry_pb2.RegisterRequest(record=intruder))
        assert refused.value.code().name == code, refused.value.details()
        assert all(name in str(refused.value.details()) for name in named), refused.value.details()
        assert len((await stub.List(registry_pb2.ListRequest())).records) == len(records)


async def test_registering_again_is_idempotent(cluster: Cluster) -> None:
    """The same record again renews the lease and changes nothing."""
    async with rpc.open_channel(cluster.address("registry")) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        record = next(r for r in (await stub.List(registry_pb2.ListRequest())).records if r.worker_id == "worker-1")
        lease = (await stub.Register(registry_pb2.RegisterRequest(record=record))).lease
        assert (lease.worker_id, lease.epoch) == (record.worker_id, record.epoch)
        again = next(r for r in (await stub.List(registry_pb2.ListRequest())).records if r.worker_id == "worker-1")
        assert again == record


async def test_explain_has_every_term(cluster: Cluster, router: router_pb2_grpc.RouterAsyncStub) -> None:
    """Explain lists all ranks with the terms that make up their cost, and books nothing."""
    prompt = fresh_tokens(196)
    await idle(router)
    for _ in range(2):
        answer = await router.Explain(router_pb2.ExplainRequest(request=request(prompt)))
        assert sorted(c.dp_rank for c in answer.candidates) == list(RANKS)
        for c in answer.candidates:
            assert c.eligible
            assert c.prefill_blocks == (c.queued_prefill_tokens + 196 - c.overlap_blocks * 16) / 16
            assert c.cost == answer.overlap_weight * c.prefill_blocks + c.decode_blocks + c.recent == 24.25


async def idle(router: router_pb2_grpc.RouterAsyncStub) -> None:
    """Wait until nothing of earlier tests is booked or reported any more."""

    async def nothing_booked() -> bool:
        answer = await router.Explain(router_pb2.ExplainRequest(request=request([1] * 17)))
        assert {(c.queued_prefill_tokens, c.decode_blocks, c.running) for c in answer.candidates} == {(0, 1, 0)}
        return True

    await eventually(nothing_booked)


async def test_explain_a_recent_request(
    cluster: Cluster, router: router_pb2_grpc.RouterAsyncStub, generation: generate_pb2_grpc.GenerationAsyncStub
) -> None:
    """By its id, a request is explained as it was decided; an unknown id is NOT_FOUND."""
    answer = await generate(generation, request(fresh_tokens(50), request_id="explain-me", dp_rank=2))
    explained = await router.Explain(router_pb2.ExplainRequest(request_id="explain-me"))
    assert (explained.worker_id, explained.dp_rank) == answer.where == ("worker-0", 2)
    assert len(explained.candidates) == len(RANKS)
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await router.Explain(router_pb2.ExplainRequest(request_id="never-seen"))
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


async def test_route_is_idempotent_and_release_ends_it(router: router_pb2_grpc.RouterAsyncStub) -> None:
    """The same request_id gets the same answer while its reservation lives; a release counts once."""
    question = router_pb2.RouteRequest(request=request(fresh_tokens(100), request_id="route-me"))
    first = await router.Route(question)
    again = await router.Route(question)
    assert (again.reservation_id, again.worker_id, again.dp_rank) == (first.reservation_id, first.worker_id, first.dp_rank)
    assert (await router.Release(router_pb2.ReleaseRequest(reservation_id=first.reservation_id))).released
    assert not (await router.Release(router_pb2.ReleaseRequest(reservation_id=first.reservation_id))).released


async def test_look_aside(cluster: Cluster, router: router_pb2_grpc.RouterAsyncStub) -> None:
    """Route, then straight to the worker with the rank it named, gives the same as through the router."""
    prompt = fresh_tokens(100)
    route = await router.Route(router_pb2.RouteRequest(request=request(prompt)))
    async with rpc.open_channel(route.endpoint) as channel:
        stub = generate_pb2_grpc.GenerationStub(channel)
        answer = await generate(stub, request(prompt, dp_rank=route.dp_rank, reservation_id=route.reservation_id))
    assert answer.where == (route.worker_id, route.dp_rank)
    assert (await router.Release(router_pb2.ReleaseRequest(reservation_id=route.reservation_id))).released


async def test_events_and_loads_cross_nats(cluster: Cluster, generation: generate_pb2_grpc.GenerationAsyncStub) -> None:
    """KV events and loads are on their subjects, decodable by anybody, with global ranks."""
    batches: list[events_pb2.KvEventBatch] = []
    loads: list[events_pb2.RankLoad] = []

    async def on_message(message: Any) -> None:
        kind, worker_id, dp_rank = message.subject.split(".")[3:]
        sort = {"kv": events_pb2.KvEventBatch, "load": events_pb2.RankLoad}[kind]
        decoded = sort.FromString(message.data)
        assert (decoded.worker_id, str(decoded.dp_rank)) == (worker_id, dp_rank)
        (batches if kind == "kv" else loads).append(decoded)

    client = await nats.connect(cluster.nats_url)
    try:
        await client.subscribe("rankway.v1.default.kv.*.*", cb=on_message)
        await client.subscribe("rankway.v1.default.load.*.*", cb=on_message)
        await client.flush()
        await generate(generation, request(fresh_tokens(196), dp_rank=5))
        stored = await eventually(lambda: [b for b in batches if b.dp_rank == 5 and b.events[0].HasField("stored")])
        assert stored[0].worker_id == "worker-1"
        assert len(b"".join(e.stored.block_hashes for e in stored[0].events)) >= 12 * 8
        load = await eventually(lambda: [x for x in loads if x.dp_rank == 5 and x.kv_seq >= stored[0].seq])
        assert load[-1].total_blocks > load[-1].kv_block_count >= 12
    finally:
        await client.close()
