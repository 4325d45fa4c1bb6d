"""The worker's life: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from rankway import logs, rpc, service
from rankway.errors import EngineFailed
from rankway.h2.connection import Http2Limits
from rankway.h2.endpoint import Endpoint
from rankway.ranks import Instance
from rankway.registry.client import LeaseKeeper, RegistryClient
from rankway.registry.records import Record, State
from rankway.tokenizer import Tokenizer
from rankway.v1 import worker_pb2_grpc
from rankway.worker.engine import Engine, EngineInfo
from rankway.worker.engines import build_engine, load_tokenizer
from rankway.worker.intake import Limits
from rankway.worker.metrics import WorkerCollector
from rankway.worker.publisher import Publisher
from rankway.worker.requests import Requests
from rankway.worker.servicer import SERVICE_NAMES, DirectMethods, WorkerServicer
from rankway.worker.settings import WorkerSettings

log = logs.get("worker")

CLOSE_GRACE_S = 0.5
"""For the last messages of streams once nothing runs any more."""

FLUSH_TIMEOUT_S = 1.0

T = TypeVar("T")


async def run(settings: WorkerSettings, *, ready: service.Ready, stop: asyncio.Event, engine_argv: Sequence[str] = ()) -> None:
    """Serve until `stop` is set or Drain was called.

    Start: engine and the event streams of its ranks -> gRPC server -> registered as READY -> `ready`. NATS is connected
    beside all that: what can't be sent while it is away is repaired later.

    Stop: DRAINING in the registry and nothing new accepted -> running requests finish, `drain_timeout_s` at most -> the rest
    ends with UNAVAILABLE -> deregistered -> KV events flushed -> gRPC server, engine and connections closed.

    Args:
        engine_argv: the engine's own flags.

    Raises:
        EngineFailed: the engine died; its requests have ended with UNAVAILABLE and the worker is deregistered.
        Outdated: a newer instance of this worker_id has taken over.
        RankwayError: the engine can't start or the registry refuses the worker.
    """
    instance = Instance(settings.name(settings.window), time.time_ns() // 1_000_000)
    publisher = Publisher(instance, settings.dp_group)
    engine = await asyncio.to_thread(build_engine, settings, engine_argv)
    try:
        info = await _unless(stop, engine.start(publisher))
        if info is None:
            return
        tokenizer = await asyncio.to_thread(load_tokenizer, info.tokenizer_directory or settings.model)
        publisher.open(info, engine.loads)
        # The port is part of the record that the services hand out, so it is bound before they exist.
        server = Endpoint(rpc.Server(SERVICE_NAMES), Http2Limits())
        host, _, _ = settings.grpc_listen.rpartition(":")
        port = await server.bind(settings.grpc_listen)
        endpoint = settings.advertise_endpoint or _reachable(host, port)
        worker = _Worker(settings, instance, engine, info, tokenizer, publisher, server, endpoint)
        try:
            metrics = await worker.listen()
            worker.start_roles()
            if await _unless(stop, worker.register()) is not None:
                ready({"grpc": f"{host}:{port}", "metrics": metrics})
                await worker.serve(stop)
        finally:
            await worker.close()
    finally:
        await engine.stop()


class _Worker:
    """The parts of a worker whose engine has started. `close` undoes `listen` and `start_roles`."""

    def __init__(
        self,
        settings: WorkerSettings,
        instance: Instance,
        engine: Engine,
        info: EngineInfo,
        tokenizer: Tokenizer,
        publisher: Publisher,
        server: Endpoint,
        endpoint: str,
    ) -> None:
        self._settings = settings
        self._instance = instance
        self._engine = engine
        self._info = info
        self._publisher = publisher
        self._aliases = tuple(name for name in settings.served_model_name if name != info.model)
        limits = Limits(instance.worker_id, info, (info.model, *self._aliases))
        self._requests = Requests(engine, limits, tokenizer, settings.max_requests)
        self._server = server
        self._client = RegistryClient(settings.registry_endpoints)
        self._keeper = LeaseKeeper(self._client, self._record(endpoint))
        self._leave = asyncio.Event()
        """Set by Drain."""
        self._roles: list[asyncio.Task[None]] = []
        self._close_metrics: Callable[[], None] | None = None

    async def listen(self) -> str:
        """Serve gRPC and metrics; returns the address of the metrics.

        Raises:
            OSError: that address can't be had.
        """
        # Its Attach is never called: that is answered in front of it.
        servicer = WorkerServicer(self._engine, self._requests, self._publisher, self._keeper, self._leave)  # type: ignore[abstract]
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, self._server.inner.grpc)
        direct = DirectMethods(self._requests, lambda: self._keeper.record)
        await self._server.start(direct.methods, direct.streamed)
        registry = CollectorRegistry()
        registry.register(WorkerCollector(self._instance.worker_id, self._publisher, self._requests))
        metrics_host, _, metrics_port = self._settings.metrics_listen.rpartition(":")
        metrics, self._close_metrics = service.serve_metrics(registry, metrics_host, int(metrics_port))
        return metrics

    def start_roles(self) -> None:
        """Start what runs beside the calls: the engine and the publisher."""
        self._roles = [
            asyncio.create_task(self._engine.run(), name="engine"),
            asyncio.create_task(self._publisher.run(self._settings.nats_url), name="publisher"),
        ]

    async def register(self) -> bool:
        """Join the registry, for as long as that takes; True.

        Raises:
            RankwayError: refused, or what a role ended with meanwhile.
        """
        joining = asyncio.create_task(self._keeper.register())
        try:
            await asyncio.wait((joining, *self._roles), return_when=asyncio.FIRST_COMPLETED)
            if (failure := self._failure()) is not None:
                raise failure
            joining.result()
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
        self._roles.append(asyncio.create_task(self._keeper.run(), name="lease"))
        await self._server.set_ready(True)
        return True

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, a Drain, or the end of a role; then drain.

        Raises:
            EngineFailed, Outdated, RankwayError: what a role ended with.
        """
        waiters = [asyncio.create_task(event.wait()) for event in (stop, self._leave)]
        try:
            await asyncio.wait((*self._roles, *waiters), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
        await self._server.set_ready(False)
        failure = self._failure()
        if failure is None:
            await self._drain()
            return
        self._requests.close(f"worker {self._instance.worker_id} is gone: {failure}")
        raise failure

    async def close(self) -> None:
        """Deregister, flush events, close server and clients. What still runs ends with UNAVAILABLE."""
        self._requests.close(f"worker {self._instance.worker_id} has shut down")
        if self._keeper.lease is not None:
            await self._keeper.deregister()
        await self._publisher.flush(FLUSH_TIMEOUT_S)
        await self._server.stop(CLOSE_GRACE_S)
        for role in self._roles:
            role.cancel()
        await asyncio.gather(*self._roles, return_exceptions=True)
        await self._client.close()
        if self._close_metrics is not None:
            await asyncio.to_thread(self._close_metrics)

    async def _drain(self) -> None:
        """Take nothing new, tell the registry, let running requests finish."""
        self._requests.draining = True
        await self._keeper.set_state(State.DRAINING)
        log.info("draining", running=self._requests.count(), timeout_s=self._settings.drain_timeout_s)
        idle = asyncio.create_task(self._requests.idle())
        # A role that fails while we drain ends the wait too.
        await asyncio.wait((idle, *self._roles), timeout=self._settings.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if self._requests.count():
            log.warning("drain timeout: ending what still runs", running=self._requests.count())

    def _failure(self) -> BaseException | None:
        """Why a role ended, if one did."""
        for role in self._roles:
            if role.done():
                return role.exception() or EngineFailed(f"the {role.get_name()} stopped")
        return None

    def _record(self, endpoint: str) -> Record:
        info = self._info
        return Record(
            worker_id=self._instance.worker_id,
            epoch=self._instance.epoch,
            endpoint=endpoint,
            model=info.model,
            model_aliases=self._aliases,
            dp_group=self._settings.dp_group,
            data_parallel_size=info.data_parallel_size,
            window=info.window,
            block_size=info.block_size,
            total_kv_blocks=info.total_kv_blocks,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            engine=info.name,
            engine_version=info.version,
            lora_adapters=info.lora_adapters,
            tokenizer=self._requests.tokenizer.fingerprint,
            state=State.READY,
        )


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None (and `work` cancelled) if `stop` is set first."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for waited in (task, stopped):
            waited.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def _reachable(host: str, port: int) -> str:
    """Where others reach a server that listens on host:port."""
    everywhere = host in ("0.0.0.0", "[::]", "")  # compared with, not listened on
    return f"{socket.gethostname() if everywhere else host}:{port}"
