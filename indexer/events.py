"""What workers publish, as typed values: batches of KV events and loads. Parsing checks everything that later code relies on."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf.message import DecodeError

from rankway.index import Index
from rankway.indexer.slots import RankKey
from rankway.v1 import events_pb2


class Malformed(ValueError):
    """A payload that is none of ours, or breaks the contract of `events.proto`."""


class Kind(enum.IntEnum):
    """What happened to blocks."""

    STORED = 0
    REMOVED = 1
    CLEARED = 2


class KvEvent(NamedTuple):
    kind: Kind
    block_hashes: bytes
    """Packed little-endian uint64; empty for CLEARED."""


@dataclass(frozen=True, slots=True)
class KvBatch:
    """One KvEventBatch, and the bytes it came in: they are passed on as they are."""

    rank: RankKey
    seq: int
    events: tuple[KvEvent, ...]
    published_us: int
    payload: bytes = field(repr=False)

    def apply_to(self, index: Index, slot: int) -> None:
        """Do to the slot's blocks what happened in the rank's cache, in order."""
        for kind, block_hashes in self.events:
            if kind is Kind.STORED:
                index.store(slot, block_hashes)
            elif kind is Kind.REMOVED:
                index.remove(slot, block_hashes)
            else:
                index.clear(slot)


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One RankLoad message; the fields are those of `events.proto`."""

    rank: RankKey
    running: int
    waiting: int
    deferred: int
    used_blocks: int
    total_blocks: int
    preemptions: int
    prefill_tokens: int
    queue_time_ms: float
    kv_seq: int
    kv_digest: int
    kv_block_count: int
    load_seq: int
    published_us: int
    payload: bytes = field(repr=False)


def parse_batch(payload: bytes) -> KvBatch:
    """Raises Malformed for anything that can't be applied as a whole: then its seq is missing and a repair sets it right."""
    try:
        message = events_pb2.KvEventBatch.FromString(payload)
    except DecodeError as error:
        raise Malformed(f"no KvEventBatch: {error}") from None
    return batch_from_proto(message, payload)


def batch_from_proto(message: events_pb2.KvEventBatch, payload: bytes = b"") -> KvBatch:
    """Raises Malformed as `parse_batch` does."""
    if message.seq == 0:
        raise Malformed("seq=0: seqs start at 1")
    events = []
    for event in message.events:
        kind = event.WhichOneof("event")
        if kind == "stored":
            events.append(KvEvent(Kind.STORED, _whole(event.stored.block_hashes)))
        elif kind == "removed":
            events.append(KvEvent(Kind.REMOVED, _whole(event.removed.block_hashes)))
        elif kind == "cleared":
            events.append(KvEvent(Kind.CLEARED, b""))
        else:
            raise Malformed(f"seq={message.seq}: an event of an unknown kind")
    rank = RankKey(message.worker_id, message.epoch, message.dp_rank)
    return KvBatch(rank, message.seq, tuple(events), message.published_us, payload)


def parse_load(payload: bytes) -> RankLoad:
    """Raises Malformed if it is no RankLoad."""
    try:
        message = events_pb2.RankLoad.FromString(payload)
    except DecodeError as error:
        raise Malformed(f"no RankLoad: {error}") from None
    return load_from_proto(message, payload)


def load_from_proto(message: events_pb2.RankLoad, payload: bytes = b"") -> RankLoad:
    """Raises Malformed as `parse_load` does."""
    if message.load_seq == 0:
        raise Malformed("load_seq=0: they start at 1")
    return RankLoad(
        rank=RankKey(message.worker_id, message.epoch, message.dp_rank),
        running=message.running,
        waiting=message.waiting,
        deferred=message.deferred,
        used_blocks=message.used_blocks,
        total_blocks=message.total_blocks,
        preemptions=message.preemptions,
        prefill_tokens=message.prefill_tokens,
        queue_time_ms=message.queue_time_ms,
        kv_seq=message.kv_seq,
        kv_digest=message.kv_digest,
        kv_block_count=message.kv_block_count,
        load_seq=message.load_seq,
        published_us=message.published_us,
        payload=payload,
    )


def _whole(packed: bytes) -> bytes:
    if len(packed) % 8:
        raise Malformed(f"block_hashes of {len(packed)} bytes: not a multiple of 8")
    return packed
