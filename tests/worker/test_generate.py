"""`Generate` straight at a worker, over real gRPC."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from harness.waiting import eventually
from harness.worker import FakeRegistry, LiveWorker, live_worker

from rankway.v1 import generate_pb2, types_pb2


def request(**fields: Any) -> generate_pb2.GenerateRequest:
    sampling = fields.pop("sampling", {})
    if not {"token_ids", "text", "chat"} & fields.keys():
        fields["token_ids"] = types_pb2.TokenIds(ids=range(1, 50))
    return generate_pb2.GenerateRequest(sampling=types_pb2.SamplingParams(**({"max_tokens": 20} | sampling)), **fields)


async def answer(worker: LiveWorker, **fields: Any) -> tuple[generate_pb2.Routed, str, generate_pb2.Finished]:
    """(routed, text of choice 0, finished)."""
    events = [event async for event in worker.generation.Generate(request(**fields))]
    assert events[0].HasField("routed")
    assert events[-1].HasField("finished")
    text = "".join(event.delta.text for event in events[1:-1] if event.delta.index == 0)
    return events[0].routed, text, events[-1].finished


async def test_a_stream_is_routed_then_deltas_then_finished(worker: LiveWorker) -> None:
    """A request at a rank of the window is served there, with usage and a reason."""
    routed, text, finished = await answer(worker, dp_rank=6, request_id="r1")
    assert (routed.request_id, routed.worker_id, routed.dp_rank, routed.prompt_tokens) == ("r1", "w1", 6, 49)
    assert len(text) == 20
    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens, finished.usage.cached_tokens) == (49, 20, 0)


async def test_the_repeat_of_a_prompt_finds_its_full_blocks_in_the_cache(worker: LiveWorker) -> None:
    """The same prompt on the same rank takes its full blocks from the prefix cache and gives the same text."""
    _, first, _ = await answer(worker, dp_rank=6)
    _, second, finished = await answer(worker, dp_rank=6)
    assert first == second
    assert finished.usage.cached_tokens == 48


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"dp_rank": 3}, grpc.StatusCode.OUT_OF_RANGE, "worker w1 owns the global ranks [4, 8)"),
        ({"worker_id": "w2"}, grpc.StatusCode.NOT_FOUND, "worker_id='w2'"),
        ({"dp_group": "other"}, grpc.StatusCode.NOT_FOUND, "dp_group='other'"),
        ({"model": "gpt-9"}, grpc.StatusCode.NOT_FOUND, "gpt-9"),
        ({"request_id": "x" * 129}, grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        ({"token_ids": types_pb2.TokenIds()}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"token_ids": types_pb2.TokenIds(ids=[1], packed=b"abcd")}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
        ({"token_ids": types_pb2.TokenIds(packed=b"abc")}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
        ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"chat": types_pb2.ChatMessages()}, grpc.StatusCode.INVALID_ARGUMENT, "chat"),
        (
            {"chat": types_pb2.ChatMessages(messages=[{"role": "user"}], template_kwargs_json="[")},
            grpc.StatusCode.INVALID_ARGUMENT,
            "template_kwargs_json",
        ),
        (
            {"chat": types_pb2.ChatMessages(messages=[{"role": "user"}], template_kwargs_json="[" * 100_000)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "template_kwargs_json",
        ),
        (
            {"chat": types_pb2.ChatMessages(messages=[{"role": "user"}], template_kwargs_json="[]")},
            grpc.StatusCode.INVALID_ARGUMENT,
            "template_kwargs_json",
        ),
        ({"sampling": {"max_tokens": 0}}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens=0"),
        ({"sampling": {"n": 129}}, grpc.StatusCode.INVALID_ARGUMENT, "n=129"),
    ],
)
async def test_bad_input_is_refused_by_name(
    worker: LiveWorker, fields: dict[str, Any], code: grpc.StatusCode, message: str
) -> None:
    """Bad input ends with a status that names field and value, before the engine sees anything."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await answer(worker, **fields)
    assert error.value.code() == code
    assert message in (error.value.details() or "")
    assert worker.queued() == (0, 0)


async def test_rank_zero_of_the_window_is_not_absent(registry: tuple[FakeRegistry, str]) -> None:
    """dp_rank 0 is a rank; absent lets the engine balance, and Routed says so by its absence."""
    async with live_worker(registry, start_rank=0, size=2, data_parallel_size=2) as worker:
        pinned, _, _ = await answer(worker, dp_rank=0)
        free, _, _ = await answer(worker)
        assert (pinned.HasField("dp_rank"), pinned.dp_rank) == (True, 0)
        assert not free.HasField("dp_rank")


async def test_text_and_chat_are_tokenised_by_the_workers_tokenizer(worker: LiveWorker) -> None:
    """A text is its bytes, a chat goes through the template, and a chat may use all that fits."""
    routed, _, _ = await answer(worker, text="hello", model="sim")
    assert routed.prompt_tokens == 5
    chat = types_pb2.ChatMessages(messages=[{"role": "user", "content": "hello"}])
    events = [
        event
        async for event in worker.generation.Generate(
            generate_pb2.GenerateRequest(chat=chat, sampling=types_pb2.SamplingParams())
        )
    ]
    usage = events[-1].finished.usage
    assert usage.prompt_tokens > 5
    assert usage.prompt_tokens + usage.completion_tokens == 2048


async def test_choices_come_with_their_index_and_count_the_prompt_once(worker: LiveWorker) -> None:
    """n choices: deltas of each, a reason for each, all their tokens in the usage, and the prompt once."""
    events = [event async for event in worker.generation.Generate(request(dp_rank=4, sampling={"n": 3, "max_tokens": 5}))]
    finished = events[-1].finished
    assert list(finished.reasons) == [types_pb2.FINISH_REASON_LENGTH] * 3
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (49, 15)
    assert {event.delta.index for event in events if event.HasField("delta")} == {0, 1, 2}


async def test_a_deadline_and_a_cancelled_call_free_the_engine(slow_worker: LiveWorker) -> None:
    """A client that is gone, or whose deadline has passed, holds no place in the engine."""
    slow = request(token_ids=types_pb2.TokenIds(ids=range(20)), sampling={"max_tokens": 500})
    with pytest.raises(grpc.aio.AioRpcError) as error:
        _ = [event async for event in slow_worker.generation.Generate(slow, timeout=0.2)]
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    call = slow_worker.generation.Generate(slow)
    await call.read()
    await eventually(lambda: slow_worker.queued() == (0, 1))
    call.cancel()
    await eventually(lambda: slow_worker.queued() == (0, 0) and slow_worker.used_blocks() == 0, timeout_s=2)


async def test_a_full_worker_refuses_with_a_retry_delay(registry: tuple[FakeRegistry, str]) -> None:
    """Beyond max_requests a request gets RESOURCE_EXHAUSTED at once; when one has ended the next is taken."""
    async with live_worker(registry, max_requests=1, sim_speedup=1.0) as worker:
        first = worker.generation.Generate(request(sampling={"max_tokens": 500}))
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await answer(worker)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "grpc-status-details-bin" in dict(error.value.trailing_metadata())
        first.cancel()
        await eventually(lambda: worker.queued() == (0, 0))
        await answer(worker)


async def test_logprobs_come_with_the_tokens_text(worker: LiveWorker) -> None:
    """Each token has its log probability and alternatives, with their text as bytes."""
    events = [event async for event in worker.generation.Generate(request(sampling={"logprobs": 2, "max_tokens": 4}))]
    entries = [entry for event in events if event.HasField("delta") for entry in event.delta.logprobs]
    assert len(entries) == 4
    for entry in entries:
        assert entry.token == bytes([entry.token_id])
        assert len(entry.top) == 2


async def test_adapters_are_models(registry: tuple[FakeRegistry, str]) -> None:
    """A LoRA adapter's name as model is served, and shares no cache with the model itself."""
    async with live_worker(registry, lora_adapters=("poet",), served_model_name=("big", "big-alias")) as worker:
        for model, cached in (("big", 0), ("big-alias", 48), ("", 48), ("poet", 0), ("poet", 48)):
            _, _, finished = await answer(worker, model=model, dp_rank=4)
            assert finished.usage.cached_tokens == cached
        assert (worker.record.model, list(worker.record.model_aliases)) == ("big", ["big-alias"])
        assert [adapter.name for adapter in worker.record.lora_adapters] == ["poet"]
