"""Every parameter of the generating endpoints: what is taken, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from harness.front_door import House

from rankway.sampling import Sampling

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "tiny", "prompt": "hi"},
}
both = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])

TAKEN_BY_BOTH: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_tokens": 1}, {"max_tokens": 1}),
    ({"max_tokens": None}, {}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 2}, {"temperature": 2.0}),
    ({"top_p": 0.01}, {"top_p": 0.01}),
    ({"top_p": 1}, {"top_p": 1.0}),
    ({"top_k": -1}, {"top_k": -1}),
    ({"top_k": 40}, {"top_k": 40}),
    ({"min_p": 0.5}, {"min_p": 0.5}),
    ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
    ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"seed": -5}, {"seed": -5}),
    ({"stop": "END"}, {"stop": ("END",)}),
    ({"stop": ["a", "b", "c", "d"]}, {"stop": ("a", "b", "c", "d")}),
    ({"stop": []}, {}),
    ({"stop_token_ids": [0, 511]}, {"stop_token_ids": (0, 511)}),
    ({"n": 1}, {}),
    ({"n": 128}, {"n": 128}),
    ({"logit_bias": {"5": -100, "6": 100}}, {"logit_bias": {5: -100.0, 6: 100.0}}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"min_tokens": 3, "max_tokens": 3}, {"min_tokens": 3, "max_tokens": 3}),
    ({"guided_json": {"type": "object"}}, {"guided_json": '{"type":"object"}'}),
    ({"guided_json": '{"type":"array"}'}, {"guided_json": '{"type":"array"}'}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, {"guided_json": '{"type":"object"}'}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
        {"guided_json": '{"type":"null"}'},
    ),
    ({"user": "someone", "store": False, "metadata": None}, {}),
    ({"stream_options": {"include_usage": True, "include_obfuscation": False}}, {}),
]
TAKEN_BY_CHAT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_completion_tokens": 7}, {"max_tokens": 7}),
    ({"max_completion_tokens": 7, "max_tokens": 7}, {"max_tokens": 7}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
    ({"logprobs": False}, {}),
    ({"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"], "service_tier": "auto"}, {}),
    ({"tools": None, "functions": None, "response_format": None}, {}),
    ({"chat_template_kwargs": {"enable_thinking": False}}, {}),
]
TAKEN_BY_COMPLETIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"logprobs": 0}, {"logprobs": 0}),
    ({"logprobs": 5}, {"logprobs": 5}),
    ({"echo": False, "suffix": None, "best_of": 1}, {}),
    ({"best_of": 2, "n": 2}, {"n": 2}),
]

REFUSED_BY_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 4095}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 10**40}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 3}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x" * 2000]}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**400}, "n"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"word": 1}}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"priority": 2**31}, "priority"),
    ({"cache_salt": "x" * 300}, "cache_salt"),
    ({"user": "x" * 300}, "tenant"),
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"store": True}, "store"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"guided_regex": "a+"}, "guided_regex"),
    ({"rankway": {"rank": 1}}, "rankway.rank"),
    ({"rankway": {"worker_id": "a.b"}}, "worker_id"),
    ({"rankway": {"worker_id": "x" * 65}}, "worker_id"),
    ({"rankway": {"dp_group": "a b"}}, "dp_group"),
    ({"rankway": {"session_id": "x" * 300}}, "session_id"),
]
REFUSED_BY_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "hi", "mood": "good"}]}, "messages[0].mood"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"prompt": "hi"}, "prompt"),
]
REFUSED_BY_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [1, None]}, "prompt[1]"),
    ({"prompt": [1, -1]}, "prompt[1]"),
    ({"prompt": [1, 512]}, "prompt[1]"),
    ({"prompt": [2**40]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": "x" * 4096}, "prompt"),
    ({"prompt": [5] * 4096}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"messages": []}, "messages"),
    ({"top_logprobs": 1}, "top_logprobs"),
]


def _cases(by_both: list[Any], by_chat: list[Any], by_completions: list[Any]) -> list[Any]:
    cases = [(path, *case) for path in (CHAT, COMPLETIONS) for case in by_both]
    cases += [(CHAT, *case) for case in by_chat] + [(COMPLETIONS, *case) for case in by_completions]
    return [
        pytest.param(*case, id=f"{case[0].rsplit('/', 1)[-1] if case[0] is not CHAT else 'chat'}-{str(case[1])[:60]}")
        for case in cases
    ]


@pytest.mark.parametrize(("path", "fields", "expected"), _cases(TAKEN_BY_BOTH, TAKEN_BY_CHAT, TAKEN_BY_COMPLETIONS))
async def test_taken(echo_house: House, path: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """A parameter in its range reaches the dispatcher under its name; the others keep their defaults."""
    answer = await echo_house.post(path, BASE[path] | fields)
    assert answer.status == 200, answer.body
    (running,) = echo_house.dispatcher.seen
    default = {"max_tokens": 4096 - running.request.prompt_tokens if path == CHAT else 16}
    assert running.request.sampling == Sampling(**default | expected)


@pytest.mark.parametrize(("path", "fields", "param"), _cases(REFUSED_BY_BOTH, REFUSED_BY_CHAT, REFUSED_BY_COMPLETIONS))
async def test_refused(echo_house: House, path: str, fields: dict[str, Any], param: str) -> None:
    """What is out of range, of a wrong type or not supported is a 400 that names the field, and nothing is dispatched."""
    answer = await echo_house.post(path, BASE[path] | fields)
    assert answer.status == 400, answer.body
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param
    assert param in answer.error["message"]
    assert echo_house.dispatcher.seen == []
    assert echo_house.door.stats.active == 0
    assert (await echo_house.get("/health")).status == 200


@both
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "tiny",}', b"[" * 100_000, b'{"prompt": "\\ud800"}', b"{} {}"],
)
async def test_malformed_json(echo_house: House, path: str, body: bytes) -> None:
    """A body that is no JSON object is a 400 and nothing else."""
    answer = await echo_house.post(path, body)
    assert answer.status == 400
    assert answer.error["param"] in ("body", "messages", "prompt")
    assert echo_house.dispatcher.seen == []


@both
async def test_unknown_model(echo_house: House, path: str) -> None:
    """An unknown model is a 404 with OpenAI's code, and says which there are."""
    answer = await echo_house.post(path, BASE[path] | {"model": "huge"})
    assert answer.status == 404
    assert answer.error["code"] == "model_not_found"
    assert "small, tiny, tiny-lora" in answer.error["message"]


@both
async def test_no_workers(echo_house: House, path: str) -> None:
    """No worker at all is a 503 with Retry-After."""
    echo_house.fleet.windows = {}
    answer = await echo_house.post(path, BASE[path])
    assert answer.status == 503
    assert answer.error["type"] == "server_error"
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("model", "canonical", "lora", "shown"),
    [
        ("tiny", "tiny", "", "tiny"),
        ("small", "tiny", "", "small"),
        ("tiny-lora", "tiny", "tiny-lora", "tiny-lora"),
        (None, "tiny", "", "tiny"),
    ],
)
async def test_model_names(echo_house: House, model: str | None, canonical: str, lora: str, shown: str) -> None:
    """A model may be named by its name, an alias or an adapter's name; the answer shows the name that was asked for."""
    answer = await echo_house.post(CHAT, BASE[CHAT] | {"model": model})
    (running,) = echo_house.dispatcher.seen
    assert (running.request.model, running.request.lora) == (canonical, lora)
    assert answer.json["model"] == shown


async def test_token_prompts(echo_house: House) -> None:
    """Token ids, one text, one text in a list and one list of ids in a list are prompts."""
    for prompt in ([104, 105], "hi", ["hi"], [[104, 105]]):
        assert (await echo_house.post(COMPLETIONS, {"prompt": prompt})).status == 200
    assert {running.request.prompt for running in echo_house.dispatcher.seen} == {b"h\0\0\0i\0\0\0"}


async def test_text_parts(echo_house: House) -> None:
    """The text parts of a message are one text, and the empty fields that SDKs echo are no offence."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    echoed = {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    messages = [{"role": "user", "content": parts, "name": "me"}, echoed, {"role": "user", "content": None}]
    assert (await echo_house.post(CHAT, {"messages": messages})).status == 200
    prompt = echo_house.dispatcher.seen[0].request.prompt[::4]
    assert prompt == b"<|user|>\na\nb\n<|assistant|>\nc\n<|user|>\n\n<|assistant|>\n"


async def test_the_rest_of_the_request(echo_house: House) -> None:
    """Priority, salt and deadline reach the dispatcher."""
    await echo_house.post(CHAT, BASE[CHAT] | {"priority": -3, "cache_salt": "pepper"})
    request = echo_house.dispatcher.seen[0].request
    assert (request.priority, request.cache_salt) == (-3, "pepper")
    assert request.deadline is not None
