"""`rankway.v1.Registry` over gRPC: messages in, typed calls, messages out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio

from rankway import logs, rpc
from rankway.errors import InvalidField, RankwayError, Unavailable
from rankway.ranks import Instance, check_name
from rankway.registry import records
from rankway.registry.admission import Admission
from rankway.registry.metrics import Metrics
from rankway.registry.mirror import Mirror
from rankway.registry.records import Put
from rankway.registry.view import Delta
from rankway.v1 import registry_pb2, registry_pb2_grpc

log = logs.get("registry")

Context = grpc.aio.ServicerContext[Any, Any]


class RegistryServicer(registry_pb2_grpc.RegistryServicer):
    """Serves before NATS is reached: until `attach` every call that needs it answers UNAVAILABLE."""

    def __init__(self, metrics: Metrics, lease_s: int) -> None:
        self._metrics = metrics
        self._lease_s = lease_s
        self._admission: Admission | None = None
        self._mirror: Mirror | None = None
        self._stopping = False

    def attach(self, admission: Admission, mirror: Mirror) -> None:
        """Serve from these from now on."""
        self._admission = admission
        self._mirror = mirror

    def stop(self) -> None:
        """End the watch streams: watchers go to another replica at once."""
        self._stopping = True
        if self._mirror is not None:
            self._mirror.wake()

    @rpc.unary
    async def Register(self, request: registry_pb2.RegisterRequest, context: Context) -> registry_pb2.RegisterResponse:
        with self._counted("Register"):
            admission, mirror = self._parts()
            record = records.from_proto(request.record)
            revision = await mirror.applied(await admission.register(record))
            log.info("registered", **_who(record.instance), dp_group=record.dp_group, window=str(record.window))
            return registry_pb2.RegisterResponse(lease=self._lease(record.instance, revision))

    @rpc.unary
    async def KeepAlive(self, request: registry_pb2.KeepAliveRequest, context: Context) -> registry_pb2.KeepAliveResponse:
        with self._counted("KeepAlive"):
            admission, mirror = self._parts()
            record = records.from_proto(request.record)
            sequence = await admission.keep_alive(record)
            return registry_pb2.KeepAliveResponse(lease=self._lease(record.instance, mirror.revision_of(sequence)))

    @rpc.unary
    async def Deregister(self, request: registry_pb2.DeregisterRequest, context: Context) -> registry_pb2.DeregisterResponse:
        with self._counted("Deregister"):
            admission, mirror = self._parts()
            instance = Instance(check_name("worker_id", request.worker_id), request.epoch)
            if instance.epoch < 1:
                raise InvalidField("epoch", instance.epoch, "must be given, at least 1")
            sequence = await admission.deregister(instance)
            if sequence is not None:
                await mirror.applied(sequence)
                log.info("deregistered", **_who(instance))
            return registry_pb2.DeregisterResponse()

    @rpc.unary
    async def List(self, request: registry_pb2.ListRequest, context: Context) -> registry_pb2.ListResponse:
        """From the view: the last known one while NATS is away."""
        with self._counted("List"):
            _check_group(request.dp_group)
            _, mirror = self._parts()
            if not mirror.is_loaded:
                raise Unavailable("the bucket is not loaded yet")
            view = mirror.view
            return registry_pb2.ListResponse(
                records=[records.to_proto(record) for record in view.records(request.dp_group)], revision=view.announced
            )

    @rpc.stream
    async def Watch(self, request: registry_pb2.WatchRequest, context: Context) -> AsyncIterator[registry_pb2.WatchResponse]:
        _check_group(request.dp_group)
        with self._counted("Watch"):
            _, mirror = self._parts()
            await mirror.loaded()
        self._metrics.watchers += 1
        try:
            async for message in self._watch(mirror, request.dp_group, request.after_revision):
                yield message
        finally:
            self._metrics.watchers -= 1

    async def _watch(self, mirror: Mirror, dp_group: str, after: int) -> AsyncIterator[registry_pb2.WatchResponse]:
        """Reads the view's log from a position of its own: a watcher that the log has left behind gets a snapshot."""
        view = mirror.view
        position = view.resume(after) if after else None
        while after and position is None and (wait_s := view.lenient_until - time.monotonic()) > 0:
            # What this watcher knows is better than a view that workers are still coming back to.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await mirror.changed()
            position = view.resume(after)
        while not self._stopping:
            deltas = view.since(position) if position is not None else None
            if deltas is None:
                if position is not None:
                    self._metrics.watch_resyncs.inc()
                # Taken together, before anything is awaited.
                position, revision, known = view.position, view.announced, view.records(dp_group)
                snapshot = registry_pb2.WorkerSnapshot(records=[records.to_proto(record) for record in known])
                yield registry_pb2.WatchResponse(revision=revision, snapshot=snapshot)
                continue
            if not deltas:
                await mirror.changed()
                continue
            position = view.position
            for delta in deltas:
                if dp_group in ("", delta.dp_group):
                    yield _message(delta)
        raise Unavailable("the registry is stopping")

    def _parts(self) -> tuple[Admission, Mirror]:
        if self._admission is None or self._mirror is None:
            raise Unavailable("the registry has not reached NATS yet")
        return self._admission, self._mirror

    def _lease(self, instance: Instance, revision: int) -> registry_pb2.Lease:
        return registry_pb2.Lease(
            worker_id=instance.worker_id, epoch=instance.epoch, ttl_ms=self._lease_s * 1000, revision=revision
        )

    @contextlib.contextmanager
    def _counted(self, method: str) -> Iterator[None]:
        try:
            yield
        except RankwayError as error:
            self._metrics.calls.labels(method, error.code.name).inc()
            log.info("refused", method=method, code=error.code.name, reason=error.message)
            raise
        self._metrics.calls.labels(method, "OK").inc()


def _message(delta: Delta) -> registry_pb2.WatchResponse:
    if isinstance(delta.event, Put):
        return registry_pb2.WatchResponse(revision=delta.announced, put=records.to_proto(delta.event.record))
    instance = delta.event.instance
    gone = registry_pb2.WorkerGone(worker_id=instance.worker_id, epoch=instance.epoch)
    return registry_pb2.WatchResponse(revision=delta.announced, gone=gone)


def _check_group(dp_group: str) -> None:
    if dp_group:
        check_name("dp_group", dp_group)


def _who(instance: Instance) -> dict[str, Any]:
    return {"worker_id": instance.worker_id, "epoch": instance.epoch}
