"""Bad input through both front doors: one clear error that names field and value, nothing booked, services healthy after."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.calls import fresh_tokens, generate, http, request
from harness.cluster import Cluster
from harness.waiting import eventually

from rankway import rpc
from rankway.v1 import generate_pb2, generate_pb2_grpc, router_pb2, router_pb2_grpc, types_pb2

VOCABULARY = 512
"""Of the byte-level tokenizer."""


def sampled(**parameters: Any) -> Callable[[], generate_pb2.GenerateRequest]:
    """A request with these sampling parameters."""
    return lambda: request([1, 2, 3], sampling=types_pb2.SamplingParams(**parameters))


GRPC: list[tuple[str, Callable[[], generate_pb2.GenerateRequest], str, list[str]]] = [
    ("no prompt", generate_pb2.GenerateRequest, "INVALID_ARGUMENT", ["prompt"]),
    ("empty prompt", lambda: request([]), "INVALID_ARGUMENT", ["token_ids"]),
    ("empty text", lambda: request(""), "INVALID_ARGUMENT", ["text"]),
    ("no messages", lambda: generate_pb2.GenerateRequest(chat=types_pb2.ChatMessages()), "INVALID_ARGUMENT", ["chat"]),
    ("token id out of range", lambda: request([1, VOCABULARY]), "INVALID_ARGUMENT", ["token_ids", "512"]),
    (
        "ids and packed",
        lambda: generate_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[1], packed=b"\1\0\0\0")),
        "INVALID_ARGUMENT",
        ["packed"],
    ),
    (
        "packed, not a multiple of four",
        lambda: generate_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(packed=b"\1\0\0")),
        "INVALID_ARGUMENT",
        ["packed", "3"],
    ),
    ("prompt beyond max_model_len", lambda: request([1] * 2_000_000), "INVALID_ARGUMENT", ["2000000"]),
    ("prompt and max_tokens beyond it", lambda: request([1, 2], max_tokens=50_000_000), "INVALID_ARGUMENT", ["max_tokens"]),
    ("max_tokens 0", sampled(max_tokens=0), "INVALID_ARGUMENT", ["max_tokens", "0"]),
    ("max_tokens negative", sampled(max_tokens=-1), "INVALID_ARGUMENT", ["max_tokens", "-1"]),
    ("temperature too high", sampled(temperature=2.5), "INVALID_ARGUMENT", ["temperature", "2.5"]),
    ("temperature not a number", sampled(temperature=float("nan")), "INVALID_ARGUMENT", ["temperature", "nan"]),
    ("top_p 0", sampled(top_p=0), "INVALID_ARGUMENT", ["top_p", "0"]),
    ("n 0", sampled(n=0), "INVALID_ARGUMENT", ["n=0"]),
    ("five stop strings", sampled(stop=list("abcde")), "INVALID_ARGUMENT", ["stop", "5"]),
    ("unknown model", lambda: request([1], model="gpt-nowhere"), "NOT_FOUND", ["gpt-nowhere"]),
    ("unknown worker", lambda: request([1], worker_id="worker-9"), "NOT_FOUND", ["worker-9"]),
    ("unknown group", lambda: request([1], dp_group="nowhere"), "NOT_FOUND", ["nowhere"]),
    ("unsafe worker_id", lambda: request([1], worker_id="a.*.>"), "INVALID_ARGUMENT", ["worker_id", "a.*.>"]),
    ("unsafe group", lambda: request([1], dp_group="a b"), "INVALID_ARGUMENT", ["dp_group", "a b"]),
    ("long request_id", lambda: request([1], request_id="x" * 129), "INVALID_ARGUMENT", ["request_id"]),
    ("rank outside", lambda: request([1], dp_rank=8), "OUT_OF_RANGE", ["dp_rank=8", "[0, 8)"]),
    ("rank of another worker", lambda: request([1], dp_rank=1, worker_id="worker-1"), "OUT_OF_RANGE", ["dp_rank=1", "[4, 8)"]),
    ("a rank of 32 bits", lambda: request([1], dp_rank=2**32 - 1), "OUT_OF_RANGE", ["4294967295"]),
]

HELLO = {"prompt": "Hello", "max_tokens": 2}
HTTP: list[tuple[str, str, Any, dict[str, str], int, list[str]]] = [
    ("malformed JSON", "completions", b'{"prompt": ', {}, 400, ["JSON"]),
    ("not an object", "completions", b"[1, 2]", {}, 400, []),
    ("no body", "completions", b"", {}, 400, []),
    ("not UTF-8", "completions", b'{"prompt": "\xff"}', {}, 400, []),
    ("no prompt", "completions", {}, {}, 400, ["prompt"]),
    ("empty prompt", "completions", HELLO | {"prompt": ""}, {}, 400, ["prompt"]),
    ("empty ids", "completions", HELLO | {"prompt": []}, {}, 400, ["prompt"]),
    ("a number as prompt", "completions", HELLO | {"prompt": 5}, {}, 400, ["prompt"]),
    ("token id negative", "completions", HELLO | {"prompt": [1, -1]}, {}, 400, ["prompt", "-1"]),
    ("token id out of range", "completions", HELLO | {"prompt": [1, 512]}, {}, 400, ["512"]),
    ("token id of 40 bits", "completions", HELLO | {"prompt": [2**40]}, {}, 400, []),
    ("prompt beyond max_model_len", "completions", HELLO | {"prompt": "x" * 2_000_000}, {}, 400, ["2000000"]),
    ("prompt and max_tokens beyond it", "completions", HELLO | {"max_tokens": 50_000_000}, {}, 400, ["max_tokens"]),
    ("max_tokens 0", "completions", HELLO | {"max_tokens": 0}, {}, 400, ["max_tokens", "0"]),
    ("max_tokens negative", "completions", HELLO | {"max_tokens": -5}, {}, 400, ["max_tokens", "-5"]),
    ("max_tokens a text", "completions", HELLO | {"max_tokens": "many"}, {}, 400, ["max_tokens"]),
    ("temperature", "completions", HELLO | {"temperature": -1}, {}, 400, ["temperature", "-1"]),
    ("stream a text", "completions", HELLO | {"stream": "yes"}, {}, 400, ["stream"]),
    ("unknown field", "completions", HELLO | {"max_tokenz": 3}, {}, 400, ["max_tokenz"]),
    ("unknown model", "completions", HELLO | {"model": "gpt-nowhere"}, {}, 404, ["gpt-nowhere"]),
    ("unknown role type", "chat/completions", {"messages": [{"role": 1, "content": "a"}]}, {}, 400, ["role"]),
    ("no messages", "chat/completions", {}, {}, 400, ["messages"]),
    ("empty messages", "chat/completions", {"messages": []}, {}, 400, ["messages"]),
    ("rank a text", "completions", HELLO, {"x-rankway-dp-rank": "five"}, 400, ["five"]),
    ("rank negative", "completions", HELLO, {"x-rankway-dp-rank": "-1"}, 400, ["-1", "[0, 8)"]),
    ("rank outside", "completions", HELLO, {"x-rankway-dp-rank": "8"}, 400, ["8", "[0, 8)"]),
    ("unsafe worker", "completions", HELLO, {"x-rankway-worker-id": "a.b"}, 400, ["a.b"]),
    ("unknown worker", "completions", HELLO, {"x-rankway-worker-id": "worker-9"}, 404, ["worker-9"]),
]


@pytest.mark.parametrize(("make", "code", "named"), [case[1:] for case in GRPC], ids=[case[0] for case in GRPC])
async def test_grpc(
    cluster: Cluster,
    generation: generate_pb2_grpc.GenerationAsyncStub,
    make: Callable[[], generate_pb2.GenerateRequest],
    code: str,
    named: list[str],
) -> None:
    """Generate, Route and Explain refuse alike, with the field and its value in the message."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate(generation, make())
    assert refused.value.code().name == code, refused.value.details()
    assert all(name in str(refused.value.details()) for name in named), refused.value.details()
    async with rpc.open_channel(cluster.router) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as not_routed:
            await router_pb2_grpc.RouterStub(channel).Route(router_pb2.RouteRequest(request=make()))
    assert (not_routed.value.code(), not_routed.value.details()) == (refused.value.code(), refused.value.details())


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "named"), [case[1:] for case in HTTP], ids=[case[0] for case in HTTP]
)
def test_http(cluster: Cluster, path: str, body: Any, headers: dict[str, str], status: int, named: list[str]) -> None:
    """The answer is OpenAI's error object with the right status."""
    answer = http(f"{cluster.http}/v1/{path}", body, headers)
    assert answer.status == status, answer.body
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert all(name in json.dumps(error) for name in named), error


async def test_unknown_enum_and_unknown_fields_harm_nobody(cluster: Cluster) -> None:
    """Bytes that are no request are refused as such; fields of a newer client are passed over."""
    async with rpc.open_channel(cluster.router) as channel:
        raw = channel.unary_stream("/rankway.v1.Generation/Generate", request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in raw(b"\xff\xff\xff\xff", timeout=5):
                pass
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "GenerateRequest" in str(refused.value.details())
        newer = request(fresh_tokens(20)).SerializeToString() + b"\xfa\x3f\x03new"
        assert [event async for event in raw(newer, timeout=10)]


async def test_healthy_and_nothing_booked_after(
    cluster: Cluster, generation: generate_pb2_grpc.GenerationAsyncStub, router: router_pb2_grpc.RouterAsyncStub
) -> None:
    """After bad input of every kind all services serve and no rank carries a load."""
    for _, make, _, _ in GRPC:
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(generation, make())

    async def idle() -> bool:
        answer = await router.Explain(router_pb2.ExplainRequest(request=request(fresh_tokens(16))))
        assert {(c.queued_prefill_tokens, c.decode_blocks, c.running, c.waiting) for c in answer.candidates} == {(0, 1, 0, 0)}
        return True

    await eventually(idle)
    for service in ("registry", "indexer", "worker-0", "worker-1", "router"):
        async with rpc.open_channel(cluster.address(service)) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            name = f"rankway.v1.{service.partition('-')[0].capitalize()}"
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, service
    failures = [record for record in cluster.records() if record.get("level") == "error" or "handler failed" in record["event"]]
    assert failures == []
