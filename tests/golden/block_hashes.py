"""Writes block_hashes.json: vectors of the block hash chain for implementations in any language.

Uses nothing of Rankway but the definition in docs/architecture.md and the `xxhash` package, so the vectors check both cores.
Run it after adding a case; hashes of existing cases never change.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

PATH = Path(__file__).with_name("block_hashes.json")
ABOUT = (
    "h[-1] = root = xxh64(for each of model, lora, cache_salt: byte length as little-endian uint32, then UTF-8; seed 0); "
    "h[i] = xxh64(tokens of block i as little-endian uint32, then extra_keys[i] as bytes; seed h[i-1]); only full blocks. "
    "Hashes are decimal strings since JSON numbers lose bits; extra_keys are hex, absent: none."
)


def chain(tokens: Sequence[int], block_size: int, root: int, extra_keys: Sequence[str] | None) -> list[int]:
    """The definition, word for word."""
    hashes, h = [], root
    for i in range(len(tokens) // block_size):
        block = struct.pack(f"<{block_size}I", *tokens[i * block_size : (i + 1) * block_size])
        h = xxhash.xxh64_intdigest(block + bytes.fromhex(extra_keys[i] if extra_keys else ""), seed=h)
        hashes.append(h)
    return hashes


def root(model: str, lora: str, cache_salt: str) -> int:
    """The definition of h[-1], word for word."""
    parts = [text.encode() for text in (model, lora, cache_salt)]
    return xxhash.xxh64_intdigest(b"".join(struct.pack("<I", len(part)) + part for part in parts), seed=0)


def case(
    name: str,
    tokens: Sequence[int],
    block_size: int,
    *,
    model: str = "demo",
    lora: str = "",
    cache_salt: str = "",
    extra_keys: Sequence[str] | None = None,
) -> dict[str, Any]:
    """One vector."""
    start = root(model, lora, cache_salt)
    vector: dict[str, Any] = {"name": name, "model": model, "lora": lora, "cache_salt": cache_salt, "root": str(start)}
    vector |= {"block_size": block_size, "tokens": list(tokens)}
    if extra_keys is not None:
        vector["extra_keys"] = list(extra_keys)
    return vector | {"hashes": [str(h) for h in chain(tokens, block_size, start, extra_keys)]}


def cases() -> list[dict[str, Any]]:
    """All vectors. Token ids repeat in a pattern that every language can write."""
    pattern = [(i * 2654435761) % 151936 for i in range(200)]
    return [
        case("no tokens", [], 16),
        case("no full block", pattern[:15], 16),
        case("one block", pattern[:16], 16),
        case("the rest is left out", pattern[:47], 16),
        case("196 tokens in blocks of 16", pattern[:196], 16),
        case("blocks of 1", pattern[:5], 1),
        case("blocks of 3: 12 bytes, shorter than a stripe", pattern[:10], 3),
        case("blocks of 7: 28 bytes", pattern[:21], 7),
        case("blocks of 9: 36 bytes, a stripe and a tail", pattern[:27], 9),
        case("blocks of 32", pattern[:96], 32),
        case("blocks of 64", pattern[:192], 64),
        case("blocks of 128", pattern[:130], 128),
        case("the smallest and the largest ids", [0, 2**32 - 1, 2**31, 1] * 8, 16),
        case("another model", pattern[:32], 16, model="Qwen/Qwen3-0.6B"),
        case("a LoRA adapter", pattern[:32], 16, lora="sql-expert"),
        case("a cache salt", pattern[:32], 16, cache_salt="tenant-7"),
        case("adapter and salt swapped", pattern[:32], 16, lora="tenant-7", cache_salt="sql-expert"),
        case("names that aren't ASCII", pattern[:32], 16, model="模型", lora="größer", cache_salt="🔑"),
        case("no names", pattern[:32], 16, model=""),
        case("extra keys, one empty", pattern[:48], 16, extra_keys=["00", "", "696d6167652d3031f09f96bc"]),
        case("extra keys longer than a stripe", pattern[:32], 16, extra_keys=["ab" * 40, "cd" * 33]),
    ]


if __name__ == "__main__":
    lines = ",\n".join("  " + json.dumps(vector, ensure_ascii=False) for vector in cases())
    PATH.write_text(f'{{"about": {json.dumps(ABOUT)},\n "vectors": [\n{lines}\n]}}\n', encoding="utf-8")
