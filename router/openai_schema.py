"""The JSON bodies that the OpenAI endpoints take, and their way to a `Draft`.

Field names and ranges are those of OpenAI's API reference; top_k, min_p, repetition_penalty, ignore_eos, min_tokens,
stop_token_ids, cache_salt, priority, chat_template_kwargs and guided_json are vLLM's. `rankway` places the request.
A field that isn't supported is refused by name unless its value asks for nothing; a field that nobody knows is refused too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rankway.errors import InvalidField, RankwayError, Unsupported
from rankway.router.intake import Draft
from rankway.sampling import Sampling

T = TypeVar("T")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Only false: our streams aren't padded."""


class Placement(msgspec.Struct, forbid_unknown_fields=True):
    """Where the request shall run: Rankway's own field."""

    worker_id: str | None = None
    dp_rank: Any = None
    """Global rank; whatever is no rank is refused with the ranks there are."""
    dp_group: str | None = None
    session_id: str | None = None


class ResponseFormat(msgspec.Struct):
    type: str
    json_schema: dict[str, Any] | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message. What an SDK echoes of an assistant's message with no value in it (null, empty list) is fine."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


class _Sampled(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both generating endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    guided_json: Any = None
    rankway: Placement | None = None
    # Known, and refused unless they ask for nothing.
    store: Any = None
    metadata: Any = None
    response_format: ResponseFormat | None = None


class ChatRequest(_Sampled, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    service_tier: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(_Sampled, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: Any = None
    suffix: Any = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


_ASKS_NOTHING: Mapping[str, Sequence[Any]] = {
    "store": (False,),
    "metadata": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # with no tools there is nothing to choose
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "echo": (False,),
    "suffix": ("",),
}
_MESSAGE_EXTRAS = (
    "tool_calls", "tool_call_id", "function_call", "refusal", "annotations", "audio", "reasoning", "reasoning_content",
)  # fmt: skip


class Schema:
    """Decodes the bodies of one endpoint."""

    def __init__(self, struct: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(struct)

    def decode(self, body: bytes) -> Any:
        """The checked struct.

        Raises:
            InvalidField: malformed JSON, or a field of a wrong type; names the field and its value.
            Unsupported: a field that nobody knows.
        """
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _field_error(str(error), body) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidField("body", f"{len(body)} bytes", f"malformed JSON: {error}") from None


CHAT = Schema(ChatRequest)
COMPLETION = Schema(CompletionRequest)
TOKENIZE = Schema(TokenizeRequest)
DETOKENIZE = Schema(DetokenizeRequest)

_PLACE = re.compile(r"(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[]+)")


def _field_error(message: str, body: bytes) -> RankwayError:
    """From msgspec's words, which name the place but not the value."""
    place = _PLACE.search(message)
    path = place["path"] or "" if place is not None else ""
    reason = message[: place.start()] if place is not None else message
    unknown = _UNKNOWN.match(message)
    if unknown is not None:
        return Unsupported(f"{path}.{unknown['name']}".lstrip("."), "no such field is known here")
    missing = _MISSING.match(message)
    if missing is not None:
        return InvalidField(f"{path}.{missing['name']}".lstrip("."), None, "must be given")
    return InvalidField(path or "body", _value_at(body, path), reason)


def _value_at(body: bytes, path: str) -> object:
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return f"{len(body)} bytes"  # the place comes before the first thing that isn't even JSON
    for index, name in _STEP.findall(path):
        if index.isdigit() and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        elif name and isinstance(value, dict):
            value = value.get(name)
        else:
            break
    return value


def refuse_unsupported(request: msgspec.Struct) -> None:
    """Raise Unsupported, or for best_of InvalidField, if the request asks for something that isn't there."""
    for name, harmless in _ASKS_NOTHING.items():
        value = getattr(request, name, None)
        if value is not None and value not in harmless:
            raise Unsupported(name, "isn't supported")
    if isinstance(request, CompletionRequest) and request.best_of not in (None, 1, request.n):
        raise Unsupported("best_of", "isn't supported beyond n")
    options = getattr(request, "stream_options", None)
    if options is not None and options.include_obfuscation:
        raise Unsupported("stream_options.include_obfuscation", "isn't supported")


def chat_draft(request: ChatRequest) -> Draft:
    """The draft of a chat. Raises RankwayError naming what is wrong."""
    refuse_unsupported(request)
    limit = request.max_completion_tokens
    if limit is not None and request.max_tokens not in (None, limit):
        raise InvalidField("max_completion_tokens", limit, f"contradicts max_tokens={request.max_tokens}")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidField("top_logprobs", request.top_logprobs, "needs logprobs=true")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    draft = _draft(request, limit if limit is not None else request.max_tokens, logprobs, "top_logprobs")
    draft.messages = plain_messages(request.messages)
    draft.prompt_field = "messages"
    draft.template_kwargs = request.chat_template_kwargs or {}
    return draft


def completion_draft(request: CompletionRequest) -> Draft:
    """The draft of a completion. Raises RankwayError naming what is wrong."""
    refuse_unsupported(request)
    draft = _draft(request, request.max_tokens, request.logprobs, "logprobs")
    prompt: Any = request.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise Unsupported("prompt", f"{len(prompt)} prompts in one request: send one request each")
        prompt = prompt[0]
    if isinstance(prompt, str):
        draft.text = prompt
    else:
        draft.tokens = prompt
    return draft


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the chat template takes them: content is one string, parts joined by line feeds (as vLLM does)."""
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: Message, where: str) -> dict[str, Any]:
    for name in _MESSAGE_EXTRAS:
        if getattr(message, name) not in (None, [], ""):
            raise Unsupported(f"{where}.{name}", "isn't supported")
    content = message.content
    if isinstance(content, list):
        for j, part in enumerate(content):
            if part.type != "text":
                raise Unsupported(f"{where}.content[{j}].type", f"{part.type[:40]!r} isn't supported, only 'text'")
            if part.text is None:
                raise InvalidField(f"{where}.content[{j}].text", None, "must be given")
        content = "\n".join(part.text or "" for part in content)
    plain = {"role": message.role, "content": content or ""}
    return plain | {"name": message.name} if message.name else plain


def _draft(request: _Sampled, max_tokens: int | None, logprobs: int | None, logprobs_field: str) -> Draft:
    try:
        sampling = _sampling(request, max_tokens, logprobs)
    except InvalidField as error:
        if error.field == "logprobs":
            raise InvalidField(logprobs_field, error.value, error.reason) from None
        raise
    place = request.rankway or Placement()
    return Draft(
        sampling=sampling,
        model=request.model or "",
        cache_salt=request.cache_salt or "",
        worker_id=place.worker_id or "",
        dp_rank=place.dp_rank,
        dp_group=place.dp_group or "",
        priority=request.priority or 0,
        session_id=place.session_id or "",
    )


_PLAIN_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "n",
    "ignore_eos", "min_tokens",
)  # fmt: skip


def _sampling(request: _Sampled, max_tokens: int | None, logprobs: int | None) -> Sampling:
    given: dict[str, Any] = {name: value for name in _PLAIN_SAMPLING if (value := getattr(request, name)) is not None}
    if request.stop is not None:
        given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.stop_token_ids:
        given["stop_token_ids"] = tuple(request.stop_token_ids)
    if request.logit_bias:
        given["logit_bias"] = request.logit_bias
    guided = _guided_json(request)
    return Sampling(max_tokens=max_tokens, seed=request.seed, logprobs=logprobs, guided_json=guided, **given).check()


def _guided_json(request: _Sampled) -> str:
    """The JSON schema that the output must satisfy, from `guided_json` or `response_format`; "": none."""
    schema = request.guided_json
    form = request.response_format
    if form is not None and form.type == "json_object":
        schema = {"type": "object"}
    elif form is not None and form.type == "json_schema":
        schema = (form.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise InvalidField("response_format.json_schema.schema", schema, "must be a JSON schema")
    elif form is not None and form.type != "text":
        raise Unsupported("response_format.type", f"{form.type[:40]!r} isn't supported")
    if schema is None:
        return ""
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
