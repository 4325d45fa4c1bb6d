"""The worker's gRPC services: `rankway.v1.Worker` and `rankway.v1.Generation`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import grpc.aio

from rankway import logs, rpc
from rankway.blocks import pack_hashes
from rankway.errors import Mismatch
from rankway.h2.calls import Call, Method, StreamedMethod
from rankway.h2.messages import parsed
from rankway.ranks import GlobalRank
from rankway.registry import records
from rankway.registry.client import LeaseKeeper
from rankway.registry.records import Record
from rankway.v1 import generate_pb2, worker_pb2, worker_pb2_grpc
from rankway.worker.attach import Session
from rankway.worker.engine import Engine
from rankway.worker.generate import GenerateCall, order_from_request
from rankway.worker.publisher import Publisher
from rankway.worker.requests import Requests

log = logs.get("servicer")

SERVICE_NAMES = ("rankway.v1.Worker", "rankway.v1.Generation")

Context = grpc.aio.ServicerContext[Any, Any]


class DirectMethods:
    """Attach and Generate, straight on the transport (`h2.server`).

    Args:
        record: the worker's record as it is now.
    """

    def __init__(self, requests: Requests, record: Callable[[], Record]) -> None:
        self._requests = requests
        self._record = record

    @property
    def methods(self) -> Mapping[str, Method]:
        return {"/rankway.v1.Generation/Generate": self._generate}

    @property
    def streamed(self) -> Mapping[str, StreamedMethod]:
        return {"/rankway.v1.Worker/Attach": self._attach}

    def _attach(self, call: Call) -> Session:
        return Session(call, self._requests, records.to_proto(self._record()))

    def _generate(self, call: Call, message: bytes) -> None:
        request = parsed(generate_pb2.GenerateRequest, message)
        call.begin()
        call.spawn(self._start(call, request))

    async def _start(self, call: Call, request: generate_pb2.GenerateRequest) -> None:
        record = self._record()
        timeout_s = None if call.deadline is None else call.deadline - asyncio.get_running_loop().time()
        order = await order_from_request(request, self._requests, record.worker_id, record.dp_group, timeout_s)
        running = self._requests.start(order, GenerateCall(call, self._requests.tokenizer, len(order.prompt)))
        call.on_gone = running.abort
        routed = generate_pb2.Routed(
            request_id=order.request_id, worker_id=record.worker_id, dp_rank=order.dp_rank, prompt_tokens=len(order.prompt)
        )
        call.send_message(generate_pb2.GenerateResponse(routed=routed))


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """What indexers and operators call, on grpcio's server."""

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
