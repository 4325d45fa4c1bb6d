"""Streams as a raw socket sees them: framing, order, ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from harness.front_door import ABORT, LENGTH, STOP, Client, House, Running

from rankway.errors import EngineFailed, Overloaded, RankwayError, Unavailable
from rankway.v1 import types_pb2

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True},
    COMPLETIONS: {"model": "tiny", "prompt": "hi", "stream": True},
}
both = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


async def begin(house: House, path: str, **fields: Any) -> tuple[Client, Running]:
    client = await house.connect()
    await client.send_request("POST", path, json.dumps(BODIES[path] | fields).encode())
    return client, await house.dispatcher.next()


def data_of(chunk: bytes) -> list[Any]:
    """The JSON values of the events in a chunk, its framing checked."""
    text = chunk.decode()
    assert text.endswith("\n\n")
    events = text[:-2].split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event[6:]) for event in events]


def token(text: bytes, logprob: float = -0.5, *top: tuple[bytes, float]) -> types_pb2.TokenLogprob:
    others = [types_pb2.TopLogprob(token_id=1, token=token, logprob=value) for token, value in top]
    return types_pb2.TokenLogprob(token_id=1, token=text, logprob=logprob, top=others)


async def test_a_chat(house: House) -> None:
    """The role comes first and alone, then text as it comes, then one finish reason per choice, then [DONE] and the end."""
    client, running = await begin(house, CHAT)
    running.route("w1", 3, overlap_blocks=2).say("Hel")
    status, headers = await client.head()
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-rankway-dp-rank"] == "3"
    first, second = data_of(await client.chunk())
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert second["choices"] == [{"index": 0, "delta": {"content": "Hel"}, "logprobs": None, "finish_reason": None}]
    assert "usage" not in second
    running.say("lo").end(LENGTH)
    rest = await client.answer_of_open_stream()
    assert rest.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in rest]
    assert [choice["delta"] for choice in choices] == [{"content": "lo"}, {}]
    assert [choice["finish_reason"] for choice in choices] == [None, "length"]
    assert {json.loads(event)["id"] for event in rest} == {first["id"]} == {f"chatcmpl-{headers['x-request-id']}"}
    client.close()


async def test_a_completion(house: House) -> None:
    """A completion's stream has text and no role."""
    client, running = await begin(house, COMPLETIONS)
    running.route().say("Hel").say("lo").end(STOP)
    answer = await client.answer()
    events = answer.events
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert [choice["text"] for choice in choices] == ["Hel", "lo", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert {json.loads(event)["object"] for event in events} == {"text_completion"}
    client.close()


@both
async def test_headers_name_the_target_that_answers(house: House, path: str) -> None:
    """They come with the first delta, even one without text: a request that moves before it is answered elsewhere."""
    client, running = await begin(house, path)
    waiting = asyncio.ensure_future(client.head())
    running.route("w1", 1)
    await asyncio.sleep(0)
    assert not waiting.done()
    running.route("w2", 5).say("")
    status, headers = await waiting
    assert (status, headers["x-rankway-worker-id"], headers["x-rankway-dp-rank"]) == (200, "w2", "5")
    running.end()
    assert (await client.answer_of_open_stream())[-1] == "[DONE]"
    client.close()


@both
async def test_all_in_one_delta(house: House, path: str) -> None:
    """An answer of one delta is a stream like any other."""
    client, running = await begin(house, path)
    running.route().say_all("all")
    events = (await client.answer()).events
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert [choice["finish_reason"] for choice in choices][-1] == "stop"
    assert "".join(choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "") for choice in choices) == "all"
    client.close()


@both
async def test_usage_only_when_asked_for(house: House, path: str) -> None:
    """With include_usage one event with no choices carries it, right before [DONE]; the others have usage null."""
    client, running = await begin(house, path, stream_options={"include_usage": True})
    running.route().say("x").end(completion_tokens=5, cached_tokens=1)
    *events, usage, done = (await client.answer()).events
    assert done == "[DONE]"
    assert all(json.loads(event)["usage"] is None for event in events)
    prompt_tokens = running.request.prompt_tokens
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": prompt_tokens + 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    client.close()


@both
async def test_several_choices(house: House, path: str) -> None:
    """Each of n choices has its own texts and exactly one finish reason."""
    client, running = await begin(house, path, n=3)
    running.route()
    for index, text in ((2, "c"), (0, "a"), (1, "b"), (0, "A")):
        running.say(text, index)
    running.end(STOP, LENGTH, STOP)
    events = (await client.answer()).events
    texts, reasons = ["", "", ""], [[], [], []]
    for event in events[:-1]:
        (choice,) = json.loads(event)["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "") if path == CHAT else choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]].append(choice["finish_reason"])
    assert texts == ["aA", "b", "c"]
    assert reasons == [["stop"], ["length"], ["stop"]]
    client.close()


@both
async def test_line_separators(house: House, path: str) -> None:
    """Text with Unicode's own line ends stays in one line for every client, and unchanged."""
    nasty = 'a\u2028b\u2029c\x85d\r\ne\x0b\x0c\x1c\x1ef\u00e9\u4e2d\U0001f642"\\data: [DONE]\n\n'
    client, running = await begin(house, path, model="tiny")
    running.route().say(nasty).say("", logprobs=()).end()
    answer = await client.answer()
    text = "".join(
        choice["delta"].get("content", "") if path == CHAT else choice["text"]
        for event in answer.events[:-1]
        for choice in json.loads(event)["choices"]
    )
    assert text == nasty
    assert len(answer.body.decode().splitlines()) == answer.body.count(b"\n")
    client.close()


@both
async def test_nothing_for_nothing(house: House, path: str) -> None:
    """A step that gives no text (a character or a stop string may still be under way) makes no event."""
    client, running = await begin(house, path)
    running.route().say("").say("").say("x").end()
    events = (await client.answer()).events
    assert len(events) == (4 if path == CHAT else 3)
    client.close()


@both
@pytest.mark.parametrize(
    ("error", "status"),
    [(Overloaded("full", 7.2), 429), (Unavailable("nobody"), 503), (EngineFailed("broke"), 500)],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_error_before_the_first_byte(house: House, path: str, error: RankwayError, status: int, stream: bool) -> None:
    """An error before the target is known is a plain answer with its status, Retry-After where waiting helps."""
    client, running = await begin(house, path, stream=stream)
    running.fail(error)
    answer = await client.answer()
    assert answer.status == status
    assert answer.error["message"] == error.message
    assert answer.headers.get("retry-after") == {429: "8", 503: "1"}.get(status)
    assert "x-request-id" in answer.headers
    client.close()


@both
async def test_error_after_the_first_byte(house: House, path: str) -> None:
    """An error in mid-stream is an error event; the connection then closes with neither [DONE] nor a regular end."""
    client, running = await begin(house, path)
    running.route().say("Hel").fail(EngineFailed("the engine broke"))
    await client.head()
    received = await client.broken_stream()
    *_, last = received.decode().rstrip("\n").split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"] == {
        "message": "the engine broke",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert b"[DONE]" not in received
    assert b'finish_reason":"' not in received
    assert house.door.stats.answers["broken_off"] == 1
    client.close()


@both
async def test_abort_is_an_error(house: House, path: str) -> None:
    """A choice that the engine aborted has no finish reason: the stream ends as a failed one."""
    client, running = await begin(house, path)
    running.route().say("x").end(ABORT)
    await client.head()
    rest = await client.closed()
    assert b"the engine aborted the request" in rest
    assert b"[DONE]" not in rest
    client.close()


async def test_chat_logprobs(house: House) -> None:
    """Log probabilities come with their tokens, even while their text is held back; parts of characters are shown as bytes."""
    client, running = await begin(house, CHAT, logprobs=True, top_logprobs=1)
    running.route()
    running.say("", logprobs=[token(b"\xe2\x82", -0.25, (b"a", float("-inf")))])
    running.say("€", logprobs=[token(b"\xac")])
    running.end()
    events = [json.loads(event) for event in (await client.answer()).events[:-1]]
    first, second = events[1]["choices"][0], events[2]["choices"][0]
    assert first["delta"] == {"content": ""}
    assert first["logprobs"]["content"] == [
        {
            "token": "bytes:\\xe2\\x82",
            "logprob": -0.25,
            "bytes": [0xE2, 0x82],
            "top_logprobs": [{"token": "a", "logprob": -9999.0, "bytes": [97]}],
        }
    ]
    assert second["delta"] == {"content": "€"}
    client.close()


async def test_completion_logprobs(house: House) -> None:
    """A completion's log probabilities have OpenAI's older form, with offsets into the text."""
    client, running = await begin(house, COMPLETIONS, logprobs=1)
    running.route()
    running.say("ab", logprobs=[token(b"ab", -1.0, (b"ab", -1.0), (b"x", -2.0))])
    running.say("", logprobs=[token(b"\xe2\x82")])
    running.say("€c", logprobs=[token(b"\xac"), token(b"c")])
    running.end()
    events = [json.loads(event) for event in (await client.answer()).events[:-1]]
    found = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert found[0] == {
        "tokens": ["ab"],
        "token_logprobs": [-1.0],
        "top_logprobs": [{"ab": -1.0, "x": -2.0}],
        "text_offset": [0],
    }
    assert [offset for logprobs in found for offset in logprobs["text_offset"]] == [0, 2, 2, 3]
    client.close()


async def test_whole_chat(house: House) -> None:
    """Without streaming one object comes at the end, with usage and cached tokens."""
    client, running = await begin(house, CHAT, stream=False, n=2, logprobs=True)
    running.route("w2", 4, overlap_blocks=1)
    running.say("a", 0, logprobs=[token(b"a")]).say("b", 1).say("A", 0)
    running.end(STOP, LENGTH, completion_tokens=3, cached_tokens=2)
    answer = await client.answer()
    body = answer.json
    assert body["object"] == "chat.completion"
    assert [choice["message"] for choice in body["choices"]] == [
        {"role": "assistant", "content": "aA", "refusal": None},
        {"role": "assistant", "content": "b", "refusal": None},
    ]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert [bool(choice["logprobs"]) for choice in body["choices"]] == [True, False]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert answer.headers["x-rankway-overlap-blocks"] == "1"
    client.close()


async def test_whole_completion(house: House) -> None:
    """A completion likewise, with its log probabilities in one piece."""
    client, running = await begin(house, COMPLETIONS, stream=False, logprobs=0)
    running.route().say("a", logprobs=[token(b"a")]).say("b", logprobs=[token(b"b")]).end()
    (choice,) = (await client.answer()).json["choices"]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["text_offset"] == [0, 1]
    assert choice["logprobs"]["top_logprobs"] == [None, None]
    client.close()


async def test_whole_answer_fails(house: House) -> None:
    """An error after tokens have come is still a plain error: nothing was sent yet."""
    client, running = await begin(house, CHAT, stream=False)
    running.route().say("a").fail(Unavailable("the worker is gone"))
    answer = await client.answer()
    assert (answer.status, answer.error["message"]) == (503, "the worker is gone")
    client.close()


@both
async def test_next_request_on_the_connection(house: House, path: str) -> None:
    """A stream's regular end leaves the connection open for the next request."""
    client, running = await begin(house, path)
    for text in ("one", "two"):
        running.route().say(text).end()
        assert text in (await client.answer()).body.decode()
        await client.send_request("POST", path, json.dumps(BODIES[path]).encode())
        running = await house.dispatcher.next()
    running.cancel()
    client.close()
