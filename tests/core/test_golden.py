"""The golden vectors, which other languages check themselves against too."""

from __future__ import annotations

import importlib.util
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from rankway import blocks

GOLDEN = Path(__file__).parents[1] / "golden"
VECTORS = json.loads((GOLDEN / "block_hashes.json").read_text(encoding="utf-8"))["vectors"]


def hashes_of(core: Any, vector: dict[str, Any], tokens: Any) -> list[str]:
    keys = [bytes.fromhex(key) for key in vector["extra_keys"]] if "extra_keys" in vector else None
    packed = core.hash_chain(tokens, vector["block_size"], int(vector["root"]), keys)
    return [str(h) for h in blocks.unpack_hashes(packed)]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_golden_vectors_hold(core: Any, vector: dict[str, Any]) -> None:
    """Both cores give the vectors' hashes, from numbers, arrays and packed tokens alike."""
    assert str(blocks.root_hash(vector["model"], vector["lora"], vector["cache_salt"])) == vector["root"]
    numbers = vector["tokens"]
    for tokens in (numbers, array("I", numbers), blocks.pack_tokens(numbers), memoryview(array("I", numbers))):
        assert hashes_of(core, vector, tokens) == vector["hashes"]


def test_the_file_is_what_the_definition_gives() -> None:
    """The vectors follow from their definition and the stock xxHash library alone."""
    spec = importlib.util.spec_from_file_location("golden_block_hashes", GOLDEN / "block_hashes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.cases() == VECTORS


def test_a_chain_goes_on_from_its_last_hash(core: Any) -> None:
    """Hashing the rest of a prompt with the last hash as its root continues the chain."""
    tokens = list(range(160))
    whole = core.hash_chain(tokens, 16, 7)
    first = core.hash_chain(tokens[:64], 16, 7)
    assert first + core.hash_chain(tokens[64:], 16, blocks.unpack_hashes(first)[-1]) == whole
