"""Rules of the `rankway` command."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rankway
from rankway.__main__ import COMMANDS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rankway", *arguments], capture_output=True, text=True, check=False)


def test_version() -> None:
    """--version is the package's version."""
    assert run("--version").stdout == f"rankway {rankway.__version__}\n"


def test_help_lists_every_command() -> None:
    """Help names all commands; no command at all is help and a failure."""
    assert all(f"  {name} " in run("--help").stdout for name in COMMANDS)
    assert run().returncode == 2


def test_unknown_command_is_one_line() -> None:
    """A mistyped command is one line with the nearest one there is."""
    answer = run("ruoter")
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert "did you mean 'router'?" in answer.stderr


@pytest.mark.parametrize("command", ["up", "registry", "indexer", "worker", "router"])
def test_help_explains_each_option(command: str) -> None:
    """Every command's help has every option with its environment variable."""
    answer = run(command, "--help")
    assert answer.returncode == 0, answer.stderr
    assert "$RANKWAY_LOG_LEVEL" in answer.stdout
    assert "--log-level" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--workers", "0"], "workers=0"),
        (["up", "--workers", "two"], "invalid int value: 'two'"),
        (["up", "--http-port", "70000"], "http_port=70000"),
        (["up", "--engine", "gpu"], "invalid choice: 'gpu'"),
        (["up", "--http-port", "8000", "--grpc-port", "8000"], "http_port=8000: is grpc_port too"),
        (["up", "--wrokers", "2"], "unrecognized arguments: --wrokers 2"),
        (["worker", "--worker-id", "a.b"], "worker_id='a.b'"),
        (["worker", "--start-rank", "6", "--size", "4", "--data-parallel-size", "8"], "[6, 10)"),
    ],
)
def test_bad_option_is_one_line(arguments: list[str], said: str) -> None:
    """A bad option is one line that names it, and exit code 2."""
    answer = run(*arguments)
    assert answer.returncode == 2
    assert said in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_doctor_says_what_there_is() -> None:
    """Doctor names the core that serves, nats-server and vLLM."""
    answer = run("doctor")
    assert answer.returncode == 0, answer.stdout
    assert [line.split()[0] for line in answer.stdout.splitlines()] == [
        "rankway",
        "python",
        "libraries",
        "core",
        "nats-server",
        "vllm",
    ]
