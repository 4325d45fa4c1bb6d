"""`Generation.Generate` at a worker: a client that streams from the engine's own worker, without a router between."""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rankway import prompts, sampling
from rankway.blocks import pack_tokens, unpack_tokens
from rankway.errors import InvalidField, NotFound, RankwayError
from rankway.h2.calls import Call
from rankway.tokenizer import Tokenizer
from rankway.v1 import generate_pb2, types_pb2
from rankway.worker.attach import FINISH_REASONS, logprobs_to_proto
from rankway.worker.engine import Finish, Logprob
from rankway.worker.requests import Order, Requests

MAX_ID_CHARS = 128
INLINE_CHARS = 4_096
"""Text up to this is tokenised on the event loop: a thread's hand-over costs more."""


@dataclass(slots=True)
class _Pending:
    """What a choice has brought since the client was last written to."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)
    finish: Finish | None = None


class GenerateCall:
    """The `Receiver` of one Generate. A slow client's deltas are merged: what waits is at most the request's own output."""

    def __init__(self, call: Call, tokenizer: Tokenizer, prompt_tokens: int) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self._pending: dict[int, _Pending] = {}
        self._error: RankwayError | None = None
        self._over = False
        self._reasons: dict[int, Finish] = {}
        self._completion_tokens = 0
        self._cached_tokens = 0
        call.on_room = self._write

    def delta(
        self,
        stream: int,
        index: int,
        tokens: Sequence[int],
        text: str,
        logprobs: Sequence[Logprob],
        finish: Finish | None,
        cached_tokens: int | None,
    ) -> None:
        pending = self._pending.setdefault(index, _Pending())
        pending.tokens.extend(tokens)
        pending.text += text
        pending.logprobs.extend(logprobs)
        pending.finish = finish
        self._completion_tokens += len(tokens)
        if cached_tokens is not None and index == 0:
            # The n choices share one prompt, and the later ones find what the first has computed: usage counts it once.
            self._cached_tokens = cached_tokens
        if finish is not None:
            self._reasons[index] = finish
        self._call.wake()

    def failed(self, stream: int, error: RankwayError) -> None:
        self._error = error
        self._call.wake()

    def ended(self, stream: int) -> None:
        self._over = True
        self._call.wake()

    def _write(self) -> None:
        """Send what there is, and the end after it."""
        pending, self._pending = self._pending, {}
        for index, part in sorted(pending.items()):
            self._send(delta=self._delta(index, part))
        if self._error is not None:
            self._call.finish(self._error)
        elif self._over:
            self._send(finished=self._finished())
            self._call.finish()

    def _send(self, **message: Any) -> None:
        self._call.send_message(generate_pb2.GenerateResponse(**message))

    def _delta(self, index: int, part: _Pending) -> generate_pb2.Delta:
        return generate_pb2.Delta(
            index=index,
            token_ids=types_pb2.TokenIds(packed=pack_tokens(part.tokens)),
            text=part.text,
            logprobs=logprobs_to_proto(part.logprobs, self._tokenizer),
            finish_reason=types_pb2.FINISH_REASON_UNSPECIFIED if part.finish is None else FINISH_REASONS[part.finish],
        )

    def _finished(self) -> generate_pb2.Finished:
        reasons = [FINISH_REASONS[reason] for _, reason in sorted(self._reasons.items())]
        return generate_pb2.Finished(
            reason=reasons[0],
            reasons=reasons,
            usage=types_pb2.Usage(
                prompt_tokens=self._prompt_tokens,
                completion_tokens=self._completion_tokens,
                cached_tokens=self._cached_tokens,
            ),
        )


async def order_from_request(
    request: generate_pb2.GenerateRequest, requests: Requests, worker_id: str, dp_group: str, timeout_s: float | None
) -> Order:
    """The order of a client's request.

    Raises:
        NotFound: another worker or DP group is meant. UnknownModel, InvalidField: see `Limits` and `sampling`.
    """
    if len(request.request_id) > MAX_ID_CHARS:
        raise InvalidField("request_id", request.request_id, f"at most {MAX_ID_CHARS} characters")
    if request.worker_id not in ("", worker_id):
        raise NotFound(f"worker_id={request.worker_id!r}: this is worker {worker_id}")
    if request.dp_group not in ("", dp_group):
        raise NotFound(f"dp_group={request.dp_group!r}: worker {worker_id} belongs to {dp_group}")
    lora = requests.limits.resolve_model(request.model)
    return Order(
        stream=0,
        request_id=request.request_id or uuid.uuid4().hex,
        sampling=sampling.from_proto(request.sampling),
        prompt=await _prompt(request, requests.tokenizer),
        dp_rank=request.dp_rank if request.HasField("dp_rank") else None,
        lora=lora,
        cache_salt=request.cache_salt,
        priority=request.priority,
        timeout_s=timeout_s,
        default_max_tokens=None if request.WhichOneof("prompt") == "chat" else 16,
    )


async def _prompt(request: generate_pb2.GenerateRequest, tokenizer: Tokenizer) -> array[int]:
    kind = request.WhichOneof("prompt")
    try:
        if kind == "token_ids":
            ids = prompts.token_ids(request.token_ids)
            return unpack_tokens(ids) if isinstance(ids, bytes) else array("I", ids)
        if kind == "text":
            return await _in_thread_if_long(len(request.text), tokenizer.encode, request.text)
        if kind == "chat":
            messages = prompts.chat_messages(request.chat)
            kwargs = prompts.template_kwargs(request.chat.template_kwargs_json)
            if not messages:
                raise InvalidField("chat", [], "has no messages")
            characters = sum(len(message["content"]) for message in messages)
            return await _in_thread_if_long(characters, tokenizer.encode_chat, messages, kwargs)
    except ValueError as error:
        raise InvalidField(kind or "prompt", "…", str(error)) from None
    raise InvalidField("prompt", None, "one of token_ids, text and chat must be given")


async def _in_thread_if_long(characters: int, encode: Any, *arguments: Any) -> array[int]:
    tokens: array[int] = encode(*arguments) if characters <= INLINE_CHARS else await asyncio.to_thread(encode, *arguments)
    return tokens
