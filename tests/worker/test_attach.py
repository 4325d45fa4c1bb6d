"""`Worker.Attach` over real gRPC."""

from __future__ import annotations

import struct
from typing import Any

import grpc.aio
import pytest
from rankway.v1 import types_pb2, worker_pb2


def start(stream: int, **fields: Any) -> worker_pb2.AttachRequest:
    sampling = types_pb2.SamplingParams(**({"max_tokens": 20} | fields.pop("sampling", {})))
    fields.setdefault("prompt", struct.pack("<49I", *range(1, 50)))
    return worker_pb2.AttachRequest(start=worker_pb2.Start(stream=stream, request_id=f"r{stream}", sampling=sampling, **fields))


class Router:
    """The router's side of an Attach."""

    def __init__(self, worker: Any) -> None:
        self.call = worker.worker.Attach()

    async def hello(self, epoch: int) -> worker_pb2.Welcome:
        await self.call.write(worker_pb2.AttachRequest(hello=worker_pb2.Hello(router_id="router-1", epoch=epoch)))
        return (await self.call.read()).welcome

    async def until_finished(self, *streams: int) -> dict[int, list[worker_pb2.StepDelta]]:
        """The deltas of these streams up to their last."""
        deltas: dict[int, list[worker_pb2.StepDelta]] = {stream: [] for stream in streams}
        left = set(streams)
        while left:
            for delta in (await self.call.read()).step.deltas:
                deltas[delta.stream].append(delta)
                if delta.finish_reason or delta.HasField("error"):
                    left.discard(delta.stream)
        return deltas


@pytest.fixture
async def router(worker: Any) -> Router:
    router = Router(worker)
    await router.hello(worker.record.epoch)
    return router


def text(deltas: list[worker_pb2.StepDelta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_welcome_carries_the_record(worker: Any) -> None:
    """The router learns the worker's record from the Attach itself."""
    welcome = await Router(worker).hello(worker.record.epoch)
    assert welcome.record == worker.record
    assert welcome.record.dp_range == types_pb2.DpRange(start_rank=4, size=4)


async def test_another_epoch_is_refused(worker: Any) -> None:
    """A router that means another life of the worker gets FAILED_PRECONDITION, not this one's service."""
    router = Router(worker)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await router.hello(1)
        await router.call.read()
        raise await router.call.code()
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_requests_of_one_router_share_steps(worker: Any, router: Router) -> None:
    """Several requests stream over one Attach, each complete and in order."""
    for stream in range(8):
        await router.call.write(start(stream, dp_rank=4 + stream % 4))
    deltas = await router.until_finished(*range(8))
    assert len({text(parts) for parts in deltas.values()}) == 1
    for parts in deltas.values():
        assert sum(len(part.tokens) for part in parts) == 4 * 20
        assert [part.finish_reason for part in parts][-1] == types_pb2.FINISH_REASON_LENGTH


async def test_a_resumed_request_goes_on_exactly(worker: Any, router: Router) -> None:
    """Prompt and tokens so far at another rank give the rest of the same text."""
    await router.call.write(start(1, dp_rank=4))
    whole = (await router.until_finished(1))[1]
    tokens = b"".join(part.tokens for part in whole)
    for cut in (1, 7, 19):
        await router.call.write(start(2, dp_rank=5, resume=tokens[: 4 * cut], resume_chars=cut - 1))
        rest = (await router.until_finished(2))[2]
        assert text(rest) == text(whole)[cut - 1 :]
        assert b"".join(part.tokens for part in rest) == tokens[4 * cut :]
