"""Rules of what `rankway up` starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankway import settings
from rankway.errors import InvalidField
from rankway.indexer.settings import IndexerSettings
from rankway.plan import Plan, UpSettings
from rankway.ranks import DpRange
from rankway.registry.settings import RegistrySettings
from rankway.router.settings import RouterSettings
from rankway.worker.__main__ import split_argv
from rankway.worker.settings import WorkerSettings


def plan(*engine_args: str, cuda_devices: str = "", **options: Any) -> Plan:
    """A plan whose addresses are known."""
    made = Plan(UpSettings(**options), engine_args, "nats-server", Path("/d"), vllm_port=13345, cuda_devices=cuda_devices)
    made.nats_url, made.registry, made.indexer = "nats://127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"
    return made


def parsed(kind: type, argv: list[str]) -> Any:
    """The settings that a service reads from its command line (which begins with python -P -m rankway <service>)."""
    return settings.parse(kind, split_argv(argv[5:])[0], {}, prog="test", description="")


@pytest.mark.parametrize(("workers", "ranks"), [(1, 1), (2, 4), (3, 2), (5, 1)])
def test_windows_stand_back_to_back(workers: int, ranks: int) -> None:
    """Worker i owns the global ranks i * n … of one group that is exactly as large as all windows."""
    made = plan(workers=workers, ranks_per_worker=ranks)
    windows = []
    for number, worker_id in enumerate(made.worker_ids):
        worker = parsed(WorkerSettings, made.worker_argv(number))
        assert (worker.worker_id, worker.data_parallel_size) == (worker_id, workers * ranks)
        windows.append(worker.window)
    assert windows == [DpRange(i * ranks, ranks) for i in range(workers)]


def test_every_command_line_is_understood() -> None:
    """Each service's own settings take what the plan gives it."""
    made = plan(
        registry_args="--lease-ttl-s 9", indexer_args="--dp-group default", router_args="--policy round_robin", log_level="debug"
    )
    assert parsed(RegistrySettings, made.registry_argv()).lease_ttl_s == 9
    assert parsed(IndexerSettings, made.indexer_argv()).registry_endpoints == ("127.0.0.1:2",)
    router = parsed(RouterSettings, made.router_argv())
    assert (router.policy, router.indexer_endpoints, router.log_level) == ("round_robin", ("127.0.0.1:3",), "debug")
    assert (router.http_listen, router.grpc_listen) == ("127.0.0.1:8000", "127.0.0.1:50051")


def test_vllm_workers_share_one_hybrid_group() -> None:
    """Two workers of two ranks: vLLM's hybrid load balancing, each with its start rank, one meeting port; own flags last."""
    made = plan("--max-model-len", "512", engine="vllm", model="/m")
    flags = [split_argv(made.worker_argv(i))[1] for i in range(2)]
    assert flags[1] == [
        "--data-parallel-size=4",
        "--data-parallel-size-local=2",
        "--data-parallel-start-rank=2",
        "--data-parallel-hybrid-lb",
        "--data-parallel-address=127.0.0.1",
        "--data-parallel-rpc-port=13345",
        "--max-model-len",
        "512",
    ]
    assert [flag for flag in flags[0] if "start-rank" not in flag] == [flag for flag in flags[1] if "start-rank" not in flag]


def test_one_vllm_worker_balances_internally() -> None:
    """One worker owns all ranks; workers of one rank are independent engines, without data-parallel flags."""
    assert split_argv(plan(engine="vllm", model="/m", workers=1).worker_argv(0))[1] == ["--data-parallel-size=2"]
    assert split_argv(plan(engine="vllm", model="/m", ranks_per_worker=1).worker_argv(1))[1] == []


def test_gpus_are_shared_out() -> None:
    """CUDA_VISIBLE_DEVICES is split between the workers in order; where it isn't set it is left alone."""
    made = plan(cuda_devices="4,5,6,7")
    assert [made.worker_environ(i)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["4,5", "6,7"]
    assert plan().worker_environ(0) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"ranks_per_worker": -1},
        {"block_size": -16},
        {"http_port": 70_000},
        {"grpc_port": -1},
        {"http_port": 50051},
        {"engine": "vllm"},
    ],
)
def test_bad_settings_are_refused_by_name(options: dict[str, Any]) -> None:
    """The refusal names the field that was given, or that is missing."""
    with pytest.raises(InvalidField) as refused:
        UpSettings(**options)
    assert refused.value.field in (*options, "model")
