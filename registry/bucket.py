"""The registry's bucket in JetStream: what its keys mean, compare-and-set, and leases as per-message TTLs.

    worker.<worker_id>   the record (WorkerRecord); its TTL is the lease. Header Rankway-Pending: asks for admission.
    group.<dp_group>     the DP group's window map (JSON), without a TTL.

Every write names the revision that it replaces, so a write that was delayed (by a reconnect, say) can't undo a later one.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import nats.errors
import nats.js.errors
from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api

from rankway import logs
from rankway.errors import InvalidField, Unavailable
from rankway.registry import membership, records
from rankway.registry.membership import Group
from rankway.registry.records import Record
from rankway.registry.view import Entry
from rankway.v1 import registry_pb2

log = logs.get("registry.bucket")

CALL_TIMEOUT_S = 2.0
"""For one request to JetStream."""

MARKER_TTL_S = 60
"""How long the mark that a key has ended stays."""

_PENDING = "Rankway-Pending"
_OPERATION = "KV-Operation"
_MARKER_REASON = "Nats-Marker-Reason"
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_STREAM_NOT_FOUND = 10059
_WRONG_LAST_SEQUENCE = (10071, 10164)

T = TypeVar("T")


class Stale(Exception):
    """Somebody else wrote the key first: read it again."""


@dataclass(frozen=True, slots=True)
class Held:
    """A worker's key: `record` is None if nobody holds a lease; `sequence` is what the next write replaces."""

    record: Record | None
    pending: bool
    sequence: int


class Bucket:
    """One JetStream KV bucket. Constructing it does no I/O.

    Every method raises `Unavailable` when JetStream doesn't answer; writes raise `Stale`.
    """

    def __init__(self, client: Client, name: str, *, replicas: int, lease_s: int) -> None:
        self.stream = f"KV_{name}"
        self.name = name
        self._client = client
        self._js = client.jetstream(timeout=CALL_TIMEOUT_S)
        self._prefix = f"$KV.{name}."
        self._replicas = replicas
        self._lease_s = lease_s

    @property
    def worker_subjects(self) -> str:
        return f"{self._prefix}worker.*"

    async def open(self) -> api.StreamInfo:
        """The bucket's stream, created if it isn't there.

        Raises:
            OSError: there is a stream of that name without per-message TTLs.
        """
        try:
            info = await self._call(self._js.stream_info(self.stream))
        except nats.js.errors.NotFoundError:
            await self._call(
                self._js.create_key_value(
                    bucket=self.name,
                    description="Rankway registry: worker records and window maps",
                    history=1,
                    storage=api.StorageType.FILE,
                    replicas=self._replicas,
                    limit_marker_ttl=MARKER_TTL_S,
                )
            )
            info = await self._call(self._js.stream_info(self.stream))
            log.info("bucket created", bucket=self.name, replicas=self._replicas)
        if not info.config.allow_msg_ttl or not info.config.subject_delete_marker_ttl:
            raise OSError(f"JetStream bucket {self.name} lacks per-message TTLs or markers: delete it or choose another --bucket")
        return info

    async def worker(self, worker_id: str) -> Held:
        message = await self._last(f"worker.{worker_id}")
        if message is None:
            return Held(None, False, 0)
        headers = message.headers or {}
        record = None if _ended(headers) else _decode_record(message.data or b"")
        return Held(record, _PENDING in headers, _sequence(message))

    async def put_worker(self, record: Record, *, replaces: int, pending: bool = False) -> int:
        """Write the record with a full lease; returns its sequence."""
        headers = {"Nats-TTL": f"{self._lease_s}s"}
        if pending:
            headers[_PENDING] = "1"
        data = records.to_proto(record).SerializeToString()
        return await self._publish(f"worker.{record.worker_id}", data, replaces, headers)

    async def end_worker(self, worker_id: str, *, replaces: int) -> int:
        """End a lease now; returns the sequence of its end."""
        headers = {_OPERATION: "DEL", "Nats-TTL": f"{MARKER_TTL_S}s"}
        return await self._publish(f"worker.{worker_id}", b"", replaces, headers)

    async def group(self, dp_group: str) -> tuple[Group | None, int]:
        """The group's map, None if there is none, and the sequence that the next write replaces."""
        message = await self._last(f"group.{dp_group}")
        if message is None:
            return None, 0
        try:
            return membership.decode(message.data or b""), _sequence(message)
        except msgspec.DecodeError as error:
            log.error("the group's window map can't be read; starting it anew", dp_group=dp_group, error=str(error))
            return None, _sequence(message)

    async def put_group(self, group: Group, *, replaces: int) -> int:
        return await self._publish(f"group.{group.dp_group}", membership.encode(group), replaces, {})

    async def follow(self, deliver_subject: str) -> api.ConsumerInfo:
        """Have the last state of every worker key, then every change, delivered with heartbeats each second."""
        return await self._call(
            self._js.add_consumer(
                self.stream,
                api.ConsumerConfig(
                    deliver_subject=deliver_subject,
                    deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT,
                    ack_policy=api.AckPolicy.NONE,
                    filter_subject=self.worker_subjects,
                    idle_heartbeat=1.0,
                    inactive_threshold=30.0,
                    mem_storage=True,
                    num_replicas=1,
                ),
            )
        )

    def entry(self, message: Msg, base: int) -> Entry:
        """A delivered change of a worker key; revisions are `base` + stream sequence."""
        headers = message.headers or {}
        record = None if _ended(headers) else _decode_record(message.data)
        return Entry(
            worker_id=message.subject.rpartition(".")[2],
            revision=base + message.metadata.sequence.stream,
            record=record,
            pending=_PENDING in headers,
            deregistered=record is None and headers.get(_MARKER_REASON) != "MaxAge",
        )

    async def _last(self, key: str) -> api.RawStreamMsg | None:
        self._check_connected()
        try:
            # Not a direct read: those may be answered by a replica that lags behind.
            return await self._call(self._js.get_msg(self.stream, subject=self._prefix + key, direct=False))
        except nats.js.errors.NotFoundError as error:
            if error.err_code == _STREAM_NOT_FOUND:
                await self.open()
            return None

    async def _publish(self, key: str, data: bytes, replaces: int, headers: dict[str, str]) -> int:
        self._check_connected()
        headers = {**headers, _EXPECTED: str(replaces)}
        try:
            ack = await self._call(
                self._js.publish(self._prefix + key, data, timeout=CALL_TIMEOUT_S, stream=self.stream, headers=headers)
            )
        except nats.js.errors.NoStreamResponseError:
            await self.open()
            raise Stale from None
        except nats.js.errors.APIError as error:
            if error.err_code in _WRONG_LAST_SEQUENCE:
                raise Stale from None
            raise Unavailable(f"JetStream refused to write {key}: {error}") from error
        return int(ack.seq)

    def _check_connected(self) -> None:
        """Fail at once instead of waiting for what the client would buffer."""
        if not self._client.is_connected:
            raise Unavailable("NATS can't be reached")

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except (nats.js.errors.ServiceUnavailableError, nats.js.errors.ServerError) as error:
            raise Unavailable(f"JetStream: {error}") from error
        except (nats.js.errors.APIError, nats.js.errors.NoStreamResponseError):
            raise
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise Unavailable(f"NATS can't be reached: {type(error).__name__} {error}".rstrip()) from error


def _sequence(message: api.RawStreamMsg) -> int:
    return int(message.seq or 0)


def _ended(headers: dict[str, Any]) -> bool:
    return _OPERATION in headers or _MARKER_REASON in headers


def _decode_record(data: bytes) -> Record | None:
    try:
        return records.from_proto(registry_pb2.WorkerRecord.FromString(data))
    except (DecodeError, InvalidField) as error:
        log.error("a record in the bucket can't be read; taken as ended", error=str(error))
        return None
