"""One rank's side of the index: its mirror, and what is told of it in numbered batches and loads. Pure: time is an argument."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from rankway import bus
from rankway.blocks import pack_hashes
from rankway.ranks import GlobalRank, Instance
from rankway.v1 import events_pb2
from rankway.worker.engine import EngineLoad
from rankway.worker.mirror import Change, Cleared, Mirror, Removed, Stored

BATCH_BLOCKS = (bus.MAX_PAYLOAD_BYTES - 1_000) // 8
"""Most block hashes in one message; the rest of the room is for names and framing."""

EVENT_BYTES = 24
"""Upper bound of an event's framing in a batch: tags, lengths, parent hash."""


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """What a rank holds as of `seq`."""

    seq: int
    blocks: array[int]
    digest: int


@dataclass(slots=True)
class FeedCounts:
    """What was sent and dropped on one rank since the start."""

    batches: int = 0
    dropped_batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    loads: int = 0
    dropped_loads: int = 0
    lost_events: int = 0
    """How often the engine's events were lost for good."""


class RankFeed:
    """One rank: its mirror, its seqs, its counts."""

    def __init__(self, instance: Instance, dp_rank: GlobalRank, model: str, block_size: int) -> None:
        self.instance = instance
        self.dp_rank = dp_rank
        self.mirror = Mirror(model, block_size)
        self.counts = FeedCounts()
        self.seq = 0
        self.load_seq = 0
        self.load = EngineLoad()

    def batches(self, changes: Sequence[Change], published_us: int) -> list[bytes]:
        """Changes as serialized KvEventBatches in order, each with the next seq and within NATS's limit."""
        messages = []
        for group in split_changes(changes):
            self.seq += 1
            batch = events_pb2.KvEventBatch(
                worker_id=self.instance.worker_id,
                epoch=self.instance.epoch,
                dp_rank=self.dp_rank,
                seq=self.seq,
                events=[self._event(change) for change in group],
                published_us=published_us,
            )
            messages.append(batch.SerializeToString())
        return messages

    def load_report(self, total_blocks: int, published_us: int) -> bytes:
        """The last load with the mirror's state as of the last seq, serialized."""
        self.load_seq += 1
        load = self.load
        return events_pb2.RankLoad(
            worker_id=self.instance.worker_id,
            epoch=self.instance.epoch,
            dp_rank=self.dp_rank,
            running=load.running,
            waiting=load.waiting,
            deferred=load.deferred,
            used_blocks=load.used_blocks,
            total_blocks=total_blocks,
            preemptions=load.preemptions,
            prefill_tokens=load.prefill_tokens,
            queue_time_ms=load.queue_time_ms,
            kv_seq=self.seq,
            kv_digest=self.mirror.digest,
            kv_block_count=len(self.mirror),
            published_us=published_us,
            load_seq=self.load_seq,
        ).SerializeToString()

    def snapshot(self) -> RankSnapshot:
        return RankSnapshot(self.seq, self.mirror.snapshot(), self.mirror.digest)

    def _event(self, change: Change) -> events_pb2.KvEvent:
        if isinstance(change, Stored):
            self.counts.stored_blocks += len(change.blocks)
            stored = events_pb2.Stored(parent_hash=change.parent, block_hashes=pack_hashes(change.blocks))
            return events_pb2.KvEvent(stored=stored)
        if isinstance(change, Removed):
            self.counts.removed_blocks += len(change.blocks)
            return events_pb2.KvEvent(removed=events_pb2.Removed(block_hashes=pack_hashes(change.blocks)))
        return events_pb2.KvEvent(cleared=events_pb2.Cleared())


def split_changes(changes: Sequence[Change], most_blocks: int = BATCH_BLOCKS) -> list[list[Change]]:
    """Groups of changes, in order, that each fit one message of `most_blocks` block hashes."""
    framing = EVENT_BYTES // 8
    if sum(framing + (0 if isinstance(change, Cleared) else len(change.blocks)) for change in changes) <= most_blocks:
        return [list(changes)] if changes else []
    groups: list[list[Change]] = []
    group: list[Change] = []
    room = most_blocks
    for change in itertools.chain.from_iterable(_parts(change, most_blocks - framing) for change in changes):
        blocks = framing + (0 if isinstance(change, Cleared) else len(change.blocks))
        if group and blocks > room:
            groups.append(group)
            group, room = [], most_blocks
        group.append(change)
        room -= blocks
    if group:
        groups.append(group)
    return groups


def _parts(change: Change, most: int) -> list[Change]:
    if isinstance(change, Cleared) or len(change.blocks) <= most:
        return [change]
    parts: list[Change] = []
    for start in range(0, len(change.blocks), most):
        blocks = change.blocks[start : start + most]
        if isinstance(change, Removed):
            parts.append(Removed(blocks))
        else:
            parts.append(Stored(change.blocks[start - 1] if start else change.parent, blocks))
    return parts
