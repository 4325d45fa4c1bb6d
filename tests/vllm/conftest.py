"""Real vLLM, on CPUs. Not part of the default run: `make test-vllm`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.tiny_model import write_adapter, write_model, write_tokenizer
from harness.vllm_engines import QUICK_ENVIRON


@pytest.fixture(scope="session", autouse=True)
def _quick_environ() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in QUICK_ENVIRON}
    os.environ.update(QUICK_ENVIRON)
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama with a tokenizer."""
    return str(write_tokenizer(write_model(tmp_path_factory.mktemp("models") / "tiny")))


@pytest.fixture(scope="session")
def tiny_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the tiny Llama."""
    return write_adapter(tmp_path_factory.mktemp("adapters") / "sql")
