"""The worker's gRPC services: `rankway.v1.Worker` and `rankway.v1.Generation`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from rankway import logs, rpc
from rankway.blocks import pack_hashes
from rankway.errors import EngineFailed, Mismatch, RankwayError
from rankway.ranks import GlobalRank
from rankway.registry import records
from rankway.registry.client import LeaseKeeper
from rankway.v1 import generate_pb2, generate_pb2_grpc, worker_pb2, worker_pb2_grpc
from rankway.worker.attach import Session
from rankway.worker.engine import Engine
from rankway.worker.generate import Collector, finished, order_from_request
from rankway.worker.publisher import Publisher
from rankway.worker.requests import Requests

log = logs.get("servicer")

SERVICE_NAMES = ("rankway.v1.Worker", "rankway.v1.Generation")

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(generate_pb2_grpc.GenerationServicer):
    """Clients that talk to the worker itself."""

    def __init__(self, requests: Requests, worker_id: str, dp_group: str) -> None:
        self._requests = requests
        self._worker_id = worker_id
        self._dp_group = dp_group

    @rpc.stream
    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        order = await order_from_request(request, self._requests, self._worker_id, self._dp_group, context.time_remaining())
        collector = Collector()
        running = self._requests.start(order, collector)
        try:
            yield generate_pb2.GenerateResponse(
                routed=generate_pb2.Routed(
                    request_id=order.request_id,
                    worker_id=self._worker_id,
                    dp_rank=order.dp_rank,
                    prompt_tokens=len(order.prompt),
                )
            )
            async for delta in collector.deltas(self._requests.tokenizer):
                yield generate_pb2.GenerateResponse(delta=delta)
            yield generate_pb2.GenerateResponse(finished=finished(collector, len(order.prompt)))
        finally:
            # The client may have gone at any of the yields.
            running.abort()


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Routers, indexers and operators."""

    def __init__(
        self,
        engine: Engine,
        requests: Requests,
        publisher: Publisher,
        keeper: LeaseKeeper,
        leave: asyncio.Event,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._publisher = publisher
        self._keeper = keeper
        self._leave = leave

    async def Attach(  # type: ignore[override]  # grpc.aio takes handlers that read and write the context, too
        self, requests: AsyncIterator[worker_pb2.AttachRequest], context: Context
    ) -> None:
        try:
            await context.send_initial_metadata(())
            await Session(self._requests, records.to_proto(self._keeper.record)).serve(context)
        except RankwayError as error:
            await rpc.abort(context, error)
        except asyncio.CancelledError:
            await context.abort(grpc.StatusCode.CANCELLED, "cancelled")
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("handler failed", method="Attach")
            await rpc.abort(context, EngineFailed("internal error in Attach"))

    @rpc.stream
    async def Snapshot(self, request: worker_pb2.SnapshotRequest, context: Context) -> AsyncIterator[worker_pb2.SnapshotResponse]:
        snapshot = self._publisher.snapshot(self._requests.limits.local_rank(request.dp_rank))
        step = rpc.CHUNK_BYTES // 8
        for start in range(0, max(1, len(snapshot.blocks)), step):
            yield worker_pb2.SnapshotResponse(
                epoch=self._keeper.record.epoch,
                seq=snapshot.seq,
                block_hashes=pack_hashes(snapshot.blocks[start : start + step]),
                kv_digest=snapshot.digest,
                kv_block_count=len(snapshot.blocks),
            )

    @rpc.stream
    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GetTokenizerResponse]:
        tokenizer = self._requests.tokenizer
        for name, data in (tokenizer.files() or {"": b""}).items():
            for start in range(0, max(1, len(data)), rpc.CHUNK_BYTES):
                yield worker_pb2.GetTokenizerResponse(
                    file=name, data=data[start : start + rpc.CHUNK_BYTES], fingerprint=tokenizer.fingerprint
                )

    @rpc.unary
    async def ResetPrefixCache(
        self, request: worker_pb2.ResetPrefixCacheRequest, context: Context
    ) -> worker_pb2.ResetPrefixCacheResponse:
        wanted = self._requests.limits.local_rank(request.dp_rank) if request.HasField("dp_rank") else None
        done = await self._engine.reset_prefix_cache(wanted)
        for local_rank in done:
            self._publisher.cleared(local_rank)
        dp_ranks = [self._requests.limits.info.window.to_global(local_rank) for local_rank in done]
        log.info("prefix cache reset", dp_ranks=dp_ranks)
        return worker_pb2.ResetPrefixCacheResponse(dp_ranks=dp_ranks)

    @rpc.unary
    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:
        if request.HasField("dp_rank"):
            return await self._drain_rank(request.dp_rank, request.undo)
        if request.undo:
            raise Mismatch(f"worker {self._keeper.record.worker_id}: a worker's drain can't be undone")
        log.info("drain asked for", running=self._requests.count())
        self._requests.draining = True
        self._leave.set()
        return worker_pb2.DrainResponse(running=self._requests.count())

    async def _drain_rank(self, dp_rank: int, undo: bool) -> worker_pb2.DrainResponse:
        self._requests.limits.local_rank(dp_rank)
        rank = GlobalRank(dp_rank)
        ranks = self._requests.draining_ranks
        ranks.discard(rank) if undo else ranks.add(rank)
        await self._keeper.update(replace(self._keeper.record, draining_ranks=tuple(sorted(ranks))))
        log.info("rank takes requests again" if undo else "rank drains", dp_rank=rank, running=self._requests.count(rank))
        return worker_pb2.DrainResponse(running=self._requests.count(rank))
