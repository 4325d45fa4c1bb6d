"""The worker's life: admin calls, drain, stop, the end of its engine, a newer instance."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import struct
import subprocess
import sys
import urllib.request
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.waiting import eventually
from harness.worker import FakeRegistry, LiveWorker, live_worker

from rankway.errors import EngineFailed, Outdated, RankwayError
from rankway.tokenizer import Tokenizer
from rankway.v1 import generate_pb2, registry_pb2, types_pb2, worker_pb2
from rankway.worker import engines
from rankway.worker.settings import WorkerSettings
from rankway.worker.sim_engine import SimEngine
from rankway.worker.sim_tokens import WORDS

Registry = tuple[FakeRegistry, str]


def request(max_tokens: int = 20, **fields: Any) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=range(1, 50)), sampling=types_pb2.SamplingParams(max_tokens=max_tokens), **fields
    )


async def generate(worker: LiveWorker, **fields: Any) -> list[generate_pb2.GenerateResponse]:
    return [event async for event in worker.generation.Generate(request(**fields))]


async def rest(call: Any) -> list[generate_pb2.GenerateResponse]:
    """What a call that `read` has begun still brings."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def snapshot(worker: LiveWorker, dp_rank: int) -> tuple[int, list[int], worker_pb2.SnapshotResponse]:
    chunks = [chunk async for chunk in worker.worker.Snapshot(worker_pb2.SnapshotRequest(dp_rank=dp_rank))]
    data = b"".join(chunk.block_hashes for chunk in chunks)
    return chunks[-1].seq, list(struct.unpack(f"<{len(data) // 8}Q", data)), chunks[-1]


async def test_the_record_says_what_the_engine_is(worker: LiveWorker) -> None:
    """A worker registers as READY with its window, the engine's limits and the tokenizer's fingerprint."""
    record = worker.record
    assert (record.worker_id, record.endpoint, record.state) == ("w1", worker.addresses["grpc"], registry_pb2.WORKER_STATE_READY)
    assert (record.dp_range.start_rank, record.dp_range.size, record.data_parallel_size) == (4, 4, 8)
    assert (record.block_size, record.total_kv_blocks, record.max_model_len) == (16, 256, 2048)
    assert (record.engine, record.tokenizer, record.vocab_size, record.model) == ("sim", "bytes", 512, "sim")


async def test_health_tells_readiness(worker: LiveWorker) -> None:
    """The services are SERVING once registered."""
    health = health_pb2_grpc.HealthStub(worker.channel)
    for name in ("", "rankway.v1.Worker", "rankway.v1.Generation"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_snapshot_is_what_the_rank_holds(worker: LiveWorker) -> None:
    """Snapshot gives a rank's blocks as of its seq, parents first, also when there are none; other ranks are refused."""
    assert (await snapshot(worker, 5))[:2] == (0, [])
    await generate(worker, dp_rank=5)
    seq, blocks, last = await snapshot(worker, 5)
    assert seq > 0
    assert len(blocks) == last.kv_block_count == 4
    assert last.epoch == worker.record.epoch
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await snapshot(worker, 8)
    assert error.value.code() == grpc.StatusCode.OUT_OF_RANGE


async def test_the_byte_level_tokenizer_has_no_files(worker: LiveWorker) -> None:
    """GetTokenizer says by an empty file name that the built-in tokenizer serves."""
    (only,) = [part async for part in worker.worker.GetTokenizer(worker_pb2.GetTokenizerRequest())]
    assert (only.file, only.data, only.fingerprint) == ("", b"", "bytes")


async def test_a_models_tokenizer_travels_in_chunks(registry: Registry, tokenizer_directory: str) -> None:
    """GetTokenizer hands out the files of the model's tokenizer, the record its fingerprint; answers decode with it as words."""
    async with live_worker(registry, model=tokenizer_directory) as worker:
        files: dict[str, bytes] = {}
        chunks = 0
        async for part in worker.worker.GetTokenizer(worker_pb2.GetTokenizerRequest()):
            files[part.file] = files.get(part.file, b"") + part.data
            chunks += 1
        assert chunks > len(files)
        tokenizer = Tokenizer.from_files(files)
        assert tokenizer.fingerprint == worker.record.tokenizer != "bytes"
        assert (worker.record.model, worker.record.vocab_size) == ("tiny", tokenizer.vocab_size)
        events = await generate(worker, max_tokens=60)
        text = "".join(event.delta.text for event in events)
        assert set(text.split()[:-1]) <= set(WORDS)
        assert events[-1].finished.usage.completion_tokens == 60


async def test_a_reset_is_known_at_once(worker: LiveWorker) -> None:
    """ResetPrefixCache empties one rank, or all, in the engine and in the mirror, although the engine is idle."""
    for rank in (4, 5, 6):
        await generate(worker, dp_rank=rank)
    one = await worker.worker.ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(dp_rank=5))
    assert list(one.dp_ranks) == [5]
    assert (await snapshot(worker, 5))[1] == []
    assert (await snapshot(worker, 4))[1] != []
    everything = await worker.worker.ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest())
    assert list(everything.dp_ranks) == [4, 5, 6, 7]
    assert (await snapshot(worker, 4))[1] == []
    assert (await generate(worker, dp_rank=4))[-1].finished.usage.cached_tokens == 0


async def test_one_rank_drains_and_comes_back(slow_worker: LiveWorker) -> None:
    """A draining rank finishes what runs, refuses what is new, and the record names it; undo takes it back."""
    call = slow_worker.generation.Generate(request(max_tokens=10, dp_rank=4))
    await call.read()
    answer = await slow_worker.worker.Drain(worker_pb2.DrainRequest(dp_rank=4))
    assert answer.running == 1
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await generate(slow_worker, dp_rank=4)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    await eventually(lambda: list(slow_worker.record.draining_ranks) == [4])
    assert (await rest(call))[-1].HasField("finished")
    assert (await slow_worker.worker.Drain(worker_pb2.DrainRequest(dp_rank=4, undo=True))).running == 0
    await generate(slow_worker, max_tokens=1, dp_rank=4)
    await eventually(lambda: list(slow_worker.record.draining_ranks) == [])


async def test_a_drained_worker_finishes_deregisters_and_ends(slow_worker: LiveWorker) -> None:
    """Drain of the worker: running requests finish, new ones are refused, then it deregisters and its run returns."""
    call = slow_worker.generation.Generate(request(max_tokens=10))
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await slow_worker.worker.Drain(worker_pb2.DrainRequest(undo=True))
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert (await slow_worker.worker.Drain(worker_pb2.DrainRequest())).running == 1
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await generate(slow_worker)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert (await rest(call))[-1].HasField("finished")
    await asyncio.wait_for(slow_worker.task, 5)
    assert registry_pb2.WORKER_STATE_DRAINING in slow_worker.registry.states
    assert slow_worker.registry.records == {}


async def test_a_stop_ends_what_is_not_done_by_the_drain_timeout(registry: Registry) -> None:
    """What still runs after the drain timeout ends with UNAVAILABLE: a router moves it to another target."""
    async with live_worker(registry, sim_speedup=1.0, sim_decode_ms=50.0, drain_timeout_s=0.2) as worker:
        call = worker.generation.Generate(request(max_tokens=1000))
        await call.read()
        worker.stop.set()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rest(call)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(worker.task, 5)
        assert worker.registry.records == {}


class DyingEngine(SimEngine):
    """A simulator that dies when told to."""

    death: asyncio.Event

    async def run(self) -> None:
        self.death = asyncio.Event()
        serving = asyncio.create_task(super().run())
        await self.death.wait()
        serving.cancel()
        raise EngineFailed("rank 2 ran out of luck")


async def test_the_death_of_the_engine_ends_requests_and_the_worker(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end with UNAVAILABLE and the cause, the worker deregisters, and its run raises the cause."""
    monkeypatch.setattr(engines, "SimEngine", DyingEngine)
    async with live_worker(registry, sim_speedup=1.0, sim_decode_ms=50.0) as worker:
        call = worker.generation.Generate(request(max_tokens=1000))
        await call.read()
        worker.engine.death.set()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rest(call)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "ran out of luck" in (error.value.details() or "")
        with pytest.raises(EngineFailed, match="ran out of luck"):
            await asyncio.wait_for(worker.task, 5)
        assert worker.registry.records == {}


async def test_a_superseded_worker_stops(registry: Registry) -> None:
    """When a newer instance holds the worker_id, this one ends with that error."""
    async with live_worker(registry) as worker:
        worker.registry.outdated = True
        with pytest.raises(Outdated):
            await asyncio.wait_for(worker.task, 5)


async def test_an_engine_that_cannot_start_ends_the_worker(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause of a failed start is what run raises; nothing is registered."""

    class Broken(SimEngine):
        async def start(self, sink: Any) -> Any:
            raise EngineFailed("no GPU")

    monkeypatch.setattr(engines, "SimEngine", Broken)
    with pytest.raises(EngineFailed, match="no GPU"):
        async with live_worker(registry):
            pass
    assert registry[0].records == {}


async def test_an_engine_that_dies_while_no_registry_answers_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for a registry is no reason to miss the end of the engine."""

    class Short(SimEngine):
        async def run(self) -> None:
            raise EngineFailed("gone")

    monkeypatch.setattr(engines, "SimEngine", Short)
    with pytest.raises(EngineFailed, match="gone"):
        async with live_worker((FakeRegistry(), "127.0.0.1:1")):
            pass


async def test_a_port_in_use_is_named(registry: Registry, worker: LiveWorker) -> None:
    """A worker whose address is taken says which, and registers nothing."""
    for option in ("grpc_listen", "metrics_listen"):
        taken = worker.addresses[option.partition("_")[0]]
        with pytest.raises(OSError, match=taken.rpartition(":")[2] if option == "grpc_listen" else "in use"):
            async with live_worker(registry, worker_id="w2", **{option: taken}):
                pass
    assert list(registry[0].records) == ["w1"]


async def test_metrics_name_every_rank_by_its_global_number(worker: LiveWorker) -> None:
    """Series carry worker_id and the global dp_rank, and count what requests did."""
    await generate(worker, dp_rank=6)
    await generate(worker, dp_rank=6)
    url = f"http://{worker.addresses['metrics']}/metrics"
    text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url).read())).decode()
    assert 'rankway_worker_output_tokens_total{dp_rank="6",worker_id="w1"} 40.0' in text
    assert 'rankway_worker_cached_tokens_total{dp_rank="6",worker_id="w1"} 48.0' in text
    ranks = set(re.findall(r'rankway_worker_cached_blocks\{dp_rank="(\d+)"', text))
    assert ranks == {"4", "5", "6", "7"}


def test_a_worker_process_starts_and_ends_with_sigterm() -> None:
    """A bad option is one line and exit code 2; SIGTERM while a worker waits for a registry ends it with 0."""
    command = [sys.executable, "-m", "rankway.worker"]
    bad = subprocess.run([*command, "--size", "0"], capture_output=True, text=True, timeout=30, check=False)
    assert bad.returncode == 2
    assert "size=0: a window has at least one rank" in bad.stderr
    waiting = subprocess.Popen(
        [*command, "--registry-endpoints", "127.0.0.1:1", "--nats-url", "nats://127.0.0.1:1"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"RANKWAY_WORKER_ID": "w9"},
    )
    assert waiting.stderr is not None
    for line in waiting.stderr:
        if "no registry can be reached" in line:
            break
    waiting.send_signal(signal.SIGTERM)
    _, rest = waiting.communicate(timeout=10)
    assert waiting.returncode == 0, rest


def test_vllm_that_is_not_installed_is_one_line() -> None:
    """--engine vllm without vLLM ends with the command that installs it."""
    code = "import sys; sys.modules['vllm'] = None; from rankway.worker.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--engine", "vllm", "--model", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "pip install 'rankway[vllm]'" in done.stderr.splitlines()[-1]


def test_flags_after_the_dashes_are_the_engines() -> None:
    """What follows -- is not the worker's to read; the simulator takes no flags and says so."""
    from rankway.worker.__main__ import split_argv

    assert split_argv(["--size", "2", "--", "--a", "--", "b"]) == (["--size", "2"], ["--a", "--", "b"])
    assert split_argv(["--size", "2"]) == (["--size", "2"], [])
    with pytest.raises(RankwayError, match="takes none"):
        engines.build_engine(WorkerSettings(), ["--x"])
