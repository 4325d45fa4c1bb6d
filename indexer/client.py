"""Following an indexer: typed updates that never end, from whichever indexer serves."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from rankway import logs, rpc
from rankway.indexer.events import KvBatch, Malformed, RankLoad, batch_from_proto, load_from_proto
from rankway.indexer.slots import RankKey
from rankway.v1 import indexer_pb2, indexer_pb2_grpc

log = logs.get("follower")

FIRST_MESSAGE_TIMEOUT_S = 2.0
"""An indexer that takes the connection and does not begin its view, which costs it nothing, is left for the next one."""

RETRY_MIN_S, RETRY_MAX_S = 0.05, 2.0
"""Pause before the next indexer is tried: doubles until a view was complete, with jitter."""


@dataclass(frozen=True, slots=True)
class ViewBegin:
    """A new view begins; the old one serves until each rank's blocks have come, and is over at `ViewReady`."""

    indexer_id: str


@dataclass(frozen=True, slots=True)
class ViewReady:
    """The view is complete: ranks that it did not name are gone."""


@dataclass(frozen=True, slots=True)
class RankBlocks:
    """Part of what a rank holds as of `seq`; the chunks from `first` to `last` replace what it held."""

    rank: RankKey
    dp_group: str
    seq: int
    first: bool
    last: bool
    block_hashes: bytes = field(repr=False)
    """Packed little-endian uint64."""


@dataclass(frozen=True, slots=True)
class RankKnown:
    """Whether the rank's index is known; one that isn't is being repaired."""

    rank: RankKey
    dp_group: str
    known: bool


@dataclass(frozen=True, slots=True)
class RankGone:
    rank: RankKey


@dataclass(frozen=True, slots=True)
class ViewLost:
    """The view is followed no longer: what is known serves on, and grows old, until the next one."""


Update = KvBatch | RankLoad | RankBlocks | RankKnown | RankGone | ViewBegin | ViewReady | ViewLost


class Follower:
    """An endless stream of updates: `async for update in follower`, once. It reconnects and goes from indexer to indexer.

    A hole in the positions of a stream, or a message that can't be read, makes it follow afresh.
    """

    def __init__(self, endpoints: Sequence[str], dp_group: str = "", follower_id: str = "") -> None:
        if not endpoints:
            raise ValueError("indexer_endpoints is empty")
        self.endpoints = tuple(endpoints)
        self.connected_to = ""
        """The endpoint whose view is being followed; empty: none, the last known view serves."""
        self.connects = 0
        """Views begun."""
        self._request = indexer_pb2.FollowRequest(dp_group=dp_group, follower_id=follower_id)
        self._restart_reason = ""
        self._call: grpc.aio.UnaryStreamCall[indexer_pb2.FollowRequest, indexer_pb2.FollowResponse] | None = None

    def restart(self, reason: str) -> None:
        """Leave the view, which is not right, and follow afresh."""
        self._restart_reason = reason
        if self._call is not None:
            self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[Update]:
        turn = 0
        pause_s = RETRY_MIN_S
        while True:
            endpoint = self.endpoints[turn % len(self.endpoints)]
            turn += 1
            self._restart_reason = ""
            reason = ""
            try:
                async with contextlib.aclosing(self._view(endpoint)) as updates:
                    async for update in updates:
                        if isinstance(update, ViewReady):
                            pause_s = RETRY_MIN_S
                        yield update
                        if self._restart_reason:
                            break
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except Malformed as error:
                reason = str(error)
            except TimeoutError:
                reason = f"no message in {FIRST_MESSAGE_TIMEOUT_S} s"
            finally:
                was_followed, self.connected_to = bool(self.connected_to), ""
            if was_followed:
                yield ViewLost()
            log.info("following afresh", endpoint=endpoint, reason=self._restart_reason or reason or "the stream ended")
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def _view(self, endpoint: str) -> AsyncGenerator[Update, None]:
        """One stream of one indexer. A fresh channel: an old one would still be in back-off after the indexer's restart."""
        async with rpc.open_channel(endpoint) as channel:
            call = indexer_pb2_grpc.IndexerStub(channel).Follow(self._request)
            self._call = call
            try:
                async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
                    message = await call.read()
                self.connected_to = endpoint
                self.connects += 1
                position = 0
                while isinstance(message, indexer_pb2.FollowResponse):
                    for response in unpacked(message):
                        position += 1
                        if response.position != position:
                            raise Malformed(f"position {response.position} where {position} was due")
                        yield update_of(response)
                    message = await call.read()
            except asyncio.CancelledError:
                # `restart` cancels the call, which makes `read` raise this too.
                if not self._restart_reason or _cancelled():
                    raise
            finally:
                self._call = None
                call.cancel()


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def unpacked(message: indexer_pb2.FollowResponse) -> Iterator[indexer_pb2.FollowResponse]:
    """The responses of one gRPC message, each with its position."""
    if message.WhichOneof("event") == "several":
        yield from message.several.responses
    else:
        yield message


def update_of(response: indexer_pb2.FollowResponse) -> Update:
    """Raises Malformed if the message is none that this release knows."""
    kind = response.WhichOneof("event")
    if kind == "batch":
        return batch_from_proto(response.batch)
    if kind == "load":
        return load_from_proto(response.load)
    if kind == "blocks":
        b = response.blocks
        if len(b.block_hashes) % 8:
            raise Malformed(f"block_hashes of {len(b.block_hashes)} bytes: not a multiple of 8")
        return RankBlocks(RankKey(b.worker_id, b.epoch, b.dp_rank), b.dp_group, b.seq, b.first, b.last, b.block_hashes)
    if kind == "state":
        s = response.state
        return RankKnown(RankKey(s.worker_id, s.epoch, s.dp_rank), s.dp_group, s.known)
    if kind == "gone":
        return RankGone(RankKey(response.gone.worker_id, response.gone.epoch, response.gone.dp_rank))
    if kind == "begin":
        return ViewBegin(response.begin.indexer_id)
    if kind == "ready":
        return ViewReady()
    raise Malformed(f"a message of an unknown kind at position {response.position}")
