"""vLLM's KV events: their wire forms, and what the sequence numbers say about loss. Pure.

vLLM publishes one batch an engine step, as msgpack: `[ts, events, data_parallel_rank]`. An event is a map with a `type` key, in
older releases an array that begins with its type. Batches of one rank carry seq 0, 1, 2 … from the start of its process.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rankway.worker.engine import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent

REPLAY_END = -1
"""The seq that ends vLLM's answer to a replay request."""

_FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_GPU = "GPU"

# Fields by position, of the releases that sent arrays. Trailing defaults may be left out.
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")


class MalformedBatch(ValueError):
    """A payload that isn't a batch of KV events: what it said is lost."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of one engine step of one rank. `ts`: the publisher's clock, in seconds since 1970."""

    seq: int
    ts: float
    events: Sequence[EngineEvent]


@dataclass(slots=True)
class DecoderCounts:
    """Events that were left out on purpose, since the start."""

    other_tiers: int = 0
    """On other media than the GPU (CPU or storage offloading), or in another process."""
    other_groups: int = 0
    """Of KV cache groups that aren't the full-attention one: sliding windows, Mamba states …"""
    unknown_types: int = 0


class EventDecoder:
    """Decodes the batches of one rank, in order.

    A hybrid-attention model announces each block once per KV cache group; only a full-attention group means that the prefix
    is cached. The first such group that stores a block stands for the rank, the others are left out.
    """

    def __init__(self) -> None:
        self.counts = DecoderCounts()
        self._group: int | None = None

    def decode(self, seq: int, payload: bytes) -> Batch:
        """The batch of a message.

        Raises:
            MalformedBatch: it can't be read, or an event of a known type lacks a field.
        """
        try:
            ts, raw_events, *_ = msgspec.msgpack.decode(payload)
            decoded = [self._decode_event(raw) for raw in raw_events]
            return Batch(seq, float(ts), [event for event in decoded if event is not None])
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise MalformedBatch(f"batch {seq}: {type(error).__name__}: {error}") from error

    def _decode_event(self, raw: Any) -> EngineEvent | None:
        kind, fields = _as_fields(raw)
        if kind == "AllBlocksCleared":
            return AllBlocksCleared()
        if kind not in ("BlockStored", "BlockRemoved"):
            self.counts.unknown_types += 1
            return None
        if fields.get("medium") not in (None, _GPU) or fields.get("locality") == "REMOTE":
            self.counts.other_tiers += 1
            return None
        if not self._is_own_group(kind, fields):
            self.counts.other_groups += 1
            return None
        if kind == "BlockRemoved":
            return BlockRemoved(fields["block_hashes"])
        return BlockStored(
            block_hashes=fields["block_hashes"],
            parent_block_hash=fields["parent_block_hash"],
            token_ids=fields["token_ids"],
            block_size=fields["block_size"],
            lora_name=fields.get("lora_name"),
            extra_keys=fields.get("extra_keys"),
        )

    def _is_own_group(self, kind: str, fields: Mapping[str, Any]) -> bool:
        group = fields.get("group_idx")
        if group is None:
            return True
        if self._group is None and kind == "BlockStored" and fields.get("kv_cache_spec_kind") in (None, *_FULL_ATTENTION):
            self._group = group
        return bool(group == self._group)


def _as_fields(raw: Any) -> tuple[str, Mapping[str, Any]]:
    """Type and fields of an event in either encoding."""
    if isinstance(raw, Mapping):
        return raw["type"], raw
    kind, *values = raw
    names = _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS
    return kind, dict(zip(names, values, strict=False))


class Verdict(enum.Enum):
    """What a batch's seq means."""

    NEXT = "next"
    """It follows the last one: apply it."""
    SEEN = "seen"
    """It was applied before (a replay and the live stream overlap): drop it."""
    GAP = "gap"
    """Batches before it are missing: ask for a replay from `expected`."""
    RESTARTED = "restarted"
    """The publisher began anew: what was known of the rank's cache is void."""


class Continuity:
    """Follows the seq numbers of one rank's batches.

    seq has no epoch: after a restart it steps back to 0, just as an overlap of replay and live stream does. The publisher's
    clock tells them apart: a restarted publisher's batches are younger than all before.
    """

    def __init__(self) -> None:
        self.expected = 0
        self._last_ts = float("-inf")

    def judge(self, seq: int, ts: float) -> Verdict:
        """What to do with a batch; changes nothing."""
        if seq == self.expected:
            return Verdict.NEXT
        if seq > self.expected:
            return Verdict.GAP
        return Verdict.RESTARTED if ts > self._last_ts else Verdict.SEEN

    def applied(self, seq: int, ts: float) -> None:
        """A batch was applied, or given up: the next one is seq + 1."""
        self.expected = seq + 1
        self._last_ts = max(ts, self._last_ts)

    def skip(self, seq: int) -> None:
        """A batch can't be read: don't wait for it."""
        self.expected = max(self.expected, seq + 1)


class ClearFence:
    """Keeps a rank's stream in step with resets that are done over another channel.

    vLLM answers a reset at once, but its AllBlocksCleared comes with the next engine step, which an idle engine may never take.
    Whoever resets announces the clear itself; then all that the stream still says about the time before must be dropped, up to
    and including vLLM's own announcement.
    """

    def __init__(self) -> None:
        self._holding = False
        self._held: list[EngineEvent] = []
        self._clears_due = 0

    def hold(self) -> None:
        """A reset begins: keep back what comes until `release`."""
        self._holding = True

    def release(self, *, cleared: bool) -> list[EngineEvent]:
        """The reset is over; returns the kept events that still count. `cleared`: vLLM did it."""
        self._holding = False
        held, self._held = self._held, []
        if cleared:
            self._clears_due += 1
        return self.filter(held)

    def filter(self, events: Sequence[EngineEvent]) -> list[EngineEvent]:
        """The events that may be applied now."""
        if self._holding:
            self._held += events
            return []
        if not self._clears_due:
            return list(events)
        for position, event in enumerate(events):
            if isinstance(event, AllBlocksCleared):
                self._clears_due -= 1
                if not self._clears_due:
                    return list(events[position + 1 :])
        return []
