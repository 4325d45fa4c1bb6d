"""Internal, external and independent: workers with every other shape than hybrid LB, real engines, registry and indexer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import structlog
from harness.calls import fresh_tokens, generate, request
from harness.indexer import RunningIndexer
from harness.nats import NatsServer
from harness.registry import Replica
from harness.tiny_model import CONFIG, write_config, write_tokenizer
from harness.vllm_engines import count_finished, watch_forks
from harness.vllm_services import Group, VllmService
from harness.waiting import eventually, free_port

from rankway import rpc
from rankway.indexer.settings import IndexerSettings
from rankway.ranks import DpRange
from rankway.registry.settings import RegistrySettings
from rankway.v1 import indexer_pb2, indexer_pb2_grpc, registry_pb2, registry_pb2_grpc, types_pb2

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

RANKS = 2
MODEL = "tiny"
SPARSE = {
    **CONFIG,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "hidden_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [0, 1],
}
"""To vLLM a mixture-of-experts model, so it may use external LB; but no layer of it uses its experts, since vLLM 0.32 can't
exchange tokens between ranks on CPUs."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def registry(shared_nats: NatsServer) -> AsyncIterator[Replica]:
    replica = Replica(
        RegistrySettings(grpc_listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", nats_url=shared_nats.url, bucket="balancing")
    )
    await replica.wait_ready()
    yield replica
    await replica.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def indexer(shared_nats: NatsServer, registry: Replica) -> AsyncIterator[RunningIndexer]:
    running = RunningIndexer(
        IndexerSettings(
            grpc_listen="127.0.0.1:0",
            metrics_listen="127.0.0.1:0",
            nats_url=shared_nats.url,
            registry_endpoints=(registry.endpoint,),
        )
    )
    await running.wait_ready()
    yield running
    await running.stop()


Start = Callable[..., VllmService]


async def start_internal(group: Group, start: Start, dense: str, sparse: str) -> None:
    """One worker, one process that owns both ranks."""
    worker = start(group, DpRange(0, 2), f"--data-parallel-size={RANKS}", model=dense)
    await worker.wait_ready()


async def start_external(group: Group, start: Start, dense: str, sparse: str) -> None:
    """A worker a rank; vLLM lets each wait for the other."""
    port = free_port()
    for rank in range(RANKS):
        flags = (
            "--load-format=dummy",
            f"--data-parallel-size={RANKS}",
            f"--data-parallel-rank={rank}",
            "--data-parallel-external-lb",
            f"--data-parallel-rpc-port={port}",
        )
        start(group, DpRange(rank, 1), *flags, model=sparse)
    await asyncio.gather(*(worker.wait_ready() for worker, _ in group.workers))


async def start_independent(group: Group, start: Start, dense: str, sparse: str) -> None:
    """A worker a rank by Rankway's own options; no engine knows of the other. One by one: vLLM's numbers are all 0."""
    for rank in range(RANKS):
        undo = count_finished(group.finished, first=rank)
        try:
            await start(group, DpRange(rank, 1), model=dense, data_parallel_size=RANKS, start_rank=rank, size=1).wait_ready()
        finally:
            undo()


SHAPES: dict[str, Callable[[Group, Start, str, str], Awaitable[None]]] = {
    "internal": start_internal,
    "external": start_external,
    "independent": start_independent,
}


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(write_config(tmp_path_factory.mktemp("models") / "sparse", SPARSE)))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(SHAPES))
async def group(
    request: pytest.FixtureRequest,
    tiny_model: str,
    sparse_model: str,
    shared_nats: NatsServer,
    registry: Replica,
    indexer: RunningIndexer,
) -> AsyncIterator[Group]:
    """Two ranks of a DP group in each of the shapes, one shape after the other."""
    group = Group(request.param, Counter(), watch_forks())

    def start(group: Group, window: DpRange, *flags: str, **settings: object) -> VllmService:
        given = {
            "worker_id": f"{group.name}-{window.start_rank}",
            "dp_group": group.name,
            "served_model_name": (MODEL,),
            "nats_url": shared_nats.url,
            "registry_endpoints": (registry.endpoint,),
            **settings,
        }
        worker = VllmService(["--num-gpu-blocks-override=64", *flags], **given)
        group.workers.append((worker, window))
        return worker

    undo = count_finished(group.finished)
    try:
        await SHAPES[group.name](group, start, tiny_model, sparse_model)
        yield group
    finally:
        ended = await group.stop()
        undo()
    if group.name != "external":  # there a rank may notice the end of the other one before its own
        assert ended == [None] * len(ended)


async def test_the_registry_has_the_windows(group: Group, registry: Replica) -> None:
    """Each worker is registered with its window of the group: internal owns [0, 2), else each its one global rank."""
    async with rpc.open_channel(registry.endpoint) as channel:
        listed = await registry_pb2_grpc.RegistryStub(channel).List(registry_pb2.ListRequest())
    found = {
        record.worker_id: (DpRange(record.dp_range.start_rank, record.dp_range.size), record.data_parallel_size)
        for record in listed.records
        if record.dp_group == group.name
    }
    assert found == {worker.worker_id: (window, RANKS) for worker, window in group.workers}
    assert sorted(rank for _, window in group.workers for rank in window.ranks()) == [0, 1]


async def test_pinned_requests_land_on_their_rank(group: Group) -> None:
    """Ten requests to global rank 0 and twenty to rank 1 are ten and twenty by vLLM's own counts, one at a time and at once."""
    before = group.finished.copy()
    for dp_rank, requests in ((0, 10), (1, 20)):
        generation = group.owner(dp_rank).generation
        await asyncio.gather(*(generate(generation, request(fresh_tokens(20), dp_rank=dp_rank)) for _ in range(requests - 2)))
        for _ in range(2):
            answer = await generate(generation, request(fresh_tokens(20), dp_rank=dp_rank))
            assert answer.where == (group.owner(dp_rank).worker_id, dp_rank)
    assert group.finished - before == Counter({0: 10, 1: 20})


async def test_ranks_of_others_are_refused_before_the_engine(group: Group) -> None:
    """A rank outside of a worker's window is OUT_OF_RANGE with the window's name, and vLLM never hears of the request."""
    before = group.finished.copy()
    for worker, window in group.workers:
        for dp_rank in {0, 1, 2} - set(window.ranks()):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await generate(worker.generation, request(fresh_tokens(20), dp_rank=dp_rank))
            assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
            assert f"dp_rank={dp_rank}" in (refused.value.details() or "")
            assert str(window) in (refused.value.details() or "")
    assert group.finished == before


async def test_without_a_rank_vllm_balances_inside_the_window(group: Group) -> None:
    """Requests without dp_rank are spread by vLLM over the window and nothing else, and the log says so for each."""
    for worker, window in group.workers:
        before = group.finished.copy()

        async def all_ranks_served(worker: VllmService = worker, window: DpRange = window, before: Counter[int] = before) -> bool:
            # vLLM balances by counts that may be some 100 ms old, so a single burst may go to one rank.
            with structlog.testing.capture_logs() as logs:
                await asyncio.gather(*(generate(worker.generation, request(fresh_tokens(20), max_tokens=8)) for _ in range(8)))
            assert sum(entry["event"] == "no dp_rank: vLLM balances inside the window" for entry in logs) == 8
            return set(group.finished - before) == set(window.ranks())

        await eventually(all_ranks_served, timeout_s=10)


async def test_the_index_has_each_rank_under_its_global_number(group: Group, indexer: RunningIndexer) -> None:
    """Blocks that a rank stored are in the index for that worker and global rank alone, as many as the engine then reuses."""
    prompts = [fresh_tokens(200) for _ in range(RANKS)]
    for dp_rank, tokens in enumerate(prompts):
        await generate(group.owner(dp_rank).generation, request(tokens, dp_rank=dp_rank, max_tokens=1))
    async with rpc.open_channel(indexer.endpoint) as channel:
        stub = indexer_pb2_grpc.IndexerStub(channel)
        for dp_rank, tokens in enumerate(prompts):
            find = indexer_pb2.FindMatchesRequest(token_ids=types_pb2.TokenIds(ids=tokens), model=MODEL, dp_group=group.name)
            expected = {(group.owner(dp_rank).worker_id, dp_rank): 6}

            async def indexed(
                find: indexer_pb2.FindMatchesRequest = find, expected: dict[tuple[str, int], int] = expected
            ) -> bool:
                matches = (await stub.FindMatches(find)).matches
                found = {(match.worker_id, match.dp_rank): match.overlap_blocks for match in matches if match.overlap_blocks}
                assert found == expected
                return True

            await eventually(indexed)
            again = await generate(group.owner(dp_rank).generation, request(tokens, dp_rank=dp_rank, max_tokens=1))
            assert again.usage.cached_tokens == 6 * 32


async def test_nothing_was_forked(group: Group) -> None:
    """A worker's process never forks beside gRPC's threads, from the start of its engines on: all is vfork and exec."""
    assert group.forks == []
