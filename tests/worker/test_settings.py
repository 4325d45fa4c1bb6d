"""Settings of the worker: each mistake is one line that names the option."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rankway import settings as settings_module
from rankway.errors import InvalidField
from rankway.ranks import DpRange
from rankway.worker import engines
from rankway.worker.settings import WorkerSettings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0}, "size=0"),
        ({"start_rank": -1}, "start_rank=-1"),
        ({"start_rank": 4, "size": 5, "data_parallel_size": 8}, r"\[4, 9\).*data_parallel_size=8"),
        ({"worker_id": "a.b"}, "worker_id='a.b'"),
        ({"dp_group": ""}, "dp_group=''"),
        ({"grpc_listen": "50051"}, "grpc_listen='50051'"),
        ({"metrics_listen": "host:http"}, "metrics_listen='host:http'"),
        ({"advertise_endpoint": "nowhere"}, "advertise_endpoint='nowhere'"),
        ({"registry_endpoints": ()}, "registry_endpoints"),
        ({"block_size": -1}, "block_size=-1"),
        ({"drain_timeout_s": -1.0}, "drain_timeout_s=-1"),
        ({"sim_eos_probability": 1.5}, "sim_eos_probability=1.5"),
        ({"sim_speedup": -1.0}, "sim_speedup=-1"),
    ],
)
def test_a_bad_value_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    """The message names the option and what it was given."""
    with pytest.raises(ValueError, match=message):
        WorkerSettings(**fields)


def test_options_survive_a_round_trip() -> None:
    """What starts one process from another's settings ends in equal settings."""
    settings = WorkerSettings(worker_id="w1", served_model_name=("a", "b"), sim_speedup=0.0, start_rank=4, size=4)
    assert settings_module.parse(WorkerSettings, settings_module.to_argv(settings), {}, prog="x", description="") == settings


def test_speedup_zero_is_as_fast_as_possible() -> None:
    """0 means that steps take no time."""
    assert WorkerSettings(sim_speedup=0.0).speedup == math.inf
    assert WorkerSettings(sim_speedup=2.0).speedup == 2.0


def test_a_worker_without_a_name_is_named_after_its_machine_and_window() -> None:
    """The name is stable over restarts and may stand in a NATS subject."""
    name = WorkerSettings(start_rank=4).name(DpRange(4, 2))
    assert name.endswith("-4")
    assert WorkerSettings(worker_id=name).name(DpRange(0, 1)) == name


def test_a_simulator_that_could_never_serve_its_longest_prompt_is_refused() -> None:
    """max_model_len beyond the KV cache of a rank is refused at start, naming both."""
    with pytest.raises(InvalidField, match=r"max_model_len=4096: 10 KV blocks of 16"):
        engines.build_engine(WorkerSettings(num_kv_blocks=10, max_model_len=4096), [])


def test_the_model_is_named_after_its_directory_unless_told_otherwise(tokenizer_directory: str) -> None:
    """Canonical model name: the first served name, else the directory's, else "sim"."""
    assert engines.model_name(WorkerSettings()) == "sim"
    assert engines.model_name(WorkerSettings(model=tokenizer_directory)) == "tiny"
    assert engines.model_name(WorkerSettings(model=tokenizer_directory, served_model_name=("a", "b"))) == "a"
