"""A prompt as gRPC clients give it: one meaning at the router, at a worker and at the indexer. Pure."""

from __future__ import annotations

import json
from typing import Any

from rankway.errors import InvalidField
from rankway.v1 import types_pb2


def token_ids(message: types_pb2.TokenIds) -> list[int] | bytes:
    """The ids, or packed little-endian uint32; not checked further. Raises InvalidField: both are given."""
    if message.ids and message.packed:
        raise InvalidField("token_ids", f"{len(message.ids)} ids", "give ids or packed, not both")
    return message.packed or list(message.ids)


def chat_messages(chat: types_pb2.ChatMessages) -> list[dict[str, Any]]:
    """What a chat template takes."""
    return [_message(message) for message in chat.messages]


def template_kwargs(text: str) -> dict[str, Any]:
    """More arguments of the chat template. Raises InvalidField: not a JSON object."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField("template_kwargs_json", text, f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidField("template_kwargs_json", text, "must be a JSON object")
    return value


def _message(message: types_pb2.ChatMessage) -> dict[str, str]:
    fields = {"role": message.role, "content": message.content}
    return fields | {"name": message.name} if message.name else fields
