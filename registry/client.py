"""The registry as its callers see it: calls that fail over between replicas, a watch that never ends, a lease's keeper."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
import grpc.aio

from rankway import logs, rpc
from rankway.errors import NotFound, Outdated, RankwayError, Unavailable, from_status
from rankway.ranks import Instance
from rankway.registry import records
from rankway.registry.records import Gone, Put, Record, Snapshot, WatchEvent
from rankway.v1 import registry_pb2, registry_pb2_grpc

__all__ = ["Gone", "Lease", "LeaseKeeper", "Put", "Record", "RegistryClient", "Snapshot", "WatchEvent"]

log = logs.get("registry.client")

CALL_TIMEOUT_S = 3.0
"""For one unary call at one replica."""

RETRY_MIN_S, RETRY_MAX_S = 0.1, 1.0
"""Pause before all replicas are tried again: doubles, with jitter."""

_NOT_SERVED = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,  # by a replica that stops: our own cancellation raises CancelledError
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
"""Codes that say nothing about the record: another replica, or the same one later, may serve the call."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker's place in the registry: ends `ttl_s` after its last renewal."""

    instance: Instance
    ttl_s: float
    revision: int


class RegistryClient:
    """Calls to one of several registry replicas: the one that answered last, the next one when it can't be reached.

    Error handling: a call raises the `RankwayError` that the registry's status stands for; `Unavailable` when no replica
    could serve it. Close it when done.
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        if not endpoints:
            raise ValueError("registry_endpoints is empty")
        self.endpoints = tuple(endpoints)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._current = 0

    async def register(self, record: Record) -> Lease:
        """Join, or renew with the same record. Refusals: see Registry.Register in registry.proto."""
        request = registry_pb2.RegisterRequest(record=records.to_proto(record))
        answer: registry_pb2.RegisterResponse = await self._call("Register", request)
        return _lease(answer.lease)

    async def keep_alive(self, record: Record) -> Lease:
        """Renew the lease of record.instance. NotFound: it has ended. Outdated: a newer epoch took over."""
        request = registry_pb2.KeepAliveRequest(record=records.to_proto(record))
        answer: registry_pb2.KeepAliveResponse = await self._call("KeepAlive", request)
        return _lease(answer.lease)

    async def deregister(self, instance: Instance) -> None:
        """End the lease. Idempotent. Outdated: a newer epoch holds the worker_id."""
        request = registry_pb2.DeregisterRequest(worker_id=instance.worker_id, epoch=instance.epoch)
        await self._call("Deregister", request)

    async def list(self, dp_group: str = "") -> list[Record]:
        """All live records of a DP group, or of all groups."""
        answer: registry_pb2.ListResponse = await self._call("List", registry_pb2.ListRequest(dp_group=dp_group))
        return [records.from_proto(message) for message in answer.records]

    async def watch(self, dp_group: str = "") -> AsyncIterator[WatchEvent]:
        """A Snapshot, then Put and Gone as they happen; after a reconnect a fresh Snapshot, or the events that were missed.

        Never ends by itself and raises nothing but what cancels it: while no registry can be reached nothing is yielded, and
        what the watcher knows stays true.
        """
        revision = 0
        pause_s = RETRY_MIN_S
        while True:
            request = registry_pb2.WatchRequest(dp_group=dp_group, after_revision=revision)
            call = self._stub().Watch(request)
            try:
                async for message in call:
                    pause_s = RETRY_MIN_S
                    yield _event(message)
                    revision = message.revision
                reason = "the registry ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            finally:
                call.cancel()
            log.info("watching again", endpoint=self.endpoints[self._current], reason=reason)
            self._fail_over()
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def _call(self, method: str, request: Any) -> Any:
        """One unary call, tried at every replica in turn while they can't be reached."""
        unreachable: RankwayError = Unavailable("no registry")
        for _ in self.endpoints:
            try:
                # A replica that restarts is given the moment that its channel needs to connect again.
                return await getattr(self._stub(), method)(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _NOT_SERVED:
                    raise from_status(error.code(), error.details() or "") from None
                unreachable = Unavailable(f"registry {self.endpoints[self._current]}: {error.details()}")
                self._fail_over()
        raise unreachable

    def _fail_over(self) -> None:
        self._current = (self._current + 1) % len(self.endpoints)

    def _stub(self) -> registry_pb2_grpc.RegistryAsyncStub:
        endpoint = self.endpoints[self._current]
        if endpoint not in self._channels:
            self._channels[endpoint] = rpc.open_channel(endpoint)
        return registry_pb2_grpc.RegistryStub(self._channels[endpoint])


class LeaseKeeper:
    """Keeps one worker registered: renews at a third of the lease, and registers again when the lease was lost.

    `register` first, then `run` in a task of its own; `deregister` when the worker leaves.
    """

    def __init__(self, client: RegistryClient, record: Record) -> None:
        self._client = client
        self._record = record
        self._lease: Lease | None = None
        self._changed = asyncio.Event()
        self._left = False
        self.renewals = 0
        self.lost_leases = 0
        """How often the lease had ended and the worker registered again."""

    @property
    def record(self) -> Record:
        return self._record

    @property
    def lease(self) -> Lease | None:
        """None before the first registration and after `deregister`."""
        return self._lease

    async def register(self) -> Lease:
        """Join. Waits for as long as no registry can be reached.

        Raises:
            RankwayError: the registry refuses the record; its message names both sides.
        """
        self._lease = await self._until_reached(lambda: self._client.register(self._record))
        log.info("registered", **_who(self._record), window=str(self._record.window), ttl_s=self._lease.ttl_s)
        return self._lease

    async def run(self) -> None:
        """Renew until `deregister`.

        Raises:
            Outdated: a newer epoch of this worker has taken over; this one must stop.
            RankwayError: the lease had ended and the registry refuses to take the worker back (its window is taken).
        """
        if self._lease is None and not self._left:
            raise RuntimeError("register first")
        while not self._left and self._lease is not None:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: on Python 3.11 it loses a cancellation that comes together with the event.
                async with asyncio.timeout(self._lease.ttl_s / 3):
                    await self._changed.wait()
            self._changed.clear()
            if not self._left:
                await self._renew()

    async def update(self, record: Record) -> None:
        """Announce a changed record (state, draining ranks, adapters, labels) of the same instance, at once if `run` runs."""
        if record.instance != self._record.instance:
            raise ValueError(f"{record.instance} is not {self._record.instance}")
        self._record = record
        self._changed.set()

    async def set_state(self, state: records.State) -> None:
        await self.update(replace(self._record, state=state))

    async def deregister(self) -> None:
        """Leave and end `run`. Best effort: a lease that can't be ended now ends by itself."""
        self._left = True
        self._lease = None
        self._changed.set()
        try:
            await self._client.deregister(self._record.instance)
        except (Unavailable, Outdated) as error:
            log.warning("not deregistered; the lease ends by itself", **_who(self._record), reason=error.message)

    async def _renew(self) -> None:
        try:
            lease = await self._until_reached(lambda: self._client.keep_alive(self._record))
            if not self._left:  # an answer to a renewal that `deregister` overtook brings nothing back
                self._lease = lease
                self.renewals += 1
        except Unavailable:
            return
        except NotFound:
            if self._left:
                return
            self.lost_leases += 1
            log.warning("the lease had ended; registering again", **_who(self._record))
            await self.register()
            if self._left:  # `deregister` came while the registration was under way
                await self.deregister()

    async def _until_reached(self, call: Callable[[], Awaitable[T]]) -> T:
        pause_s = RETRY_MIN_S
        while True:
            try:
                return await call()
            except Unavailable as error:
                if self._left:  # nobody waits for the answer any more
                    raise
                log.warning("no registry can be reached", **_who(self._record), reason=error.message)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, RETRY_MAX_S)


def _who(record: Record) -> dict[str, Any]:
    return {"worker_id": record.worker_id, "epoch": record.epoch, "dp_group": record.dp_group}


def _lease(message: registry_pb2.Lease) -> Lease:
    return Lease(Instance(message.worker_id, message.epoch), message.ttl_ms / 1000, message.revision)


def _event(message: registry_pb2.WatchResponse) -> WatchEvent:
    match message.WhichOneof("event"):
        case "snapshot":
            return Snapshot(tuple(records.from_proto(record) for record in message.snapshot.records))
        case "put":
            return Put(records.from_proto(message.put))
        case _:
            return Gone(Instance(message.gone.worker_id, message.gone.epoch))
