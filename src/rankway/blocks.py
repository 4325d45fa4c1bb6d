"""Block hashes: the one chain that names a block of KV cache and everything before it.

    h[-1] = xxh64(for each of model, LoRA adapter, cache salt: byte length as little-endian uint32, then UTF-8; seed 0)
    h[i]  = xxh64(tokens of block i as little-endian uint32 || extra keys of block i, seed = h[i-1])

Only full blocks have a hash. Routers compute it from prompts and workers from their engine's events; any language's
stock XXH64 does. This module is the readable form and the oracle of the compiled one (`rankway._core`).
"""

from __future__ import annotations

import operator
import struct
import sys
from array import array
from collections.abc import Sequence

import xxhash

Tokens = Sequence[int] | bytes | bytearray | memoryview
"""Token ids: numbers (a list, an `array('I')`), or packed little-endian uint32 (bytes, bytearray, memoryview of them)."""

Hashes = Sequence[int] | bytes | bytearray | memoryview
"""Block hashes: numbers (a list, an `array('Q')`), or packed little-endian uint64."""

MASK64 = 2**64 - 1


def pack_tokens(tokens: Tokens) -> bytes:
    """Token ids as little-endian uint32, 4 bytes a token.

    Raises:
        ValueError: packed input whose length is no multiple of 4, or an id outside 0 … 2^32-1.
    """
    return _pack(tokens, "I", 4)


def unpack_tokens(packed: bytes | bytearray | memoryview) -> array[int]:
    """Token ids of packed little-endian uint32 as an `array('I')`.

    Raises:
        ValueError: the length is no multiple of 4.
    """
    return _unpack(packed, "I", 4)


def pack_hashes(hashes: Hashes) -> bytes:
    """Block hashes as little-endian uint64, 8 bytes a block. Raises ValueError as `pack_tokens` does."""
    return _pack(hashes, "Q", 8)


def unpack_hashes(packed: bytes | bytearray | memoryview) -> array[int]:
    """Block hashes of packed little-endian uint64 as an `array('Q')`. Raises ValueError as `unpack_tokens` does."""
    return _unpack(packed, "Q", 8)


def root_hash(model: str, lora: str = "", cache_salt: str = "") -> int:
    """h[-1]: what separates the prompts of different models, adapters and salts."""
    data = bytearray()
    for part in (model, lora, cache_salt):
        utf8 = part.encode()
        data += struct.pack("<I", len(utf8)) + utf8
    return xxhash.xxh64_intdigest(bytes(data), seed=0)


def hash_chain(tokens: Tokens, block_size: int, root: int, extra_keys: Sequence[bytes] | None = None) -> bytes:
    """Hashes of the full blocks of `tokens`, packed little-endian uint64: len(tokens) // block_size of them.

    Args:
        tokens: the prompt, or its continuation when `root` is the hash of the block before.
        block_size: tokens a block, at least 1.
        root: h[-1], 0 … 2^64-1.
        extra_keys: for each full block, bytes that enter its hash after the tokens; None: nothing.

    Raises:
        TypeError: a root that is no integer.
        ValueError: a block_size below 1, a root outside 0 … 2^64-1, malformed tokens, or fewer extra keys than full blocks.
    """
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: must be at least 1")
    if not 0 <= operator.index(root) <= MASK64:
        raise ValueError(f"root={root}: must be 0 … 2^64-1")
    data = pack_tokens(tokens)
    stride = 4 * block_size
    count = len(data) // stride
    if extra_keys is not None and len(extra_keys) < count:
        raise ValueError(f"{len(extra_keys)} extra keys for {count} blocks")
    chain = array("Q", bytes(8 * count))
    h = root
    for i in range(count):
        block = data[i * stride : (i + 1) * stride]
        if extra_keys is not None:
            block += extra_keys[i]
        h = xxhash.xxh64_intdigest(block, seed=h)
        chain[i] = h
    return pack_hashes(chain)


def mix(block_hash: int) -> int:
    """The 64 bits of a block hash, stirred (splitmix64's finaliser): a digest is the XOR of these over a set of blocks.

    Stirring first keeps related hashes from cancelling out.
    """
    z = (block_hash + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def _pack(values: Sequence[int] | bytes | bytearray | memoryview, code: str, width: int) -> bytes:
    if isinstance(values, (bytes, bytearray, memoryview)):
        return _whole(values, width)
    try:
        numbers = array(code, values)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"not all are whole numbers of {8 * width} bits: {error}") from None
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _unpack(packed: bytes | bytearray | memoryview, code: str, width: int) -> array[int]:
    numbers = array(code)
    numbers.frombytes(_whole(packed, width))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _whole(packed: bytes | bytearray | memoryview, width: int) -> bytes:
    data = bytes(packed)  # a memoryview's len counts items of any width: its bytes are what is packed
    if len(data) % width:
        raise ValueError(f"packed length {len(data)} is no multiple of {width}")
    return data
