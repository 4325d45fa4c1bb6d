"""The official client works unchanged."""

from __future__ import annotations

import asyncio

import openai
import pytest
from harness.front_door import House, Running, open_house

from rankway.errors import EngineFailed, Overloaded
from rankway.v1 import types_pb2

MESSAGES = [{"role": "user", "content": "hi"}]


def client_of(house: House) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="k", max_retries=0)


async def test_chat(echo_house: House) -> None:
    """Chat completions, streamed and not."""
    async with client_of(echo_house) as client:
        whole = await client.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
        assert whole.choices[0].message.content == "Hello"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        stream = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},  # type: ignore[arg-type]
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello"
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
        assert chunks[-1].usage is not None
        history = [*MESSAGES, whole.choices[0].message.model_dump(), *MESSAGES]
        again = await client.chat.completions.create(model="tiny", messages=history)  # type: ignore[arg-type]
        assert again.choices[0].message.content == "Hello"


async def test_completion_and_models(echo_house: House) -> None:
    """Completions with extra parameters, and the list of models."""
    async with client_of(echo_house) as client:
        whole = await client.completions.create(
            model="small", prompt="hi", max_tokens=3, extra_body={"top_k": 3}, extra_headers={"x-rankway-dp-rank": "5"}
        )
        assert whole.choices[0].text == "Hello"
        assert echo_house.dispatcher.seen[0].request.sampling.top_k == 3
        assert echo_house.dispatcher.seen[0].request.dp_rank == 5
        assert [model.id async for model in client.models.list()] == ["tiny", "small", "tiny-lora"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        raw = await client.completions.with_raw_response.create(model="tiny", prompt="hi")
        assert raw.headers["x-rankway-worker-id"] == "w1"


async def test_logprobs() -> None:
    """Log probabilities arrive in the client's types."""

    def answer(running: Running) -> None:
        top = [types_pb2.TopLogprob(token_id=2, logprob=-2.0, token=b"b")]
        running.route().say("a", logprobs=[types_pb2.TokenLogprob(token_id=1, logprob=-0.5, token=b"a", top=top)]).end()

    async with open_house(script=answer) as house, client_of(house) as client:
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1)  # type: ignore[arg-type]
        assert chat.choices[0].logprobs is not None
        (token,) = chat.choices[0].logprobs.content or []
        assert (token.token, token.logprob, token.top_logprobs[0].token) == ("a", -0.5, "b")
        completion = await client.completions.create(model="tiny", prompt="hi", logprobs=1)
        assert completion.choices[0].logprobs is not None
        assert completion.choices[0].logprobs.token_logprobs == [-0.5]


async def test_errors(house: House) -> None:
    """Errors are the client's own exceptions, in mid-stream too."""
    async with client_of(house) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="hi", temperature=9)
        assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="none", prompt="hi")
        assert unknown.value.code == "model_not_found"
        house.dispatcher.script = lambda running: running.fail(Overloaded("full", 3))
        with pytest.raises(openai.RateLimitError) as full:
            await client.completions.create(model="tiny", prompt="hi")
        assert full.value.response.headers["retry-after"] == "3"
        house.dispatcher.script = lambda running: running.route().say("x").fail(EngineFailed("broke"))
        stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
        with pytest.raises(openai.APIError, match="broke"):
            _ = [chunk async for chunk in stream]


async def test_closing_a_stream_cancels(house: House) -> None:
    """Leaving the client's stream early cancels the request."""
    async with client_of(house) as client:
        house.dispatcher.script = lambda running: running.route().say("x")
        stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
        async for _ in stream:
            break
        await stream.close()
        await asyncio.wait_for(house.dispatcher.seen[0].cancelled.wait(), 2)


async def test_sync_client(echo_house: House) -> None:
    """The client without asyncio works too."""

    def talk() -> list[str | None]:
        with openai.OpenAI(base_url=f"{echo_house.url}/v1", api_key="k", max_retries=0) as client:
            whole = client.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[call-overload]
            stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
            return [whole.choices[0].message.content, "".join(chunk.choices[0].delta.content or "" for chunk in stream)]

    assert await asyncio.to_thread(talk) == ["Hello", "Hello"]
