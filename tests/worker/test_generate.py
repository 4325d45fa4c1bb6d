"""`Generate` straight at a worker, over real gRPC."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from rankway.v1 import generate_pb2, types_pb2


def request(**fields: Any) -> generate_pb2.GenerateRequest:
    sampling = fields.pop("sampling", {})
    if not {"token_ids", "text", "chat"} & fields.keys():
        fields["token_ids"] = types_pb2.TokenIds(ids=range(1, 50))
    return generate_pb2.GenerateRequest(sampling=types_pb2.SamplingParams(**({"max_tokens": 20} | sampling)), **fields)


async def answer(worker: Any, **fields: Any) -> tuple[generate_pb2.Routed, str, generate_pb2.Finished]:
    """(routed, text of choice 0, finished)."""
    events = [event async for event in worker.generation.Generate(request(**fields))]
    assert events[0].HasField("routed")
    assert events[-1].HasField("finished")
    text = "".join(event.delta.text for event in events[1:-1] if event.delta.index == 0)
    return events[0].routed, text, events[-1].finished


async def test_a_stream_is_routed_then_deltas_then_finished(worker: Any) -> None:
    """A request at a rank of the window is served there, with usage and a reason."""
    routed, text, finished = await answer(worker, dp_rank=6, request_id="r1")
    assert (routed.request_id, routed.worker_id, routed.dp_rank, routed.prompt_tokens) == ("r1", "w1", 6, 49)
    assert len(text) == 20
    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens, finished.usage.cached_tokens) == (49, 20, 0)


async def test_the_repeat_of_a_prompt_finds_its_full_blocks_in_the_cache(worker: Any) -> None:
    """The same prompt on the same rank takes its full blocks from the prefix cache and gives the same text."""
    _, first, _ = await answer(worker, dp_rank=6)
    _, second, finished = await answer(worker, dp_rank=6)
    assert first == second
    assert finished.usage.cached_tokens == 48
