"""What followers are sent: a snapshot rank by rank, then every change, in one order without a gap. No I/O of its own.

A follower's writer asks `Follower.next` for the next bytes. Ranks that it has not been sent yet are snapshotted a few at a time,
when their turn comes; from that moment on (and not before) their changes are queued for it. Reading one rank's blocks takes as
long as reading all of the index; a few at a time, a follower costs a few such passes and as many blocks in memory.

A message is encoded once for all followers; only its position differs, and stands in front.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rankway.errors import Overloaded, RankwayError, Unavailable
from rankway.indexer.events import KvBatch, RankLoad
from rankway.indexer.rank import Rank, Snapshot
from rankway.indexer.slots import RankKey
from rankway.indexer.tracker import Observer
from rankway.v1 import indexer_pb2

CHUNK_BYTES = 256 * 1024
"""Block hashes in one RankBlocks message: 32,768 blocks, a millisecond's work at the follower."""

SNAPSHOT_BLOCKS = 2**21
"""How many blocks ranks may have together that are snapshotted in one pass: 16 MiB of hashes. One rank may have more."""

PACK_BYTES = 128 * 1024
"""How much of what waits already goes into one gRPC message."""

_POSITION_TAG = b"\x08"  # FollowResponse.position = 1, varint
_BATCH_TAG = b"\x2a"  # FollowResponse.batch = 5, length-delimited
_LOAD_TAG = b"\x32"  # FollowResponse.load = 6
_SEVERAL_TAG = b"\x4a"  # FollowResponse.several = 9
_RESPONSES_TAG = b"\x0a"  # Several.responses = 1


@dataclass(frozen=True, slots=True)
class FollowerLimits:
    """What may wait for one follower; beyond, it is too slow and is cut off."""

    messages: int = 100_000
    bytes: int = 64 * 2**20


class Feed(Observer):
    """All followers."""

    def __init__(self, indexer_id: str, ranks: dict[RankKey, Rank], limits: FollowerLimits) -> None:
        self.indexer_id = indexer_id
        self.followers: list[Follower] = []
        self.cut_off = 0
        """Followers that were too slow."""
        self._ranks = ranks
        self._limits = limits

    def open(self, follower_id: str, dp_group: str) -> Follower:
        """A follower of the ranks that there are now and of those to come; `close` it in the end."""
        wanted = [key for key, rank in self._ranks.items() if not dp_group or rank.dp_group == dp_group]
        follower = Follower(follower_id, dp_group, self.indexer_id, deque(wanted), self._ranks, self._limits)
        self.followers.append(follower)
        return follower

    def close(self, follower: Follower) -> None:
        self.followers.remove(follower)
        self.cut_off += follower.overrun

    def end(self) -> None:
        """The indexer stops: every stream ends with UNAVAILABLE, and its follower goes to another indexer."""
        for follower in self.followers:
            follower.end(Unavailable(f"indexer {self.indexer_id} is stopping"))

    def joined(self, rank: Rank) -> None:
        for follower in self.followers:
            follower.joined(rank)

    def applied(self, rank: Rank, batch: KvBatch) -> None:
        self._send(rank, _BATCH_TAG, batch.payload)

    def loaded(self, rank: Rank, load: RankLoad) -> None:
        self._send(rank, _LOAD_TAG, load.payload)

    def unknown(self, rank: Rank) -> None:
        self._send_encoded(rank, [_encode_state(rank)])

    def repaired(self, rank: Rank, snapshot: Snapshot) -> None:
        # The snapshot's own blocks: reading the rank's would be a pass over the index for each that is repaired.
        if any(rank.key in follower.sent for follower in self.followers):
            self._send_encoded(rank, list(_encode_blocks(rank, snapshot.seq, b"".join(snapshot.chunks))))

    def gone(self, rank: Rank) -> None:
        key = rank.key
        message = indexer_pb2.RankGone(worker_id=key.worker_id, epoch=key.epoch, dp_rank=key.dp_rank)
        self._send_encoded(rank, [indexer_pb2.FollowResponse(gone=message).SerializeToString()])
        for follower in self.followers:
            follower.sent.discard(key)

    def _send(self, rank: Rank, tag: bytes, payload: bytes) -> None:
        if self.followers:
            self._send_encoded(rank, [b"".join((tag, _varint(len(payload)), payload))])

    def _send_encoded(self, rank: Rank, messages: list[bytes]) -> None:
        for follower in self.followers:
            if rank.key in follower.sent:
                follower.queue(messages)


class Follower:
    """One follower's stream. `next` is called by its writer alone."""

    def __init__(
        self,
        follower_id: str,
        dp_group: str,
        indexer_id: str,
        unsent: deque[RankKey],
        ranks: dict[RankKey, Rank],
        limits: FollowerLimits,
    ) -> None:
        self.follower_id = follower_id
        self.dp_group = dp_group
        self.sent: set[RankKey] = set()
        """Ranks whose state has been sent or queued: only their changes concern this follower."""
        self._ended: RankwayError | None = None
        self._unsent = unsent
        self._ranks = ranks
        self._limits = limits
        begin = indexer_pb2.FollowBegin(indexer_id=indexer_id)
        self._queue: deque[bytes] = deque([indexer_pb2.FollowResponse(begin=begin).SerializeToString()])
        self._queued_bytes = 0
        self._filled = asyncio.Event()
        self._ready_told = False
        self._position = 0

    @property
    def queued(self) -> int:
        """Messages that wait."""
        return len(self._queue)

    def joined(self, rank: Rank) -> None:
        """A rank that came after `open`: its changes are queued from the start."""
        if not self.dp_group or rank.dp_group == self.dp_group:
            self.sent.add(rank.key)

    def queue(self, messages: list[bytes]) -> None:
        """Queue encoded FollowResponses without a position."""
        if self._ended is not None:
            return
        self._queue.extend(messages)
        self._queued_bytes += sum(map(len, messages))
        if len(self._queue) > self._limits.messages or self._queued_bytes > self._limits.bytes:
            self.end(
                Overloaded(
                    f"follower {self.follower_id or 'without id'} is too slow: more than {self._limits.messages} messages or "
                    f"{self._limits.bytes} bytes were waiting for it"
                )
            )
        self._filled.set()

    def end(self, error: RankwayError) -> None:
        """Forget what waits; `next` raises `error`."""
        self._ended = error
        self._queue.clear()
        self._filled.set()

    @property
    def overrun(self) -> bool:
        """More was waiting than the limits allow."""
        return isinstance(self._ended, Overloaded)

    async def next(self) -> bytes:
        """The next message to write, encoded; waits until there is one.

        Raises:
            Overloaded: the follower is too slow; it must follow afresh.
            Unavailable: the indexer is stopping.
        """
        while True:
            message = self.poll()
            if message is not None:
                return message
            self._filled.clear()
            await self._filled.wait()

    def poll(self) -> bytes | None:
        """`next` without waiting: None if there is nothing to write now."""
        while True:
            if self._ended is not None:
                raise self._ended
            if self._queue:
                return self._pack()
            if self._unsent:
                self._snapshot_some()
            elif not self._ready_told:
                self._ready_told = True
                return self._placed(indexer_pb2.FollowResponse(ready=indexer_pb2.FollowReady()).SerializeToString())
            else:
                return None

    def _snapshot_some(self) -> None:
        ranks: list[Rank] = []
        blocks = 0
        while self._unsent and blocks < SNAPSHOT_BLOCKS:
            rank = self._ranks.get(self._unsent.popleft())
            if rank is not None:
                ranks.append(rank)
                blocks += rank.index.size(rank.slot)
        known = [rank for rank in ranks if rank.known]
        packed = iter(known[0].index.blocks_of(rank.slot for rank in known) if known else ())
        for rank in ranks:
            self._queue_state(rank, next(packed) if rank.known else None)

    def _queue_state(self, rank: Rank, packed: bytes | None) -> None:
        self.sent.add(rank.key)
        messages = [_encode_state(rank)] if packed is None else list(_encode_blocks(rank, rank.last_seq, packed))
        if rank.last_load is not None:
            payload = rank.last_load.payload
            messages.append(b"".join((_LOAD_TAG, _varint(len(payload)), payload)))
        self._queue.extend(messages)
        self._queued_bytes += sum(map(len, messages))

    def _pack(self) -> bytes:
        """The first of the queue, with what waits behind it as long as it fits one message."""
        first = self._take()
        if not self._queue or len(first) >= PACK_BYTES:
            return first
        parts: list[bytes] = []
        size = 0
        message = first
        while True:
            parts += (_RESPONSES_TAG, _varint(len(message)), message)
            size += len(message)
            if not self._queue or size + len(self._queue[0]) > PACK_BYTES:
                break
            message = self._take()
        body = b"".join(parts)
        return b"".join((_SEVERAL_TAG, _varint(len(body)), body))

    def _take(self) -> bytes:
        message = self._queue.popleft()
        self._queued_bytes -= len(message)
        return self._placed(message)

    def _placed(self, message: bytes) -> bytes:
        self._position += 1
        return b"".join((_POSITION_TAG, _varint(self._position), message))


def _encode_blocks(rank: Rank, seq: int, packed: bytes) -> Iterator[bytes]:
    """What the rank holds as of a seq, as encoded FollowResponses."""
    key = rank.key
    for start in range(0, max(len(packed), 1), CHUNK_BYTES):
        message = indexer_pb2.RankBlocks(
            worker_id=key.worker_id,
            epoch=key.epoch,
            dp_rank=key.dp_rank,
            dp_group=rank.dp_group,
            seq=seq,
            first=start == 0,
            last=start + CHUNK_BYTES >= len(packed),
            block_hashes=packed[start : start + CHUNK_BYTES],
        )
        yield indexer_pb2.FollowResponse(blocks=message).SerializeToString()


def _encode_state(rank: Rank) -> bytes:
    key = rank.key
    state = indexer_pb2.RankState(
        worker_id=key.worker_id, epoch=key.epoch, dp_rank=key.dp_rank, known=rank.known, dp_group=rank.dp_group
    )
    return indexer_pb2.FollowResponse(state=state).SerializeToString()


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
