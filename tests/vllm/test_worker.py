"""`rankway worker --engine vllm` as a process: its life, its death, and what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from harness import calls
from harness.nats import NatsServer
from harness.registry import Replica
from harness.vllm_engines import QUICK_FLAGS
from harness.vllm_worker import VllmWorker
from harness.waiting import eventually, free_port

from rankway import rpc
from rankway.registry.settings import RegistrySettings
from rankway.v1 import generate_pb2_grpc, registry_pb2, registry_pb2_grpc, worker_pb2, worker_pb2_grpc

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

LEASE_TTL_S = 3
Start = Callable[..., VllmWorker]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def registry(shared_nats: NatsServer) -> AsyncIterator[Replica]:
    settings = RegistrySettings(
        grpc_listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", nats_url=shared_nats.url, lease_ttl_s=LEASE_TTL_S, bucket="vllm"
    )
    replica = Replica(settings)
    await replica.wait_ready()
    yield replica
    await replica.stop()


@pytest.fixture(scope="module")
def start(
    tiny_model: str, shared_nats: NatsServer, registry: Replica, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Starts a worker; engine flags beyond the quick ones come first, options of the worker by name."""
    workers: list[VllmWorker] = []

    def start(*flags: str, **options: object) -> VllmWorker:
        given = {
            "model": tiny_model,
            "worker_id": f"w{len(workers)}",
            "dp_group": f"g{len(workers)}",
            "nats_url": shared_nats.url,
            "registry_endpoints": registry.endpoint,
            **options,
        }
        argv = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        log = tmp_path_factory.mktemp("worker") / "log"
        workers.append(VllmWorker(argv, [*QUICK_FLAGS, "--num-gpu-blocks-override=64", *flags], log))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(start: Start) -> VllmWorker:
    """An independent engine that is global rank 5 of 8."""
    return await ready(start(data_parallel_size=8, start_rank=5, size=1))


async def ready(worker: VllmWorker) -> VllmWorker:
    """Wait without stopping the registry, which lives on the same event loop."""
    return await asyncio.to_thread(worker.wait_ready)


@contextlib.asynccontextmanager
async def stubs(
    worker: VllmWorker,
) -> AsyncIterator[tuple[generate_pb2_grpc.GenerationAsyncStub, worker_pb2_grpc.WorkerAsyncStub]]:
    async with rpc.open_channel(worker.addresses["grpc"]) as channel:
        yield generate_pb2_grpc.GenerationStub(channel), worker_pb2_grpc.WorkerStub(channel)


async def members(registry: Replica) -> dict[str, registry_pb2.WorkerRecord]:
    async with rpc.open_channel(registry.endpoint) as channel:
        listed = await registry_pb2_grpc.RegistryStub(channel).List(registry_pb2.ListRequest())
        return {record.worker_id: record for record in listed.records}


async def test_the_record_tells_the_truth_about_the_engine(worker: VllmWorker, registry: Replica) -> None:
    """A dense engine without DP flags is registered with the window that Rankway's own options assign."""
    record = (await members(registry))["w0"]
    assert (record.dp_range.start_rank, record.dp_range.size, record.data_parallel_size) == (5, 1, 8)
    assert (record.engine, record.engine_version) == ("vllm", "0.32.0")
    assert (record.block_size, record.total_kv_blocks, record.max_num_seqs, record.max_model_len) == (32, 63, 8, 1024)


async def test_foreign_ranks_are_refused_before_the_engine_sees_them(worker: VllmWorker) -> None:
    """A rank outside the window is OUT_OF_RANGE naming the window: also 0, which is vLLM's own number of this rank."""
    async with stubs(worker) as (generation, _):
        for dp_rank in (0, 4, 6):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await calls.generate(generation, calls.request([1, 2, 3], dp_rank=dp_rank))
            assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
            assert "[5, 6)" in (refused.value.details() or "")
        answer = await calls.generate(generation, calls.request([1, 2, 3], dp_rank=5))
        assert answer.usage.completion_tokens == 4


async def test_a_reset_of_an_idle_engine_is_known_at_once(worker: VllmWorker) -> None:
    """ResetPrefixCache empties the worker's snapshot although vLLM announces its clear only with its next step."""
    tokens = calls.fresh_tokens(100)

    async def held(admin: worker_pb2_grpc.WorkerAsyncStub) -> int:
        return [chunk.kv_block_count async for chunk in admin.Snapshot(worker_pb2.SnapshotRequest(dp_rank=5))][-1]

    async with stubs(worker) as (generation, admin):
        await calls.generate(generation, calls.request(tokens, dp_rank=5))
        await eventually(lambda: held(admin))
        reset = await admin.ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(dp_rank=5))
        assert list(reset.dp_ranks) == [5]
        assert await held(admin) == 0
        answer = await calls.generate(generation, calls.request(tokens, dp_rank=5))
        assert answer.usage.cached_tokens == 0
        answer = await calls.generate(generation, calls.request(tokens, dp_rank=5))
        assert answer.usage.cached_tokens == 96


async def test_sigterm_drains(worker: VllmWorker, registry: Replica) -> None:
    """A running request finishes, the worker deregisters and exits 0, and no process of vLLM is left."""
    worker.family()
    async with stubs(worker) as (generation, _):
        running = asyncio.create_task(calls.generate(generation, calls.request([1, 2, 3], max_tokens=400), timeout_s=60))
        await asyncio.sleep(0)
        await eventually(lambda: worker.says("no dp_rank: vLLM balances inside the window"))
        worker.terminate()
        answer = await running
    assert answer.usage.completion_tokens == 400
    assert await asyncio.to_thread(worker.wait, 30) == 0
    assert "w0" not in await members(registry)
    assert worker.survivors() == []


async def test_a_killed_engine_ends_the_worker_with_the_cause(start: Start, registry: Replica) -> None:
    """kill -9 of the EngineCore: requests end with a clear status, the worker leaves the registry and exits with the cause."""
    worker = await ready(start(worker_id="doomed"))
    worker.family()
    assert "doomed" in await members(registry)
    async with stubs(worker) as (generation, _):
        running = asyncio.create_task(calls.generate(generation, calls.request([1, 2, 3], max_tokens=900), timeout_s=60))
        await eventually(lambda: worker.says("no dp_rank: vLLM balances inside the window"))
        (victim,) = worker.engine_cores()
        victim.kill()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await running
    assert ended.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
    assert await asyncio.to_thread(worker.wait, 30) == 1
    cause = f"vLLM's process EngineCore (pid {victim.pid}) ended with signal 9"
    assert cause in worker.records()[-1]["error"]

    async def gone() -> bool:
        return "doomed" not in await members(registry)

    await eventually(gone, timeout_s=LEASE_TTL_S + 2)
    assert worker.survivors() == []


async def test_a_worker_that_waits_for_rank_zero_says_so_and_can_be_stopped(start: Start) -> None:
    """A hybrid window with start > 0 alone: the log says who is awaited, and SIGTERM leaves no process behind."""
    flags = (
        "--data-parallel-size=4",
        "--data-parallel-size-local=2",
        "--data-parallel-start-rank=2",
        "--data-parallel-hybrid-lb",
    )
    worker = start(*flags, f"--data-parallel-rpc-port={free_port()}")

    def waits() -> bool:
        said = [str(record.get("doing", "")) for record in worker.records()]
        return any("waits for the process that owns global rank 0" in doing for doing in said)

    await eventually(waits, timeout_s=120)
    await eventually(lambda: len(worker.spawned()) == 2, timeout_s=120)
    worker.terminate()
    assert await asyncio.to_thread(worker.wait, 30) == 0
    assert worker.survivors() == []


async def test_a_worker_that_is_killed_takes_its_engine_along(start: Start) -> None:
    """kill -9 of the worker itself: vLLM's processes notice and end, so that memory and GPUs are free again."""
    worker = await ready(start(worker_id="killed"))
    assert len(worker.family()) > 1
    worker.process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(worker.wait, 10)
    assert worker.survivors(15) == []


async def test_wrong_flags_end_the_worker_with_one_line(start: Start) -> None:
    """What vLLM would drop in silence ends the start, with the flag's name in the last log line."""
    worker = start("--data-parallel-size=8", "--data-parallel-start-rank=4")
    assert await asyncio.to_thread(worker.wait, 120) == 1
    assert "--data-parallel-start-rank=4" in worker.records()[-1]["error"]
