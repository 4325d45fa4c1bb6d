"""Which engine the settings name, and its tokenizer. Everything here blocks: call it in a thread."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from rankway.errors import InvalidField, Unsupported
from rankway.tokenizer import BYTE_LEVEL, Tokenizer
from rankway.worker.engine import Engine
from rankway.worker.settings import WorkerSettings
from rankway.worker.sim_engine import SimEngine
from rankway.worker.sim_tokens import NO_EOS, WORDS, Vocabulary
from rankway.worker.simulator import SimConfig

SIM_BLOCK_SIZE = 16
SIM_KV_BLOCKS = 16_384
SIM_MODEL_LEN = 131_072
SIM_MAX_NUM_SEQS = 256
SIM_MAX_NUM_BATCHED_TOKENS = 8_192
SIM_MODEL = "sim"
"""The simulator's model where no --model and no --served-model-name is given."""


def load_tokenizer(directory: str) -> Tokenizer:
    """The tokenizer of a model's directory, or the byte-level one where there is no model. Blocking.

    Raises:
        OSError: the files aren't there.
        InvalidField: a file isn't what it should be.
    """
    try:
        return Tokenizer.load(directory) if directory else Tokenizer.byte_level()
    except ValueError as error:
        raise InvalidField("model", directory, str(error)) from None


def build_engine(settings: WorkerSettings, engine_argv: Sequence[str]) -> Engine:
    """The engine that the settings name, not started. Blocking: vLLM takes seconds to import.

    Raises:
        Unsupported: vLLM isn't installed, or flags for an engine that takes none.
        InvalidField: limits that don't go together.
    """
    if settings.engine == "vllm":
        try:
            vllm_engine = importlib.import_module("rankway.worker.vllm_engine")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in ("vllm", "torch"):
                raise
            raise Unsupported("engine", "vllm isn't installed; install it with: pip install 'rankway[vllm]'") from None
        engine: Engine = vllm_engine.build(settings, engine_argv)
        return engine
    if engine_argv:
        raise Unsupported("engine flags", f"the simulator takes none after --, but got {' '.join(engine_argv)}")
    return _simulator(settings)


def _simulator(settings: WorkerSettings) -> Engine:
    tokenizer = load_tokenizer(settings.model)
    blocks = settings.num_kv_blocks or SIM_KV_BLOCKS
    block_size = settings.block_size or SIM_BLOCK_SIZE
    room = blocks * block_size
    config = SimConfig(
        block_size=block_size,
        total_blocks=blocks,
        max_num_seqs=settings.max_num_seqs or SIM_MAX_NUM_SEQS,
        max_num_batched_tokens=settings.max_num_batched_tokens or SIM_MAX_NUM_BATCHED_TOKENS,
        max_model_len=settings.max_model_len or min(room, SIM_MODEL_LEN),
        prefill_tokens_per_s=settings.sim_prefill_tokens_per_s,
        decode_ms=settings.sim_decode_ms,
        speedup=settings.speedup,
    )
    pattern = "{} " if tokenizer.fingerprint == BYTE_LEVEL else " {}"
    vocabulary = Vocabulary(
        [tokenizer.encode(pattern.format(word), add_special_tokens=False) for word in WORDS],
        tokenizer.vocab_size,
        tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else NO_EOS,
        settings.sim_eos_probability,
    )
    return SimEngine(
        model_name(settings),
        settings.window,
        settings.data_parallel_size or settings.window.end,
        config,
        vocabulary,
        settings.lora_adapters,
    )


def model_name(settings: WorkerSettings) -> str:
    """The simulator's canonical model name: the first served name, else that of the model's directory."""
    if settings.served_model_name:
        return settings.served_model_name[0]
    return Path(settings.model).resolve().name if settings.model else SIM_MODEL
