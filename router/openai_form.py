"""What the two generating endpoints write: chat completions and completions, as stream events and as whole answers.

All that is the same for every event of a stream is made once: an event costs one string escape and one join.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec

from rankway.router.requests import Outcome
from rankway.router.sse import event, json_string, safe_lines
from rankway.v1 import types_pb2

REASONS = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}

_LOWEST_LOGPROB = -9999.0
"""JSON has no -infinity; OpenAI writes this."""


@dataclass(slots=True)
class Choice:
    """What has come of one choice of a whole answer."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED


class Form(Protocol):
    """How one endpoint writes one request's answer."""

    def opening(self) -> bytes:
        """Events before the first token; may be empty."""

    def text(self, index: int, text: str) -> bytes:
        """The event of new text."""

    def around_text(self) -> tuple[bytes, bytes]:
        """What `text` of choice 0 writes before and after the JSON string."""

    def text_with_logprobs(self, index: int, text: str, logprobs: Iterable[types_pb2.TokenLogprob]) -> bytes:
        """The event of new tokens, whose text may still be held back."""

    def end(self, index: int, reason: str) -> bytes:
        """The event that ends a choice."""

    def usage(self, outcome: Outcome) -> bytes:
        """The event of the usage, with no choices."""

    def whole(self, choices: Sequence[Choice], outcome: Outcome) -> bytes:
        """The answer to a request without streaming, as JSON."""


class _Base:
    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, request_id: str, model: str, created: int, n: int, include_usage: bool) -> None:
        """`model`: the name to show. `created`: seconds since 1970."""
        self.id = f"{self.prefix}-{request_id}"
        self.model = model
        self.created = created
        self.n = n
        self._chunk = self._fields(self.chunk_object) | ({"usage": None} if include_usage else {})
        head = safe_lines(msgspec.json.encode(self._fields(self.chunk_object)))[:-1]
        self._heads = [b'data: %b,"choices":[{"index":%d,' % (head, index) for index in range(n)]
        self._tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def usage(self, outcome: Outcome) -> bytes:
        return event(self._fields(self.chunk_object) | {"choices": [], "usage": usage_of(outcome)})

    def _fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _whole(self, choices: list[dict[str, Any]], outcome: Outcome) -> bytes:
        return msgspec.json.encode(self._fields(self.whole_object) | {"choices": choices, "usage": usage_of(outcome)})

    def _event(self, choice: dict[str, Any]) -> bytes:
        return event(self._chunk | {"choices": [choice]})


class ChatForm(_Base):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request_id: str, model: str, created: int, n: int, include_usage: bool) -> None:
        super().__init__(request_id, model, created, n, include_usage)
        self._before = [head + b'"delta":{"content":' for head in self._heads]
        self._after = b'},"logprobs":null,"finish_reason":null' + self._tail

    def opening(self) -> bytes:
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return b"".join(head + role + self._tail for head in self._heads)

    def text(self, index: int, text: str) -> bytes:
        return self._before[index] + json_string(text) + self._after

    def around_text(self) -> tuple[bytes, bytes]:
        return self._before[0], self._after

    def text_with_logprobs(self, index: int, text: str, logprobs: Iterable[types_pb2.TokenLogprob]) -> bytes:
        delta = {"content": text}
        return self._event({"index": index, "delta": delta, "logprobs": _chat_logprobs(logprobs), "finish_reason": None})

    def end(self, index: int, reason: str) -> bytes:
        return b'%b"delta":{},"logprobs":null,"finish_reason":"%b"%b' % (self._heads[index], reason.encode(), self._tail)

    def whole(self, choices: Sequence[Choice], outcome: Outcome) -> bytes:
        return self._whole(
            [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
                    "logprobs": _chat_logprobs(choice.logprobs) if choice.logprobs else None,
                    "finish_reason": REASONS.get(choice.reason),
                }
                for index, choice in enumerate(choices)
            ],
            outcome,
        )


class CompletionForm(_Base):
    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, request_id: str, model: str, created: int, n: int, include_usage: bool) -> None:
        super().__init__(request_id, model, created, n, include_usage)
        self._before = [head + b'"text":' for head in self._heads]
        self._after = b',"logprobs":null,"finish_reason":null' + self._tail
        self._offsets = [TextOffsets() for _ in range(n)]

    def opening(self) -> bytes:
        return b""

    def text(self, index: int, text: str) -> bytes:
        return self._before[index] + json_string(text) + self._after

    def around_text(self) -> tuple[bytes, bytes]:
        return self._before[0], self._after

    def text_with_logprobs(self, index: int, text: str, logprobs: Iterable[types_pb2.TokenLogprob]) -> bytes:
        found = _completion_logprobs(logprobs, self._offsets[index])
        return self._event({"index": index, "text": text, "logprobs": found, "finish_reason": None})

    def end(self, index: int, reason: str) -> bytes:
        return b'%b"text":"","logprobs":null,"finish_reason":"%b"%b' % (self._heads[index], reason.encode(), self._tail)

    def whole(self, choices: Sequence[Choice], outcome: Outcome) -> bytes:
        return self._whole(
            [
                {
                    "index": index,
                    "text": "".join(choice.texts),
                    "logprobs": _completion_logprobs(choice.logprobs, TextOffsets()) if choice.logprobs else None,
                    "finish_reason": REASONS.get(choice.reason),
                }
                for index, choice in enumerate(choices)
            ],
            outcome,
        )


class TextOffsets:
    """Where in a choice's text each token begins, in characters, when tokens may be parts of characters."""

    __slots__ = ("_chars", "_utf8")

    def __init__(self) -> None:
        self._chars = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token: bytes) -> int:
        """The offset of the next token."""
        at = self._chars
        self._chars += len(self._utf8.decode(token))
        return at


def usage_of(outcome: Outcome) -> dict[str, Any]:
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": outcome.cached_tokens},
    }


def token_text(token: bytes) -> str:
    """A token as text; one that is no UTF-8 by itself as OpenAI writes it: bytes:\\xe2\\x98."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _chat_logprobs(logprobs: Iterable[types_pb2.TokenLogprob]) -> dict[str, Any]:
    content = []
    for token in logprobs:
        entry = _chat_logprob(token)
        entry["top_logprobs"] = [_chat_logprob(top) for top in token.top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_logprob(token: types_pb2.TokenLogprob | types_pb2.TopLogprob) -> dict[str, Any]:
    return {
        "token": token_text(token.token),
        "logprob": max(token.logprob, _LOWEST_LOGPROB),
        "bytes": list(token.token),
    }


def _completion_logprobs(logprobs: Iterable[types_pb2.TokenLogprob], offsets: TextOffsets) -> dict[str, Any]:
    tokens = list(logprobs)
    return {
        "tokens": [token_text(token.token) for token in tokens],
        "token_logprobs": [max(token.logprob, _LOWEST_LOGPROB) for token in tokens],
        "top_logprobs": [
            {token_text(top.token): max(top.logprob, _LOWEST_LOGPROB) for top in token.top} if token.top else None
            for token in tokens
        ],
        "text_offset": [offsets.next(token.token) for token in tokens],
    }
