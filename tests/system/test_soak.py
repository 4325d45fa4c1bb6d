"""Many requests, many of them given up half-way: everything is back at its start afterwards."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator

import psutil
import pytest
from harness.calls import generate, http, request
from harness.cluster import OPTIONS, Cluster
from harness.metrics import leftovers
from harness.waiting import eventually

from rankway import rpc
from rankway.v1 import generate_pb2_grpc

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "1000"))
"""`make soak` sends 10,000."""
CLIENTS = 32
CANCELLED_SHARE = 0.2


@pytest.fixture
def quiet_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with a cache that is full soon and few log lines."""
    options = ("--log-level=warning", "--worker-args=--sim-speedup 20 --num-kv-blocks 512")
    cluster = Cluster(*OPTIONS[1:-1], *options, tmp_path=tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster.wait_ready()
    finally:
        assert cluster.stop() == 0


@pytest.mark.timeout(900)
async def test_soak(quiet_cluster: Cluster) -> None:
    """A fifth of the requests is cancelled at any stage; ledger, queues, streams, tasks, files and memory are as before."""
    cluster = quiet_cluster
    await run_load(cluster, max(REQUESTS // 4, 200), seed=1)  # caches fill, pools grow
    await eventually(lambda: left_over(cluster) == [], 10)
    before = footprint(cluster)
    completed, cancelled = await run_load(cluster, REQUESTS, seed=2)
    assert completed + cancelled == REQUESTS
    assert cancelled > REQUESTS * CANCELLED_SHARE / 2
    await eventually(lambda: left_over(cluster) == [], 10)
    after = footprint(cluster)
    for name, (tasks, files, memory_mib) in after.items():
        assert tasks <= before[name][0] + 2, (name, before, after)
        assert files <= before[name][1] + 2, (name, before, after)
        assert memory_mib <= before[name][2] + 15, (name, before, after)


async def run_load(cluster: Cluster, count: int, seed: int) -> tuple[int, int]:
    """Send `count` requests, some with a shared prefix; how many ended well and how many were given up on purpose."""
    rng = random.Random(seed)
    numbers = iter(range(count))
    tally = [0, 0]

    async def client(stub: generate_pb2_grpc.GenerationAsyncStub) -> None:
        for _ in numbers:
            prefix = [rng.randrange(4)] * 16 * rng.randrange(12)
            prompt = prefix + [rng.randrange(256) for _ in range(rng.randrange(1, 200))]
            call = generate(stub, request(prompt, max_tokens=rng.randrange(1, 40)))
            if rng.random() >= CANCELLED_SHARE:
                await call
                tally[0] += 1
                continue
            task = asyncio.create_task(call)
            done, _ = await asyncio.wait([task], timeout=rng.random() * 0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            tally[0 if done else 1] += 1

    # The generator is shared: its values are drawn one by one on one event loop.
    async with rpc.open_channel(cluster.router) as channel, asyncio.TaskGroup() as clients:
        stub = generate_pb2_grpc.GenerationStub(channel)
        for _ in range(CLIENTS):
            clients.create_task(client(stub))
    return tally[0], tally[1]


def left_over(cluster: Cluster) -> list[str]:
    """What is under way, by the metrics of the router and the workers."""
    return [
        line
        for service in ("router", "worker-0", "worker-1")
        for line in leftovers(http(cluster.metrics_url(service)).body.decode())
    ]


def footprint(cluster: Cluster) -> dict[str, tuple[int, int, float]]:
    """Tasks (the router tells), open files and resident MiB of each service."""
    metrics = http(cluster.metrics_url("router")).body.decode()
    tasks = int(float(next(line for line in metrics.splitlines() if line.startswith("rankway_router_tasks")).split()[1]))
    result = {}
    for name in ("registry", "indexer", "worker-0", "worker-1", "router"):
        process = psutil.Process(cluster.pid(name))
        result[name] = (tasks if name == "router" else 0, process.num_fds(), process.memory_info().rss / 2**20)
    return result
