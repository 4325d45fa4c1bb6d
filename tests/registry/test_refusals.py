"""Every refusal through real gRPC: the status code, and a message that names both sides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from harness.registry import Replica, record
from harness.waiting import eventually

from rankway import rpc
from rankway.ranks import DpRange
from rankway.registry import records
from rankway.registry.client import RegistryClient
from rankway.registry.records import Record
from rankway.v1 import registry_pb2, registry_pb2_grpc

Change = Callable[[registry_pb2.WorkerRecord], object]


@pytest.fixture
async def stub(replica: Replica) -> AsyncIterator[Any]:
    channel = rpc.open_channel(replica.endpoint)
    yield registry_pb2_grpc.RegistryStub(channel)
    await channel.close()


def message(change: Change | None = None, **fields: Any) -> registry_pb2.WorkerRecord:
    made = records.to_proto(record(**fields))
    if change is not None:
        change(made)
    return made


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


INVALID: list[tuple[Change, str]] = [
    (lambda m: setattr(m.dp_range, "size", 0), "size=0: a window has at least one rank"),
    (lambda m: setattr(m.dp_range, "start_rank", 2**32 - 1), "size=4: start_rank + size = 4294967299 overflows uint32"),
    (lambda m: setattr(m.dp_range, "start_rank", 6), "dp_range='[6, 10)': passes data_parallel_size=8"),
    (lambda m: m.ClearField("dp_range"), "dp_range=None: must be given"),
    (lambda m: setattr(m, "worker_id", "w.1"), "worker_id='w.1': must be 1 to 64 characters of A-Z, a-z, 0-9, _ or -"),
    (lambda m: setattr(m, "worker_id", ""), "worker_id='': must be 1 to 64 characters"),
    (lambda m: setattr(m, "dp_group", "g g"), "dp_group='g g': must be 1 to 64 characters"),
    (lambda m: setattr(m, "epoch", 0), "epoch=0: must be given"),
    (lambda m: setattr(m, "endpoint", "nowhere"), "endpoint='nowhere': must be host:port"),
    (lambda m: setattr(m, "model", ""), "model='': must not be empty"),
    (lambda m: setattr(m, "block_size", 0), "block_size=0: must be given"),
    (lambda m: setattr(m, "state", 0), "state=0: must be one of STARTING, READY, DRAINING"),
    (lambda m: setattr(m, "state", 7), "state=7: must be one of STARTING, READY, DRAINING"),
    (lambda m: m.draining_ranks.append(4), "draining_ranks=4: worker w1 owns [0, 4)"),
]


@pytest.mark.parametrize(("change", "expected"), INVALID, ids=[expected.partition(":")[0] for _, expected in INVALID])
async def test_invalid_argument(stub: Any, change: Change, expected: str) -> None:
    """A record with a bad field is INVALID_ARGUMENT in Register and KeepAlive alike, and nothing is admitted."""
    for call in (
        stub.Register(registry_pb2.RegisterRequest(record=message(change))),
        stub.KeepAlive(registry_pb2.KeepAliveRequest(record=message(change))),
    ):
        code, details = await refusal(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert expected in details
    assert not (await stub.List(registry_pb2.ListRequest())).records


LIVE = {"worker_id": "w1", "start_rank": 0, "size": 4, "epoch": 1000}
REFUSED: list[tuple[dict[str, Any], grpc.StatusCode, list[str]]] = [
    ({"worker_id": "w2", "start_rank": 3}, grpc.StatusCode.ALREADY_EXISTS, ["[3, 7)", "w2", "[0, 4)", "w1", "group g"]),
    ({"worker_id": "w2", "start_rank": 0, "size": 8}, grpc.StatusCode.ALREADY_EXISTS, ["[0, 8)", "w2", "[0, 4)", "w1"]),
    ({"worker_id": "w2", "start_rank": 1, "size": 1}, grpc.StatusCode.ALREADY_EXISTS, ["[1, 2)", "w2", "[0, 4)", "w1"]),
    ({"dp_group": "h"}, grpc.StatusCode.ALREADY_EXISTS, ["w1", "group h", "group g"]),
    ({"dp_group": "h", "epoch": 2000}, grpc.StatusCode.ALREADY_EXISTS, ["w1", "epoch 2000", "group h", "group g", "epoch 1000"]),
    ({"endpoint": "127.0.0.1:9"}, grpc.StatusCode.ALREADY_EXISTS, ["w1", "127.0.0.1:9", "127.0.0.1:7001"]),
    (
        {"worker_id": "w2", "start_rank": 4, "block_size": 32},
        grpc.StatusCode.FAILED_PRECONDITION,
        ["block_size=32", "w2", "block_size=16", "w1"],
    ),
    (
        {"worker_id": "w2", "start_rank": 4, "data_parallel_size": 16},
        grpc.StatusCode.FAILED_PRECONDITION,
        ["data_parallel_size=16", "w2", "data_parallel_size=8", "w1"],
    ),
    (
        {"worker_id": "w2", "start_rank": 4, "model": "b"},
        grpc.StatusCode.FAILED_PRECONDITION,
        ["model='b'", "w2", "model='model-a'", "w1"],
    ),
    ({"epoch": 999}, grpc.StatusCode.ABORTED, ["999", "w1", "1000"]),
]


@pytest.mark.parametrize(("fields", "code", "both_sides"), REFUSED)
async def test_refused_by_the_state(stub: Any, fields: dict[str, Any], code: grpc.StatusCode, both_sides: list[str]) -> None:
    """A worker that doesn't fit the live ones is refused with its code and both sides named, and they stay as they are."""
    await stub.Register(registry_pb2.RegisterRequest(record=message(**LIVE)))
    answered, details = await refusal(stub.Register(registry_pb2.RegisterRequest(record=message(**{**LIVE, **fields}))))
    assert answered is code
    for part in both_sides:
        assert part in details
    listed = await stub.List(registry_pb2.ListRequest())
    assert [records.from_proto(m) for m in listed.records] == [record(**LIVE)]


async def test_keep_alive_and_deregister(stub: Any) -> None:
    """No lease is NOT_FOUND, an older life ABORTED, a changed window FAILED_PRECONDITION, a bad field INVALID_ARGUMENT."""
    keep_alive = registry_pb2.KeepAliveRequest
    code, details = await refusal(stub.KeepAlive(keep_alive(record=message())))
    assert (code, "w1 epoch 1000 holds no lease" in details) == (grpc.StatusCode.NOT_FOUND, True)
    await stub.Register(registry_pb2.RegisterRequest(record=message()))
    code, details = await refusal(stub.KeepAlive(keep_alive(record=message(epoch=999))))
    assert (code, "epoch 999 of worker w1 is older than epoch 1000" in details) == (grpc.StatusCode.ABORTED, True)
    code, details = await refusal(stub.KeepAlive(keep_alive(record=message(start_rank=4))))
    assert (code, "window=[4, 8)" in details, "window=[0, 4)" in details) == (grpc.StatusCode.FAILED_PRECONDITION, True, True)
    code, details = await refusal(stub.Deregister(registry_pb2.DeregisterRequest(worker_id="w1", epoch=999)))
    assert (code, "older than epoch 1000" in details) == (grpc.StatusCode.ABORTED, True)
    code, details = await refusal(stub.Deregister(registry_pb2.DeregisterRequest(worker_id="w1")))
    assert (code, "epoch=0" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, details = await refusal(stub.List(registry_pb2.ListRequest(dp_group="a.b")))
    assert (code, "dp_group='a.b'" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_registering_again_is_idempotent(client: RegistryClient) -> None:
    """The same registration any number of times leaves one record and a lease each time; so does a Deregister."""
    leases = [await client.register(record()) for _ in range(3)]
    assert [lease.instance for lease in leases] == [record().instance] * 3
    assert leases[0].revision < leases[1].revision < leases[2].revision
    assert await client.list() == [record()]
    await client.deregister(record().instance)
    await client.deregister(record().instance)
    assert await client.list() == []


async def test_a_newer_epoch_replaces(client: RegistryClient) -> None:
    """The next life of a worker takes its place at once, with another window if it likes, while the old lease still lives."""
    await client.register(record(size=4))
    newer = record(epoch=2000, size=8, endpoint="127.0.0.1:7009")
    await client.register(newer)
    assert await client.list() == [newer]
    await client.deregister(newer.instance)
    await client.register(record("w2", 0, 8))
    assert [r.worker_id for r in await client.list()] == ["w2"]


async def test_a_group_per_name(client: RegistryClient) -> None:
    """Groups don't meet: the same window in two groups is two workers, and List filters by group."""
    first, second = record("w1"), record("w2", dp_group="h", model="model-b", block_size=32)
    await client.register(first)
    await client.register(second)
    assert await client.list() == [first, second]
    assert await client.list("h") == [second]


async def test_keep_alive_changes_what_may_change(client: RegistryClient) -> None:
    """KeepAlive takes over state, draining ranks, adapters and labels."""
    await client.register(record())
    changed: Record = record(
        state=records.State.DRAINING, draining_ranks=(1,), lora_adapters=("ad",), labels={"zone": "a"}, window=DpRange(0, 4)
    )
    await client.keep_alive(changed)

    async def shown() -> bool:
        return await client.list() == [changed]

    await eventually(shown)
