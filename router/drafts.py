"""From a gRPC request to a `Draft`."""

from __future__ import annotations

import json
from typing import Any

from rankway import sampling
from rankway.errors import InvalidField
from rankway.router.intake import Draft
from rankway.v1 import generate_pb2, types_pb2


def from_proto(request: generate_pb2.GenerateRequest, deadline: float | None = None) -> Draft:
    """What a gRPC client asked for. `deadline`: event loop time.

    Raises:
        InvalidField: a sampling parameter out of its range, or a prompt that contradicts itself.
    """
    form = request.WhichOneof("prompt")
    draft = Draft(
        sampling=sampling.from_proto(request.sampling),
        prompt_field=form or "token_ids",
        model=request.model,
        request_id=request.request_id,
        cache_salt=request.cache_salt,
        worker_id=request.worker_id,
        dp_rank=request.dp_rank if request.HasField("dp_rank") else None,
        dp_group=request.dp_group,
        priority=request.priority,
        session_id=request.session_id,
        tenant=request.tenant,
        deadline=deadline,
        reservation_id=request.reservation_id,
    )
    if form == "token_ids":
        draft.tokens = _token_ids(request.token_ids)
    elif form == "text":
        draft.text = request.text
    elif form == "chat":
        draft.messages = [_message(message) for message in request.chat.messages]
        draft.template_kwargs = _template_kwargs(request.chat.template_kwargs_json)
    return draft


def _token_ids(message: types_pb2.TokenIds) -> list[int] | bytes:
    if message.ids and message.packed:
        raise InvalidField("token_ids", f"{len(message.ids)} ids", "give ids or packed, not both")
    return message.packed or list(message.ids)


def _message(message: types_pb2.ChatMessage) -> dict[str, Any]:
    fields = {"role": message.role, "content": message.content}
    return fields | {"name": message.name} if message.name else fields


def _template_kwargs(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField("template_kwargs_json", text, f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidField("template_kwargs_json", text, "must be a JSON object")
    return value
