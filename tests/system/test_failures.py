"""The failure table: what a user sees when a part of the cluster goes away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from harness.calls import Answer, fresh_tokens, generate, http, request
from harness.cluster import OPTIONS, Cluster
from harness.load import reference, steady_load
from harness.waiting import eventually
from openai import AsyncOpenAI

from rankway import rpc
from rankway.v1 import generate_pb2_grpc, registry_pb2, registry_pb2_grpc, router_pb2, router_pb2_grpc

LEASE_S = 5.0
OUTAGE_S = float(os.environ.get("OUTAGE_S", LEASE_S + 1.5))
"""How long a part stays away; `make soak` makes it 30 s."""


@pytest.fixture(scope="module")
def mended_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose parts these tests kill, each part once, and start again with `again`."""
    cluster = Cluster(*OPTIONS, tmp_path=tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster.wait_ready()
    finally:
        assert cluster.stop() == 0


@pytest.fixture(scope="module")
def again(mended_cluster: Cluster) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Services that the tests start again themselves; they end before the cluster."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.terminate()
    for process in started:
        process.wait(30)


async def test_a_killed_worker_is_gone_within_its_lease(mended_cluster: Cluster, again: list[subprocess.Popen[bytes]]) -> None:
    """kill -9: ranks, blocks, loads and series go, no request notices; started again, its old cache is not believed."""
    cluster = mended_cluster
    prompt = fresh_tokens(196)
    async with rpc.open_channel(cluster.router) as channel:
        stub = generate_pb2_grpc.GenerationStub(channel)
        assert (await generate(stub, request(prompt, dp_rank=6))).where == ("worker-1", 6)
        await eventually(lambda: ranks_in_metrics(cluster, "router") == set(map(str, range(8))))
        os.kill(cluster.pid("worker-1"), signal.SIGKILL)
        answers = [await generate(stub, request(prompt)) for _ in range(20)]
        # A request that was sent to it before its end was seen has moved on its own.
        assert {answer.routed.worker_id for answer in answers[5:]} == {"worker-0"}

        async def forgotten() -> bool:
            assert await registered(cluster) == {"worker-0"}
            assert ranks_in_metrics(cluster, "router") <= set(map(str, range(4)))
            assert ranks_in_metrics(cluster, "indexer") <= set(map(str, range(4)))
            return True

        await eventually(forgotten, LEASE_S + 2)

        again.append(cluster.start_again("worker-1"))

        async def used() -> bool:
            explain = router_pb2_grpc.RouterStub(channel)
            answer = await explain.Explain(router_pb2.ExplainRequest(request=request(prompt)))
            back = [c for c in answer.candidates if c.worker_id == "worker-1"]
            assert len(back) == 4
            assert all(c.eligible and c.overlap_blocks == 0 for c in back)
            return True

        await eventually(used, 15)
        fresh = await generate(stub, request(prompt, dp_rank=6))
        assert (fresh.where, fresh.usage.cached_tokens) == (("worker-1", 6), 0)


async def registered(cluster: Cluster) -> set[str]:
    async with rpc.open_channel(cluster.address("registry")) as channel:
        answer = await registry_pb2_grpc.RegistryStub(channel).List(registry_pb2.ListRequest(), timeout=5, wait_for_ready=True)
    return {record.worker_id for record in answer.records}


def ranks_in_metrics(cluster: Cluster, service: str) -> set[str]:
    """The dp_rank labels among the service's series."""
    text = http(cluster.metrics_url(service)).body.decode()
    return {line.partition('dp_rank="')[2].partition('"')[0] for line in text.splitlines() if 'dp_rank="' in line}


@pytest.mark.parametrize("service", ["nats", "registry", "indexer"])
async def test_a_stopped_part_fails_no_request(
    mended_cluster: Cluster, again: list[subprocess.Popen[bytes]], service: str
) -> None:
    """NATS, registry or indexer killed under load for longer than a lease: no request fails, and all repair once it is back."""
    cluster = mended_cluster
    async with steady_load(cluster.router) as load:
        await load.more(30)
        os.kill(cluster.pid(service), signal.SIGKILL)
        await asyncio.sleep(OUTAGE_S)  # what is tested is this time without the service
        await load.more(30)
        again.append(cluster.start_again(service))
        await load.more(30)

        async def repaired() -> bool:
            assert await registered(cluster) == {"worker-0", "worker-1"}
            return True

        await eventually(repaired, 15)
        await load.more(30)
    assert load.failures == []

    prompt = fresh_tokens(196)
    async with rpc.open_channel(cluster.router) as channel:
        stub = generate_pb2_grpc.GenerationStub(channel)

        async def cached() -> bool:
            answer = await generate(stub, request(prompt))
            return answer.routed.overlap_blocks == 12 and answer.usage.cached_tokens == 192

        await eventually(cached, 10)


@pytest.mark.parametrize("when", ["before the first token", "in mid-stream"])
async def test_a_worker_killed_under_fifty_streams_loses_nothing(paced_cluster: Cluster, when: str) -> None:
    """No stream fails, and each gives the very text that it gives on a calm cluster: nothing lost, doubled or cut off."""
    cluster = paced_cluster
    prompts = [fresh_tokens(64 if when == "in mid-stream" else 1200) for _ in range(50)]
    max_tokens = 200 if when == "in mid-stream" else 8
    expected = await reference(cluster.router, prompts, max_tokens)
    answers = [Answer() for _ in prompts]
    async with rpc.open_channel(cluster.router) as channel, asyncio.TaskGroup() as streams:
        stub = generate_pb2_grpc.GenerationStub(channel)
        for prompt, answer in zip(prompts, answers, strict=True):
            asked = request(prompt, max_tokens=max_tokens, cache_salt="x")
            streams.create_task(generate(stub, asked, timeout_s=60, answer=answer))
        if when == "in mid-stream":
            await eventually(lambda: sum(a.routed.worker_id == "worker-1" and a.text != "" for a in answers) >= 10, 30)
        os.kill(cluster.pid("worker-1"), signal.SIGKILL)
    assert [a.text for a in answers] == [e.text for e in expected]
    assert [a.tokens for a in answers] == [e.tokens for e in expected]
    assert {a.usage.prompt_tokens for a in answers} == {len(prompts[0])}
    assert {a.usage.completion_tokens for a in answers} == {max_tokens}
    assert when != "in mid-stream" or any(a.finished.migrations for a in answers if a.finished)


async def test_http_streams_survive_a_killed_worker_too(paced_cluster: Cluster) -> None:
    """The same over SSE with the official client: whole texts, one finish_reason each, the usage right."""
    cluster = paced_cluster
    prompts = [f"{number:04d}" + "x" * 60 for number in range(40)]
    client = AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="any", max_retries=0)

    begun: set[str] = set()

    async def stream(prompt: str, salt: str) -> tuple[str, list[str], int]:
        text, reasons, used = "", [], 0
        body = {"cache_salt": salt, "ignore_eos": True}
        options = {"include_usage": True}
        async for chunk in await client.completions.create(
            model="sim", prompt=prompt, max_tokens=200, temperature=0, stream=True, stream_options=options, extra_body=body
        ):
            for choice in chunk.choices:
                text += choice.text
                begun.add(prompt + salt)
                reasons += [choice.finish_reason] if choice.finish_reason else []
            used = chunk.usage.completion_tokens if chunk.usage else used
        return text, reasons, used

    async with client:
        expected = await asyncio.gather(*(stream(prompt, "calm") for prompt in prompts))
        streams = [asyncio.create_task(stream(prompt, "storm")) for prompt in prompts]
        await eventually(lambda: sum(prompt + "storm" in begun for prompt in prompts) >= 20, 30)
        os.kill(cluster.pid("worker-0"), signal.SIGKILL)
        answers = await asyncio.gather(*streams)
    assert [answer[0] for answer in answers] == [answer[0] for answer in expected]
    assert {(tuple(reasons), used) for _, reasons, used in answers} == {(("length",), 200)}


async def test_four_routers_under_a_burst_do_not_herd(mended_cluster: Cluster, again: list[subprocess.Popen[bytes]]) -> None:
    """A burst of 64 equal requests at each of four routers: no rank of eight gets more than twice the mean."""
    cluster = mended_cluster
    others = [OtherRouter(cluster, number) for number in range(3)]
    again += [router.process for router in others]
    endpoints = [cluster.router, *[await router.endpoint() for router in others]]
    counts: Counter[tuple[str, int]] = Counter()

    async def burst(endpoint: str) -> None:
        async with rpc.open_channel(endpoint) as channel:
            stub = generate_pb2_grpc.GenerationStub(channel)
            answers = await asyncio.gather(*(generate(stub, request(fresh_tokens(64), max_tokens=32)) for _ in range(64)))
        counts.update(answer.where for answer in answers)

    await asyncio.gather(*map(burst, endpoints))
    assert counts.total() == 256
    assert max(counts.values()) <= 2 * 256 / 8, counts


class OtherRouter:
    """One more router beside the cluster's own."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        read, write = os.pipe()
        options = [
            f"--router-id=other-{number}",
            "--grpc-listen=127.0.0.1:0",
            "--http-listen=127.0.0.1:0",
            f"--nats-url={cluster.nats_url}",
            f"--registry-endpoints={cluster.address('registry')}",
            f"--indexer-endpoints={cluster.address('indexer')}",
        ]
        self._ready = read
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rankway", "router", *options],
            env={**os.environ, "RANKWAY_READY_FD": str(write)},
            pass_fds=(write,),
            stderr=subprocess.DEVNULL,
        )
        os.close(write)

    async def endpoint(self) -> str:
        """host:port of its gRPC API, once it is ready."""
        with os.fdopen(self._ready) as ready:
            line = await asyncio.to_thread(ready.readline)
        return str(json.loads(line)["grpc"])
