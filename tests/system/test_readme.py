"""Every command that the README shows is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.calls import http
from harness.cluster import Cluster

ROOT = Path(__file__).parents[2]


def commands() -> list[str]:
    """The commands of the README's sh blocks; one command may have several lines."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    found: list[str] = []
    for block in blocks:
        for line in block.splitlines():
            if found and (found[-1].count("'") % 2 or found[-1].endswith("\\")):
                found[-1] += "\n" + line
            elif line.strip():
                found.append(line)
    return found


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith("make ")])
def test_command_of_the_readme(cluster: Cluster, command: str) -> None:
    """It works as shown, but for the ports of this cluster and the virtual environment of these tests."""
    here = (
        command.replace("localhost:8000", cluster.address("router", "http"))
        .replace("localhost:50051", cluster.router)
        .replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    )
    if "openai_client.py" in here:
        here += f" {cluster.http}/v1"
    elif re.search(r"examples/python/(generate|explain)\.py", here):
        here = re.sub(r"(generate|explain)\.py", rf"\1.py --router {cluster.router}", here)
    elif "look_aside.py" in here:
        here += f" {cluster.router}"
    if here.lstrip().startswith("curl"):
        here = here.replace("curl ", "curl --fail-with-body ", 1)
    environ = {key: value for key, value in os.environ.items() if key != "RANKWAY_READY_FD"}
    answer = subprocess.run(
        ["bash", "-euc", here], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_make_target_of_the_readme(command: str) -> None:
    """The Makefile has it (test_up.py runs `make run-cluster`, tests/vllm what needs vLLM)."""
    answer = subprocess.run(
        ["make", "--dry-run", *command.partition("#")[0].split()[1:]], cwd=ROOT, capture_output=True, check=False
    )
    assert answer.returncode == 0, answer.stderr


def test_links_lead_somewhere() -> None:
    """Every relative link of the README and the docs names a file that is there."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_metrics_of_the_docs_exist(cluster: Cluster) -> None:
    """Every metric that the docs name is one that a service serves, once the part that makes it has run."""
    pages = [(ROOT / "README.md").read_text(), *(page.read_text() for page in (ROOT / "docs").glob("*.md"))]
    named = set(re.findall(r"\brankway_(?:registry|indexer|worker|router)_[a-z_]+\b", "\n".join(pages)))
    http(f"{cluster.http}/v1/completions", {"prompt": "Hello", "model": "nowhere"})
    served = "".join(
        http(cluster.metrics_url(service)).body.decode() for service in ("registry", "indexer", "worker-0", "router")
    )
    assert {name for name in named if name not in served} == set()


def test_options_of_the_docs_exist() -> None:
    """Every long option of a service that the docs name is in its help (vllm.md's are vLLM's own, tests/vllm parses those)."""
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "vllm.md"]
    text = re.sub(r"^.*bench/.*$", "", "\n".join(page.read_text() for page in pages), flags=re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+(?:-[a-z]+)*", text))
    helps = ""
    for command in ("up", "registry", "indexer", "worker", "router"):
        helps += subprocess.run(
            [sys.executable, "-m", "rankway", command, "--help"], capture_output=True, text=True, check=True
        ).stdout
    assert {option for option in named if option not in helps} == set()
