"""The indexer's gRPC service. Follow writes bytes that are encoded already, so its handler is registered by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from rankway import bus, logs, native, prompts, rpc
from rankway.blocks import pack_tokens, root_hash
from rankway.errors import InvalidField, Unavailable, UnknownModel
from rankway.indexer.feed import Feed
from rankway.indexer.intake import Intake
from rankway.indexer.rank import Rank
from rankway.indexer.tracker import Member, Tracker
from rankway.v1 import indexer_pb2, types_pb2

log = logs.get("servicer")

SERVICE_NAME = "rankway.v1.Indexer"


@dataclass(slots=True)
class State:
    """What the handlers read."""

    tracker: Tracker
    feed: Feed
    intake: Intake
    bus: bus.BusStatus
    ready: bool = False
    """The first resync is over."""


class Servicer:
    def __init__(self, state: State, clock: Any) -> None:
        self._state = state
        self._clock = clock

    def add_to(self, server: rpc.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Follow": grpc.unary_stream_rpc_method_handler(
                self.Follow, request_deserializer=indexer_pb2.FollowRequest.FromString, response_serializer=None
            ),
            "FindMatches": grpc.unary_unary_rpc_method_handler(
                self.FindMatches,
                request_deserializer=indexer_pb2.FindMatchesRequest.FromString,
                response_serializer=indexer_pb2.FindMatchesResponse.SerializeToString,
            ),
            "Stats": grpc.unary_unary_rpc_method_handler(
                self.Stats,
                request_deserializer=indexer_pb2.StatsRequest.FromString,
                response_serializer=indexer_pb2.StatsResponse.SerializeToString,
            ),
        }
        server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    @rpc.stream
    async def Follow(self, request: indexer_pb2.FollowRequest, context: Any) -> AsyncIterator[bytes]:
        if not self._state.ready:
            raise Unavailable("the first resync is under way")
        feed = self._state.feed
        follower = feed.open(request.follower_id, request.dp_group)
        log.info("follower", follower_id=request.follower_id, dp_group=request.dp_group, peer=context.peer())
        try:
            while True:
                yield await follower.next()
        finally:
            feed.close(follower)
            log.info("follower left", follower_id=request.follower_id, too_slow=follower.overrun)

    @rpc.unary
    async def FindMatches(self, request: indexer_pb2.FindMatchesRequest, context: Any) -> indexer_pb2.FindMatchesResponse:
        has_tokens = bool(request.token_ids.ids or request.token_ids.packed)
        if bool(request.block_hashes) == has_tokens:
            raise InvalidField("block_hashes", len(request.block_hashes), "give either block_hashes or token_ids")
        if has_tokens:
            return self._match_tokens(request)
        if len(request.block_hashes) % 8:
            raise InvalidField("block_hashes", len(request.block_hashes), "bytes: not a multiple of 8")
        members = [m for m in self._state.tracker.members.values() if request.dp_group in ("", m.dp_group)]
        return _answer(self._match(request.block_hashes, members), len(request.block_hashes) // 8)

    def _match_tokens(self, request: indexer_pb2.FindMatchesRequest) -> indexer_pb2.FindMatchesResponse:
        if not request.model:
            raise InvalidField("model", request.model, "token_ids are hashed for a model: name it")
        tokens = _tokens(request.token_ids)
        members = self._state.tracker.members.values()
        serving = [m for m in members if request.model in (m.model, *m.model_aliases) and request.dp_group in ("", m.dp_group)]
        if not serving:
            raise UnknownModel(request.model, list({m.model for m in members}))
        found: list[tuple[int, Rank]] = []
        blocks = 0
        for model, block_size in {(m.model, m.block_size) for m in serving}:
            hashes = native.hash_chain(tokens, block_size, root_hash(model, request.lora, request.cache_salt))
            blocks = max(blocks, len(hashes) // 8)
            found += self._match(hashes, [m for m in serving if (m.model, m.block_size) == (model, block_size)])
        return _answer(found, blocks)

    def _match(self, hashes: bytes, members: list[Member]) -> list[tuple[int, Rank]]:
        """(overlap, rank) of the members' known ranks that hold the first block."""
        tracker = self._state.tracker
        wanted = {member.worker_id for member in members}
        found = []
        for slot, overlap in tracker.index.match(hashes).items():
            rank = tracker.by_slot(slot)
            if rank is not None and rank.known and rank.key.worker_id in wanted:
                found.append((overlap, rank))
        return found

    @rpc.unary
    async def Stats(self, request: indexer_pb2.StatsRequest, context: Any) -> indexer_pb2.StatsResponse:
        state = self._state
        ranks = [r for r in state.tracker.ranks.values() if request.dp_group in ("", r.dp_group)]
        now = self._clock()
        return indexer_pb2.StatsResponse(
            indexer_id=state.feed.indexer_id,
            ranks=[_rank_stats(rank, now) for rank in ranks],
            distinct_blocks=len(state.tracker.index),
            malformed_messages=state.intake.malformed,
            unknown_worker_messages=state.tracker.unknown_worker_messages,
            followers=len(state.feed.followers),
            dropped_batches=state.bus.slow_consumer_drops + sum(rank.dropped_batches for rank in ranks),
        )


def _answer(found: list[tuple[int, Rank]], prompt_blocks: int) -> indexer_pb2.FindMatchesResponse:
    found.sort(key=lambda pair: (-pair[0], pair[1].key))
    matches = [
        indexer_pb2.RankMatch(worker_id=rank.key.worker_id, dp_rank=rank.key.dp_rank, overlap_blocks=overlap)
        for overlap, rank in found
    ]
    return indexer_pb2.FindMatchesResponse(matches=matches, prompt_blocks=prompt_blocks)


def _tokens(message: types_pb2.TokenIds) -> bytes:
    try:
        return pack_tokens(prompts.token_ids(message))
    except ValueError as error:
        raise InvalidField("token_ids.packed", len(message.packed), str(error)) from None


def _rank_stats(rank: Rank, now: float) -> indexer_pb2.RankStats:
    return indexer_pb2.RankStats(
        worker_id=rank.key.worker_id,
        epoch=rank.key.epoch,
        dp_rank=rank.key.dp_rank,
        dp_group=rank.dp_group,
        known=rank.known,
        last_seq=rank.last_seq,
        block_count=rank.index.size(rank.slot),
        digest=rank.index.digest(rank.slot),
        batch_age_ms=_age_ms(rank.batch_at, now),
        load_age_ms=_age_ms(rank.load_at, now),
        lag_ms=rank.lag_ms,
        repairs={cause.value: count for cause, count in rank.repairs.items()},
        duplicates=rank.duplicates,
    )


def _age_ms(at: float | None, now: float) -> int | None:
    return None if at is None else max(int((now - at) * 1000), 0)
