"""vLLM's flags through its own configuration code: windows, refusals, ports, and the launch examples. No engine is started."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness.tiny_model import MOE, write_config

from rankway import settings as settings_module
from rankway.errors import EngineFailed, InvalidField, RankwayError
from rankway.ranks import DpRange
from rankway.worker import vllm_engine
from rankway.worker.settings import WorkerSettings
from rankway.worker.vllm_flags import Assigned

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "launch"
HYBRID = "--data-parallel-hybrid-lb"


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_config(tmp_path_factory.mktemp("models") / "moe", MOE))


def configure(model: str, flags: Sequence[str], assigned: Assigned = Assigned()) -> Any:  # noqa: B008  # frozen
    from rankway.worker import vllm_api

    return vllm_api.configure(model, ["--skip-tokenizer-init", *flags], assigned)


@pytest.mark.parametrize(
    ("flags", "window", "size", "balancing"),
    [
        (["-dp=4", "-dpl=2", "-dpr=2", HYBRID], DpRange(2, 2), 4, "hybrid"),
        (["-dp=4", "-dpl=2", "-dpr=2"], DpRange(2, 2), 4, "hybrid"),
        (["-dp=4", "-dpl=4", HYBRID], DpRange(0, 4), 4, "internal"),
        (["-dp=4"], DpRange(0, 4), 4, "internal"),
        ([], DpRange(0, 1), 1, "independent"),
    ],
)
def test_the_window_is_read_after_vllm_has_changed_the_flags(
    tiny_model: str, flags: list[str], window: DpRange, size: int, balancing: str
) -> None:
    """Hybrid with all ranks becomes internal, and is understood without its own flag: the window is right in each case."""
    place = configure(tiny_model, flags).place
    assert (place.window, place.data_parallel_size, place.balancing) == (window, size, balancing)


@pytest.mark.parametrize("flags", [["--data-parallel-rank=2"], ["-dpl=1", "-dpr=2", HYBRID]])
def test_a_moe_model_may_use_external_load_balancing(moe_model: str, flags: list[str]) -> None:
    """The rank of an external engine is its window, also where vLLM makes external LB of hybrid LB with one local rank."""
    place = configure(moe_model, ["-dp=4", *flags, "--load-format=dummy"]).place
    assert (place.window, place.balancing) == (DpRange(2, 1), "external")


@pytest.mark.parametrize(
    ("flags", "error", "said"),
    [
        (["-dp=8", "-dpr=4"], InvalidField, "without --data-parallel-size-local"),
        (["-dp=8", "-dpl=4", "-dpr=6", HYBRID], InvalidField, "pass --data-parallel-size 8"),
        (["-dp=4", "-dpl=4", "-dpr=2"], InvalidField, "starts at rank 0"),
        (["-dp=4", HYBRID], EngineFailed, "requires `--data-parallel-size-local`"),
        (["-dp=4", "--data-parallel-rank=1"], EngineFailed, "launch independent vLLM instances"),
        (["-dp=4", "-dpl=1", "-dpr=3", HYBRID], InvalidField, "--data-parallel-size 4 --start-rank 3 --size 1 before --"),
        (["--no-enable-prefix-caching"], InvalidField, "nothing to route by"),
        (["--port=8000"], InvalidField, "--port"),
        (["--lora-modules", "sql"], InvalidField, "name=path"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    tiny_model: str, flags: list[str], error: type[RankwayError], said: str
) -> None:
    """Flags that vLLM refuses, or would accept and drop, are one clear error."""
    with pytest.raises(error, match=said):
        configure(tiny_model, flags)


def test_events_are_always_on_and_on_ports_of_the_systems_choice(tiny_model: str) -> None:
    """Whatever the operator wrote about KV events, they are published with replay, and no port is fixed."""
    given = '{"enable_kv_cache_events": false, "endpoint": "tcp://*:5557", "buffer_steps": 77}'
    config = configure(tiny_model, ["--kv-events-config", given]).config
    events = config.kv_events_config
    assert (events.enable_kv_cache_events, events.publisher, events.buffer_steps) == (True, "zmq", 77)
    assert events.endpoint == events.replay_endpoint == "tcp://*:0"
    assert config.cache_config.enable_prefix_caching


EXPECTED = {
    ("hybrid-two-nodes.sh", "0"): (DpRange(0, 4), 8, "hybrid"),
    ("hybrid-two-nodes.sh", "1"): (DpRange(4, 4), 8, "hybrid"),
    ("external-moe.sh", "3"): (DpRange(3, 1), 4, "external"),
    ("dense-independent.sh", "2"): (DpRange(2, 1), 4, "independent"),
    ("internal.sh", ""): (DpRange(0, 4), 4, "internal"),
}


def test_every_example_is_tested() -> None:
    """A launch example that is added has an expectation here."""
    assert {path.name for path in EXAMPLES.glob("*.sh")} == {name for name, _ in EXPECTED}


@pytest.mark.parametrize(("name", "argument"), EXPECTED)
def test_launch_examples_mean_what_they_say(tiny_model: str, moe_model: str, name: str, argument: str) -> None:
    """Each example's command line, through Rankway's and vLLM's own parsers, gives the window that its comment promises."""
    model = moe_model if name in ("hybrid-two-nodes.sh", "external-moe.sh") else tiny_model
    environ = {**os.environ, "RANKWAY": "echo", "MODEL": model}
    said = subprocess.run([EXAMPLES / name, argument], capture_output=True, text=True, check=True, env=environ)
    command, *argv = shlex.split(said.stdout)
    assert command == "worker"
    ours, _, engine_argv = (argv, "", []) if "--" not in argv else (argv[: argv.index("--")], "--", argv[argv.index("--") + 1 :])
    settings = settings_module.parse(WorkerSettings, ours, {}, prog="worker", description="")
    engine = vllm_engine.build(settings, ["--skip-tokenizer-init", "--load-format=dummy", *engine_argv])
    place = engine._configure().place
    assert (place.window, place.data_parallel_size, place.balancing) == EXPECTED[name, argument]
