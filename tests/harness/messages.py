"""KV event batches and loads as a worker would send them, for tests of whoever receives them."""

from __future__ import annotations

from collections.abc import Sequence

from rankway.blocks import mix, pack_hashes
from rankway.indexer.events import KvBatch, RankLoad, parse_batch, parse_load
from rankway.indexer.rank import Snapshot
from rankway.indexer.slots import RankKey
from rankway.v1 import events_pb2

Event = tuple[str, Sequence[int]]
"""("stored" | "removed" | "cleared", block hashes)."""


class RankSource:
    """A rank's held set and the messages that tell of its changes: seqs, loads and snapshots as a correct worker makes them."""

    def __init__(self, key: RankKey) -> None:
        self.key = key
        self.held: dict[int, None] = {}
        self.digest = 0
        self.seq = 0
        self.load_seq = 0

    def change(self, *events: Event) -> bytes:
        """Apply the events and return the batch that tells of them."""
        message = events_pb2.KvEventBatch(worker_id=self.key.worker_id, epoch=self.key.epoch, dp_rank=self.key.dp_rank)
        for kind, hashes in events:
            event = message.events.add()
            if kind == "stored":
                for block in hashes:
                    self.add_silently(block)
                event.stored.block_hashes = pack_hashes(hashes)
            elif kind == "removed":
                for block in hashes:
                    self._drop(block)
                event.removed.block_hashes = pack_hashes(hashes)
            else:
                self.held.clear()
                self.digest = 0
                event.cleared.SetInParent()
        self.seq += 1
        message.seq = self.seq
        return message.SerializeToString()

    def batch(self, *events: Event) -> KvBatch:
        return parse_batch(self.change(*events))

    def add_silently(self, block: int) -> None:
        """Hold a block that no batch tells of."""
        if block not in self.held:
            self.held[block] = None
            self.digest ^= mix(block)

    def _drop(self, block: int) -> None:
        if block in self.held:
            del self.held[block]
            self.digest ^= mix(block)

    def load_payload(self, **fields: int) -> bytes:
        """A load that tells of the rank as it is now; `fields` are set on the message."""
        self.load_seq += 1
        message = events_pb2.RankLoad(
            worker_id=self.key.worker_id,
            epoch=self.key.epoch,
            dp_rank=self.key.dp_rank,
            kv_seq=self.seq,
            kv_digest=self.digest,
            kv_block_count=len(self.held),
            load_seq=self.load_seq,
        )
        for name, value in fields.items():
            setattr(message, name, value)
        return message.SerializeToString()

    def load(self, **fields: int) -> RankLoad:
        return parse_load(self.load_payload(**fields))

    def snapshot(self) -> Snapshot:
        hashes = list(self.held)
        half = len(hashes) // 2
        return Snapshot(self.seq, self.digest, len(hashes), (pack_hashes(hashes[:half]), pack_hashes(hashes[half:])))
