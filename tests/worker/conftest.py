"""A worker in this process, without NATS unless a test says so."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import tokenizers
from harness.worker import FakeRegistry, LiveWorker, fake_registry, live_worker
from hypothesis import HealthCheck, settings

# How fast an example runs depends on who else uses the machine: that fails no test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture
def tokenizer_directory(tmp_path: Path) -> str:
    """A model directory "tiny" with a byte-level BPE of 300 ids, an end-of-sequence token and a chat template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cache of the router holds the block of the prompt"] * 10, trainer)
    directory = tmp_path / "tiny"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    config = {"eos_token": "<eos>", "chat_template": template, "padding": "x" * 3_000_000}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.fixture
async def registry() -> AsyncIterator[tuple[FakeRegistry, str]]:
    """(a registry that admits everything, its endpoint)."""
    async with fake_registry() as pair:
        yield pair


@pytest.fixture
async def worker(registry: tuple[FakeRegistry, str]) -> AsyncIterator[LiveWorker]:
    """Worker "w1" of ranks 4-7; model "sim", byte-level tokenizer, steps that take no time."""
    async with live_worker(registry) as live:
        yield live


@pytest.fixture
async def slow_worker(registry: tuple[FakeRegistry, str]) -> AsyncIterator[LiveWorker]:
    """The same at 200 prompt tokens/s and 20 ms a decode step, two requests at once on a rank: time to do things to requests."""
    async with live_worker(
        registry, sim_speedup=1.0, sim_prefill_tokens_per_s=200.0, sim_decode_ms=20.0, max_num_seqs=2, size=1
    ) as live:
        yield live
