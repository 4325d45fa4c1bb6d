"""The Kubernetes manifests say what the services understand. (They are parsed and checked here, not applied.)"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rankway import settings
from rankway.indexer.settings import IndexerSettings
from rankway.registry.settings import RegistrySettings
from rankway.router.settings import RouterSettings
from rankway.worker.__main__ import split_argv
from rankway.worker.settings import WorkerSettings

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
SETTINGS = {"registry": RegistrySettings, "indexer": IndexerSettings, "router": RouterSettings, "worker": WorkerSettings}


def manifests() -> list[dict[str, Any]]:
    return [part for file in sorted(KUBERNETES.glob("*.yaml")) for part in yaml.safe_load_all(file.read_text())]


def container(name: str) -> dict[str, Any]:
    """The container of that name."""
    found = [
        c
        for part in manifests()
        if part["kind"] in ("Deployment", "StatefulSet")
        for c in part["spec"]["template"]["spec"]["containers"]
        if c["name"] == name
    ]
    assert len(found) == 1
    return dict(found[0])


def argv(name: str) -> list[str]:
    """What the container runs, after the word that chooses the service."""
    environ = {"POD_NAME": "worker-3", "POD_IP": "10.0.0.9"}
    spec = container(name)
    if "command" not in spec:
        return [a.replace("$(POD_NAME)", environ["POD_NAME"]) for a in spec["args"][1:]]
    environ |= {e["name"]: e["value"] for e in spec["env"] if "value" in e}
    script = spec["args"][0].replace("exec rankway", "printf '%s\\n'")
    printed = subprocess.run(["sh", "-euc", script], env=environ, capture_output=True, text=True, check=True).stdout
    return shlex.split(printed)[1:]


@pytest.mark.parametrize("name", SETTINGS)
def test_options_are_the_services_own(name: str) -> None:
    """Every option is one that the service has, with a value that it takes."""
    own, _ = split_argv(argv(name))
    settings.parse(SETTINGS[name], own, {}, prog=name, description="")


@pytest.mark.parametrize("name", SETTINGS)
def test_ports_agree(name: str) -> None:
    """What listens, what the container declares and what the probes ask is one port."""
    spec = container(name)
    ports = {port["name"]: port["containerPort"] for port in spec["ports"]}
    listens = {a.split("=")[0][2:].partition("-")[0]: int(a.rpartition(":")[2]) for a in argv(name) if "-listen=" in a}
    assert ports == listens
    for probe in ("livenessProbe", "readinessProbe"):
        if "grpc" in spec[probe]:
            assert spec[probe]["grpc"]["port"] == ports["grpc"]
        else:
            assert spec[probe]["httpGet"]["port"] in ports


def test_services_named_in_options_exist() -> None:
    """Host names in the options are Services of these manifests, with that port."""
    services = {
        part["metadata"]["name"]: {p["port"] for p in part["spec"]["ports"]} for part in manifests() if part["kind"] == "Service"
    }
    for name in SETTINGS:
        for option in argv(name):
            if option.startswith(("--nats-url=", "--registry-endpoints=", "--indexer-endpoints=")):
                host, _, port = option.rpartition("=")[2].removeprefix("nats://").partition(":")
                assert int(port) in services[host], option


def test_pods_own_windows_back_to_back() -> None:
    """Pod 3 of four pods with two ranks each owns [6, 8) of 8, in Rankway's options and in vLLM's."""
    own, engine = split_argv(argv("worker"))
    parsed = settings.parse(WorkerSettings, own, {}, prog="worker", description="")
    assert (str(parsed.window), parsed.data_parallel_size, parsed.worker_id) == ("[6, 8)", 8, "worker-3")
    assert {"--data-parallel-size=8", "--data-parallel-size-local=2", "--data-parallel-start-rank=6"} <= set(engine)
