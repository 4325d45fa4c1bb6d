"""From a gRPC request to a `Draft`."""

from __future__ import annotations

from rankway import prompts, sampling
from rankway.router.intake import Draft
from rankway.v1 import generate_pb2


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
        draft.tokens = prompts.token_ids(request.token_ids)
    elif form == "text":
        draft.text = request.text
    elif form == "chat":
        draft.messages = prompts.chat_messages(request.chat)
        draft.template_kwargs = prompts.template_kwargs(request.chat.template_kwargs_json)
    return draft
