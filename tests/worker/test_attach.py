"""`Worker.Attach` over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections import Counter
from typing import Any

import grpc.aio
import pytest
from harness.waiting import eventually
from harness.worker import FakeRegistry, LiveWorker, live_worker

from rankway.errors import InvalidField
from rankway.tokenizer import Tokenizer
from rankway.v1 import types_pb2, worker_pb2
from rankway.worker import attach
from rankway.worker.engine import Finish, Logprob


def start(stream: int, **fields: Any) -> worker_pb2.AttachRequest:
    sampling = types_pb2.SamplingParams(**({"max_tokens": 20} | fields.pop("sampling", {})))
    fields.setdefault("prompt", struct.pack("<49I", *range(1, 50)))
    return worker_pb2.AttachRequest(start=worker_pb2.Start(stream=stream, request_id=f"r{stream}", sampling=sampling, **fields))


class Router:
    """The router's side of an Attach."""

    def __init__(self, worker: LiveWorker) -> None:
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
async def router(worker: LiveWorker) -> Router:
    router = Router(worker)
    await router.hello(worker.record.epoch)
    return router


def text(deltas: list[worker_pb2.StepDelta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_welcome_carries_the_record(worker: LiveWorker) -> None:
    """The router learns the worker's record from the Attach itself."""
    welcome = await Router(worker).hello(worker.record.epoch)
    assert welcome.record == worker.record
    assert welcome.record.dp_range == types_pb2.DpRange(start_rank=4, size=4)


async def test_another_epoch_is_refused(worker: LiveWorker) -> None:
    """A router that means another life of the worker gets FAILED_PRECONDITION, not this one's service."""
    router = Router(worker)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await router.hello(1)
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_requests_of_one_router_share_steps(worker: LiveWorker, router: Router) -> None:
    """Several requests stream over one Attach, each complete and in order."""
    for stream in range(8):
        await router.call.write(start(stream, dp_rank=4 + stream % 4))
    deltas = await router.until_finished(*range(8))
    assert len({text(parts) for parts in deltas.values()}) == 1
    for parts in deltas.values():
        assert sum(len(part.tokens) for part in parts) == 4 * 20
        assert [part.finish_reason for part in parts][-1] == types_pb2.FINISH_REASON_LENGTH


async def test_a_resumed_request_goes_on_exactly(worker: LiveWorker, router: Router) -> None:
    """Prompt and tokens so far at another rank give the rest of the same text."""
    await router.call.write(start(1, dp_rank=4))
    whole = (await router.until_finished(1))[1]
    tokens = b"".join(part.tokens for part in whole)
    for cut in (1, 7, 19):
        await router.call.write(start(2, dp_rank=5, resume=tokens[: 4 * cut], resume_chars=cut - 1))
        rest = (await router.until_finished(2))[2]
        assert text(rest) == text(whole)[cut - 1 :]
        assert b"".join(part.tokens for part in rest) == tokens[4 * cut :]


async def test_choices_are_fanned_out_in_the_worker(worker: LiveWorker, router: Router) -> None:
    """n choices of one Start come with their index; choice i has seed + i."""
    await router.call.write(start(1, dp_rank=4, sampling={"n": 3, "seed": 5}))
    await router.call.write(start(2, dp_rank=4, sampling={"seed": 7}))
    texts: dict[tuple[int, int], str] = {}
    ended = 0
    while ended < 4:
        for delta in (await router.call.read()).step.deltas:
            texts[delta.stream, delta.index] = texts.get((delta.stream, delta.index), "") + delta.text
            ended += delta.finish_reason != 0
    assert {len(text) for text in texts.values()} == {20}
    assert texts[1, 2] == texts[2, 0]
    assert len({texts[1, index] for index in range(3)}) == 3


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"prompt": b""}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"prompt": b"abc"}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"prompt": struct.pack("<I", 512)}, grpc.StatusCode.INVALID_ARGUMENT, "prompt=512"),
        ({"prompt": bytes(4 * 2048)}, grpc.StatusCode.INVALID_ARGUMENT, "max_model_len=2048"),
        ({"sampling": {"max_tokens": 2000}}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens=2000"),
        ({"sampling": {"temperature": 3.0}}, grpc.StatusCode.INVALID_ARGUMENT, "temperature=3.0"),
        ({"sampling": {"stop_token_ids": [512]}}, grpc.StatusCode.INVALID_ARGUMENT, "stop_token_ids=512"),
        ({"sampling": {"guided_json": "{}"}}, grpc.StatusCode.UNIMPLEMENTED, "guided_json"),
        ({"dp_rank": 3}, grpc.StatusCode.OUT_OF_RANGE, "worker w1 owns the global ranks [4, 8)"),
        ({"dp_rank": 8}, grpc.StatusCode.OUT_OF_RANGE, "dp_rank=8"),
        ({"lora": "nope"}, grpc.StatusCode.NOT_FOUND, "nope"),
        ({"resume": struct.pack("<I", 512)}, grpc.StatusCode.INVALID_ARGUMENT, "resume=512"),
        ({"resume": bytes(4), "sampling": {"n": 2}}, grpc.StatusCode.INVALID_ARGUMENT, "n=2"),
        ({"resume_chars": 1}, grpc.StatusCode.INVALID_ARGUMENT, "resume_chars=1"),
    ],
)
async def test_a_bad_start_is_refused_by_name(
    worker: LiveWorker, router: Router, fields: dict[str, Any], code: grpc.StatusCode, message: str
) -> None:
    """A bad request ends its stream with a status that names field and value; the engine and other streams are untouched."""
    await router.call.write(start(1, **fields))
    error = (await router.until_finished(1))[1][0].error
    assert error.code == code.value[0]
    assert message in error.message
    assert worker.queued() == (0, 0)
    await router.call.write(start(2))
    assert len(text((await router.until_finished(2))[2])) == 20


async def test_a_stream_in_use_is_refused(slow_worker: LiveWorker) -> None:
    """Two requests can't share a stream: the answer would be a mixture."""
    router = Router(slow_worker)
    await router.hello(slow_worker.record.epoch)
    await router.call.write(start(1))
    await router.call.write(start(1))
    assert "stream=1" in (await router.until_finished(1))[1][0].error.message


async def test_a_finished_resume_ends_at_once(worker: LiveWorker, router: Router) -> None:
    """Tokens so far that already are the whole answer need no engine: the rest of the text comes, and the end."""
    await router.call.write(start(1, resume=struct.pack("<20I", *b"x" * 20), resume_chars=15))
    await router.call.write(start(2, resume=struct.pack("<3I", *b"abc"), sampling={"stop": ["bc"]}))
    deltas = await router.until_finished(1, 2)
    assert (text(deltas[1]), deltas[1][-1].finish_reason) == ("xxxxx", types_pb2.FINISH_REASON_LENGTH)
    assert (text(deltas[2]), deltas[2][-1].finish_reason) == ("a", types_pb2.FINISH_REASON_STOP)
    assert worker.queued() == (0, 0)


async def test_a_stop_string_ends_the_engines_request(worker: LiveWorker, router: Router) -> None:
    """The text ends before the stop string and the engine stops within a step."""
    await router.call.write(start(1, sampling={"max_tokens": 1500}))
    whole = text((await router.until_finished(1))[1])
    stop = whole[100:104]
    await router.call.write(start(2, sampling={"max_tokens": 1500, "stop": [stop, "never"]}))
    deltas = (await router.until_finished(2))[2]
    assert text(deltas) == whole[: whole.index(stop)]
    assert deltas[-1].finish_reason == types_pb2.FINISH_REASON_STOP
    await eventually(lambda: worker.queued() == (0, 0) and worker.used_blocks() == 0)


STAGES = {
    "queued": lambda worker: worker.queued() == (1, 2),
    "prefill": lambda worker: worker.queued()[1] == 1,
    "decoding": lambda worker: worker.queued()[1] == 1,
}


async def reach(router: Router, worker: LiveWorker, stage: str) -> None:
    """Bring requests to a stage: one waits behind two, one is being prefilled, or one is decoding."""
    for stream in range(3 if stage == "queued" else 1):
        await router.call.write(start(stream, prompt=struct.pack("<20I", *range(20)), sampling={"max_tokens": 500}))
    if stage == "decoding":
        assert (await router.call.read()).step.deltas
    await eventually(lambda: STAGES[stage](worker))


@pytest.mark.parametrize("stage", STAGES)
async def test_an_abort_frees_the_engine_at_every_stage(slow_worker: LiveWorker, stage: str) -> None:
    """Abort reaches a queued, a prefilling and a decoding request."""
    router = Router(slow_worker)
    await router.hello(slow_worker.record.epoch)
    await reach(router, slow_worker, stage)
    for stream in range(3):
        await router.call.write(worker_pb2.AttachRequest(abort=worker_pb2.Abort(stream=stream)))
    await eventually(lambda: slow_worker.queued() == (0, 0) and slow_worker.used_blocks() == 0, timeout_s=2)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_router_that_vanishes_frees_the_engine_at_every_stage(slow_worker: LiveWorker, stage: str) -> None:
    """A broken Attach aborts its router's requests and nobody else's."""
    router, other = Router(slow_worker), Router(slow_worker)
    for each in (router, other):
        await each.hello(slow_worker.record.epoch)
    await reach(router, slow_worker, stage)
    await other.call.write(start(1, prompt=bytes(4), sampling={"max_tokens": 2}))
    router.call.cancel()
    assert (await other.until_finished(1))[1][-1].finish_reason == types_pb2.FINISH_REASON_LENGTH
    await eventually(lambda: slow_worker.queued() == (0, 0) and slow_worker.used_blocks() == 0, timeout_s=2)


async def test_a_router_that_ends_its_side_is_let_go(slow_worker: LiveWorker) -> None:
    """A half-closed Attach ends with OK and its requests are aborted."""
    router = Router(slow_worker)
    await router.hello(slow_worker.record.epoch)
    await router.call.write(start(1, sampling={"max_tokens": 500}))
    await router.call.done_writing()
    assert await router.call.code() == grpc.StatusCode.OK
    await eventually(lambda: slow_worker.queued() == (0, 0))


async def test_a_timeout_ends_the_request_with_deadline_exceeded(slow_worker: LiveWorker) -> None:
    """After timeout_ms nobody waits: the stream gets DEADLINE_EXCEEDED and the engine is free."""
    router = Router(slow_worker)
    await router.hello(slow_worker.record.epoch)
    await router.call.write(start(1, timeout_ms=100, sampling={"max_tokens": 500}))
    assert (await router.until_finished(1))[1][-1].error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert slow_worker.queued() == (0, 0)


async def test_the_first_message_must_be_hello(worker: LiveWorker) -> None:
    """An Attach that begins with anything else ends with INVALID_ARGUMENT."""
    router = Router(worker)
    await router.call.write(start(1))
    assert await router.call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_router_that_does_not_read_is_cut_off(
    registry: tuple[FakeRegistry, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output for a router that has stopped reading is bounded: it is cut off and its requests are aborted."""
    monkeypatch.setattr(attach, "MAX_PENDING_TOKENS", 2_000)
    async with live_worker(registry, num_kv_blocks=16_384, max_model_len=200_000) as worker:
        router = Router(worker)
        await router.hello(worker.record.epoch)
        # Log probabilities fill the flow-control window fast.
        await router.call.write(start(1, sampling={"max_tokens": 150_000, "logprobs": 20}))
        await eventually(lambda: worker.queued() == (0, 1))
        await eventually(lambda: worker.queued() == (0, 0), timeout_s=8)
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await router.call.read() is not grpc.aio.EOF:
                pass
        assert await router.call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_refusals_count_as_output() -> None:
    """A router that sends what is refused and reads no answer reaches the same bound as one that doesn't read tokens."""
    outbox = attach.Outbox(Tokenizer.byte_level(), lambda: None)
    for stream in range(10):
        outbox.failed(stream, InvalidField("prompt", "", "must not be empty"))
    assert outbox.pending_tokens == 10
    outbox.delta(11, 0, (104,), "h", [Logprob(104, -1.0, ((104, -1.0), (105, -2.0)))], None, None)
    assert outbox.pending_tokens == 10 + 1 + 1 + 3


async def test_deltas_of_one_pass_share_a_message() -> None:
    """What comes before the next `take` is one Step, and a choice's tokens in it one delta."""
    filled: list[bool] = []
    outbox = attach.Outbox(Tokenizer.byte_level(), lambda: filled.append(bool(outbox)))
    outbox.delta(1, 0, (104,), "h", (), None, 16)
    outbox.delta(2, 0, (104, 105), "hi", (), None, None)
    outbox.delta(1, 0, (105,), "i", (), Finish.LENGTH, None)
    assert filled == [True] * 3
    assert outbox.pending_tokens == 7
    first, second = worker_pb2.AttachResponse.FromString(outbox.take()).step.deltas
    assert (first.stream, first.text, first.cached_tokens) == (1, "hi", 16)
    assert (first.tokens, first.finish_reason) == (struct.pack("<2I", 104, 105), types_pb2.FINISH_REASON_LENGTH)
    assert (second.stream, second.HasField("cached_tokens")) == (2, False)
    assert not outbox
    assert outbox.pending_tokens == 0


async def test_after_any_mixture_of_requests_nothing_is_left(registry: tuple[FakeRegistry, str]) -> None:
    """Requests with choices, stops, timeouts and aborts on ranks that are too small: all end once, all is free."""
    rng = random.Random(7)
    async with live_worker(registry, num_kv_blocks=48, max_model_len=700, max_num_seqs=8) as worker:
        router = Router(worker)
        await router.hello(worker.record.epoch)
        ended: Counter[tuple[int, int]] = Counter()
        choices: dict[int, int] = {}
        aborted: set[int] = set()

        async def read() -> None:
            while (message := await router.call.read()) is not grpc.aio.EOF:
                for delta in message.step.deltas:
                    if delta.finish_reason:
                        ended[delta.stream, delta.index] += 1
                    elif delta.HasField("error"):
                        # It ends the choices that have not ended yet.
                        ended.update({(delta.stream, index) for index in range(choices[delta.stream])} - ended.keys())

        reader = asyncio.create_task(read())
        for stream in range(120):
            choices[stream] = rng.choice([1, 1, 1, 3])
            sampling = {"max_tokens": rng.randint(1, 200), "n": choices[stream], "stop": rng.choice([[], ["the"], ["ze"]])}
            prompt = struct.pack(f"<{(length := rng.randint(1, 400))}I", *(rng.randint(0, 1) for _ in range(length)))
            timeout_ms = rng.choice([0, 0, 0, 1, 20])
            await router.call.write(
                start(stream, dp_rank=rng.randint(4, 7), prompt=prompt, sampling=sampling, timeout_ms=timeout_ms)
            )
            if rng.random() < 0.2:
                aborted.add(victim := rng.randint(0, stream))
                await router.call.write(worker_pb2.AttachRequest(abort=worker_pb2.Abort(stream=victim)))
        expected = {(stream, index) for stream, n in choices.items() for index in range(n) if stream not in aborted}
        await eventually(lambda: expected <= ended.keys() and worker.queued() == (0, 0), timeout_s=30)
        assert set(ended.values()) == {1}
        assert worker.used_blocks() == 0
        assert worker.engine._requests == {}
        router.call.cancel()
        await asyncio.gather(reader, return_exceptions=True)
