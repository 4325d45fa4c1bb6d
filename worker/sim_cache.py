"""The simulator's paged KV cache of one rank, with vLLM's rules (`vllm/v1/core/block_pool.py`).

Only full blocks are cached. Several physical blocks may hold the same content; each is announced when it is cached and when it
is evicted. A block that no request uses keeps its content until its place is needed: least recently used first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from rankway.blocks import root_hash, unpack_hashes
from rankway.native import hash_chain
from rankway.worker.engine import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent

UNCACHED = -1
"""Hash of a block that isn't in the prefix cache. Real hashes are 0 … 2^64-1."""


class BlockChain:
    """The engine's own hashes of one request's full blocks, longer as the request grows.

    They are opaque to everybody else, as vLLM's are: another root than the canonical chain's sees to that.
    """

    __slots__ = ("_block_size", "_lora", "_root", "_salt", "hashes")

    def __init__(self, tokens: array[int], block_size: int, lora: str, cache_salt: str) -> None:
        self._block_size = block_size
        self._lora = lora
        self._salt = cache_salt
        self._root = root_hash("simulated engine", lora, cache_salt)
        self.hashes: array[int] = unpack_hashes(hash_chain(tokens, block_size, self._root))

    def extend(self, tokens: array[int]) -> None:
        """`tokens` are all tokens of the request: hash the blocks that have become full."""
        done = len(self.hashes)
        if len(tokens) < (done + 1) * self._block_size:
            return
        parent = self.hashes[-1] if done else self._root
        self.hashes.extend(unpack_hashes(hash_chain(tokens[done * self._block_size :], self._block_size, parent)))

    def stored(self, tokens: array[int], first: int, end: int) -> BlockStored:
        """The event that blocks first … end-1 were cached."""
        size = self._block_size
        return BlockStored(
            block_hashes=self.hashes[first:end],
            parent_block_hash=self.hashes[first - 1] if first else None,
            token_ids=tokens[first * size : end * size],
            block_size=size,
            lora_name=self._lora or None,
            extra_keys=self._extra_keys(first, end),
        )

    def _extra_keys(self, first: int, end: int) -> list[tuple[str, ...] | None] | None:
        """As vLLM has them: the adapter's name on every block, the salt on the prompt's first one."""
        if not self._lora and not self._salt:
            return None
        every = (self._lora,) if self._lora else None
        keys: list[tuple[str, ...] | None] = [every] * (end - first)
        if first == 0 and self._salt:
            keys[0] = (*(every or ()), self._salt)
        return keys


class PagedCache:
    """Blocks 0 … total-1 with reference counts, a free queue and a prefix cache.

    Every block is in exactly one state: used (references > 0), free (in the queue, perhaps still cached), or never used yet.
    """

    def __init__(self, total_blocks: int, block_size: int) -> None:
        self.total_blocks = total_blocks
        self.block_size = block_size
        self.events: list[EngineEvent] = []
        """What happened since the owner last took them away, in order."""
        # Blocks from len(_references) on have never been used: a rank costs no memory until it works.
        self._references: array[int] = array("i")
        self._hashes: list[int] = []
        self._free: OrderedDict[int, None] = OrderedDict()
        self._cached: dict[int, list[int]] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free) + self.total_blocks - len(self._references)

    @property
    def used_blocks(self) -> int:
        return len(self._references) - len(self._free)

    def cached_hashes(self) -> dict[int, int]:
        """Engine hash -> number of physical copies."""
        return {block_hash: len(copies) for block_hash, copies in self._cached.items()}

    def match(self, hashes: Sequence[int], most: int) -> list[int]:
        """Physical blocks of the longest cached run of leading blocks, `most` of them at most."""
        found = []
        for block_hash in hashes[:most]:
            copies = self._cached.get(block_hash)
            if copies is None:
                break
            found.append(copies[0])
        return found

    def allocate(self, hits: Sequence[int], fresh: int) -> list[int] | None:
        """Take a reference on `hits` and on `fresh` new blocks; the new ones, or None and no change."""
        idle_hits = sum(1 for block in hits if not self._references[block])
        if fresh > self.free_blocks - idle_hits:
            return None
        for block in hits:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1
        return [self._take() for _ in range(fresh)]

    def cache(self, blocks: Sequence[int], chain: BlockChain, tokens: array[int], first: int, end: int) -> None:
        """A request's blocks first … end-1 are full: others may share them from now on."""
        if first >= end:
            return
        for i in range(first, end):
            block_hash = chain.hashes[i]
            self._hashes[blocks[i]] = block_hash
            self._cached.setdefault(block_hash, []).append(blocks[i])
        self.events.append(chain.stored(tokens, first, end))

    def release(self, blocks: Sequence[int]) -> None:
        """Give a request's references back. The end of a prompt is evicted before its beginning."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None

    def reset(self) -> None:
        """Forget every cached block; requests keep the blocks that they use."""
        self._cached.clear()
        self._hashes = [UNCACHED] * len(self._hashes)
        self.events.append(AllBlocksCleared())

    def _take(self) -> int:
        if len(self._references) < self.total_blocks:
            self._references.append(1)
            self._hashes.append(UNCACHED)
            return len(self._references) - 1
        block, _ = self._free.popitem(last=False)
        self._references[block] = 1
        self._evict(block)
        return block

    def _evict(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash == UNCACHED:
            return
        self._hashes[block] = UNCACHED
        copies = self._cached[block_hash]
        copies.remove(block)
        if not copies:
            del self._cached[block_hash]
        self.events.append(BlockRemoved(block_hashes=(block_hash,)))
