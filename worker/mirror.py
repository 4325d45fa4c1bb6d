"""What one rank's engine holds, in canonical block hashes. Pure.

An engine names blocks by hashes of its own and may hold several physical copies of one block. The mirror maps each engine hash
to its canonical hash, counts, and tells only the first arrival and the last departure of a canonical block.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from rankway.blocks import mix, root_hash, unpack_hashes
from rankway.native import hash_chain
from rankway.worker.engine import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent

EngineHash = int | bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """Canonical blocks that arrived, each the child of the one before; `parent` None: the first begins a prompt."""

    parent: int | None
    blocks: array[int]


@dataclass(frozen=True, slots=True)
class Removed:
    blocks: array[int]


@dataclass(frozen=True, slots=True)
class Cleared:
    pass


Change = Stored | Removed | Cleared


@dataclass(slots=True)
class MirrorCounts:
    """What the mirror could not use, since the start."""

    orphans: int = 0
    """Blocks whose parent is unknown: nobody can reach them, they are skipped with their children."""
    unknown_removals: int = 0
    block_size_mismatches: int = 0
    malformed: int = 0
    """Stored events whose tokens and hashes don't belong together."""


class Mirror:
    """The blocks of one rank.

    Args:
        model: canonical model name, which enters the hashes.
        block_size: tokens a block; events of another size are dropped and counted.
    """

    def __init__(self, model: str, block_size: int) -> None:
        self._model = model
        self._block_size = block_size
        # Engine hash -> [canonical hash, copies].
        self._known: dict[EngineHash, list[int]] = {}
        # Canonical hash -> copies under all its engine hashes.
        self._held: dict[int, int] = {}
        self._orphans: dict[EngineHash, int] = {}
        self.digest = 0
        """XOR of `blocks.mix` over the held blocks."""
        self.counts = MirrorCounts()

    def __len__(self) -> int:
        """Distinct canonical blocks held."""
        return len(self._held)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def apply(self, events: Sequence[EngineEvent]) -> list[Change]:
        """Take in the events of an engine step; returns what changed, in order."""
        changes: list[Change] = []
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event, changes)
            elif isinstance(event, BlockRemoved):
                self._remove(event, changes)
            elif isinstance(event, AllBlocksCleared):
                changes += self.clear()
        return changes

    def clear(self) -> list[Change]:
        """Forget everything; nothing to tell if nothing was held."""
        self._known.clear()
        self._orphans.clear()
        if not self._held:
            return []
        self._held.clear()
        self.digest = 0
        return [Cleared()]

    def snapshot(self) -> array[int]:
        """The held blocks in order of arrival: parents first, since engines evict a block's children before it."""
        return array("Q", self._held)

    def _store(self, event: BlockStored, changes: list[Change]) -> None:
        hashes = event.block_hashes
        if event.block_size != self._block_size:
            self.counts.block_size_mismatches += len(hashes)
            return
        if len(event.token_ids) != len(hashes) * self._block_size:
            self.counts.malformed += len(hashes)
            return
        salt, extras = _split_extra_keys(event)
        first = 0
        parent: int | None = None
        if event.parent_block_hash is None:
            root = root_hash(self._model, event.lora_name or "", salt)
        else:
            known = self._known.get(event.parent_block_hash)
            if known is None:
                first = self._leading_known(hashes)
                if not first:
                    self._skip_orphans(hashes)
                    return
                self._add(hashes[:first], array("Q", [self._known[h][0] for h in hashes[:first]]), None, changes)
                known = self._known[hashes[first - 1]]
            root = parent = known[0]
        try:
            tail = event.token_ids[first * self._block_size :]
            canonical = unpack_hashes(hash_chain(tail, self._block_size, root, extras and extras[first:]))
        except ValueError:  # token ids that are none, fewer extra keys than blocks
            self.counts.malformed += len(hashes) - first
            return
        self._add(hashes[first:], canonical, parent, changes)

    def _leading_known(self, hashes: Sequence[EngineHash]) -> int:
        return next((i for i, engine_hash in enumerate(hashes) if engine_hash not in self._known), len(hashes))

    def _skip_orphans(self, hashes: Sequence[EngineHash]) -> None:
        """Remember how many copies there are: once the block is known by another copy, all of them count."""
        self.counts.orphans += len(hashes)
        for engine_hash in hashes:
            known = self._known.get(engine_hash)
            if known is None:
                self._orphans[engine_hash] = self._orphans.get(engine_hash, 0) + 1
            else:
                known[1] += 1
                self._held[known[0]] += 1

    def _add(self, hashes: Sequence[EngineHash], canonical: array[int], parent: int | None, changes: list[Change]) -> None:
        run: array[int] = array("Q")
        run_parent = parent
        for engine_hash, block in zip(hashes, canonical, strict=True):
            known = self._known.get(engine_hash)
            copies = 1
            if known is None:
                copies += self._orphans.pop(engine_hash, 0)
                self._known[engine_hash] = [block, copies]
            else:
                known[1] += 1
                block = known[0]
            held = self._held.get(block, 0)
            self._held[block] = held + copies
            if not held:
                self.digest ^= mix(block)
                run.append(block)
                continue
            if run:
                changes.append(Stored(run_parent, run))
                run = array("Q")
            run_parent = block
        if run:
            changes.append(Stored(run_parent, run))

    def _remove(self, event: BlockRemoved, changes: list[Change]) -> None:
        gone: array[int] = array("Q")
        for engine_hash in event.block_hashes:
            known = self._known.get(engine_hash)
            if known is None:
                self._remove_orphan(engine_hash)
                continue
            block = known[0]
            known[1] -= 1
            if not known[1]:
                del self._known[engine_hash]
            if self._held[block] > 1:
                self._held[block] -= 1
            else:
                del self._held[block]
                self.digest ^= mix(block)
                gone.append(block)
        if gone:
            changes.append(Removed(gone))

    def _remove_orphan(self, engine_hash: EngineHash) -> None:
        copies = self._orphans.pop(engine_hash, 0)
        if copies > 1:
            self._orphans[engine_hash] = copies - 1
        elif not copies:
            self.counts.unknown_removals += 1


def _split_extra_keys(event: BlockStored) -> tuple[str, list[bytes] | None]:
    """(cache salt, what enters each block's own hash) of an event's untagged extra keys.

    Their order is: adapter name, multimodal (id, offset) pairs, salt (a string, on a prompt's first block only), digest of
    embeddings (bytes). Adapter and salt are in the chain's root already and don't count twice.
    """
    if event.extra_keys is None:
        return "", None
    salt = ""
    extras = []
    for position, keys in enumerate(event.extra_keys):
        rest = list(keys or ())
        if event.lora_name and rest[:1] == [event.lora_name]:
            del rest[0]
        if position == 0 and event.parent_block_hash is None:
            strings = [i for i, key in enumerate(rest) if isinstance(key, str)]
            salt = str(rest.pop(strings[-1])) if strings else ""
        extras.append(b"".join(map(_encode, rest)))
    return salt, extras


def _encode(key: object) -> bytes:
    """A key as bytes that no other key has: a tag, a length, the content."""
    if isinstance(key, (bytes, bytearray)):
        tag, content = b"b", bytes(key)
    elif isinstance(key, (list, tuple)):
        tag, content = b"l", b"".join(_encode(part) for part in key)
    else:
        tag, content = b"s", str(key).encode()
    return tag + struct.pack("<I", len(content)) + content
