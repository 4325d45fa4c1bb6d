"""`Generation` at the router: a handler per stream, and a sink that joins what is there already and waits for nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rankway import rpc
from rankway.errors import Overloaded, RankwayError
from rankway.router import drafts
from rankway.router.intake import Intake
from rankway.router.requests import Dispatcher, Outcome, Routed, RouterRequest
from rankway.v1 import generate_pb2, types_pb2, worker_pb2

SERVICE_NAME = "rankway.v1.Generation"


class GenerationServicer:
    """Serves `Generate`.

    Args:
        max_requests: streams at once; beyond, RESOURCE_EXHAUSTED.
        clock: event loop time.
    """

    def __init__(self, intake: Intake, dispatcher: Dispatcher, max_requests: int, clock: Callable[[], float]) -> None:
        self.active = 0
        """Requests under way, on either server."""
        self.intake = intake
        self.dispatcher = dispatcher
        self.max_requests = max_requests
        self._clock = clock

    @rpc.unary
    async def Generate(self, request: generate_pb2.GenerateRequest, context: Any) -> None:
        if self.active >= self.max_requests:
            raise Overloaded(f"{self.active} requests are under way already")
        self.active += 1
        try:
            checked = await self.intake.prepare(drafts.from_proto(request, deadline_of(context, self._clock)))
            await self._stream(checked, context)
        finally:
            self.active -= 1

    async def _stream(self, request: RouterRequest, context: Any) -> None:
        sink = StreamSink(request)
        dispatch = self.dispatcher.dispatch(request, sink)
        write = context.write
        try:
            while True:
                for message in await sink.take():
                    await write(message)
                if sink.drained:
                    if sink.error is not None:
                        raise sink.error
                    return
        finally:
            dispatch.cancel()


class StreamSink:
    """`requests.Sink` of one stream. What comes while the handler is busy is joined: it is bounded by max_tokens."""

    __slots__ = ("_messages", "_opening", "_request", "_waiter", "error", "over")

    def __init__(self, request: RouterRequest) -> None:
        self.over = False
        """Nothing more is put; what `take` has not returned yet still counts."""
        self.error: RankwayError | None = None
        self._request = request
        self._messages: list[generate_pb2.GenerateResponse] = []
        self._opening: generate_pb2.GenerateResponse | None = None
        """The Routed, until a delta takes it along."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def drained(self) -> bool:
        """Over, and `take` has returned everything: more may have come while the handler wrote."""
        return self.over and not self._messages

    async def take(self) -> list[generate_pb2.GenerateResponse]:
        """All messages that are there, at least one unless it is over."""
        if not self._messages and not self.over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        messages, self._messages = self._messages, []
        return messages

    def routed(self, routed: Routed) -> None:
        self._opening = routed_message(self._request, routed)

    def plain_events(self) -> None:
        return None

    def delta(self, delta: worker_pb2.StepDelta) -> None:
        if self._opening is not None:
            self._put(self._opening)
            self._opening = None
        if self._messages:
            last = self._messages[-1].delta
            if last.index == delta.index and last.HasField("token_ids"):
                last.token_ids.packed += delta.tokens
                last.text += delta.text
                last.logprobs.extend(delta.logprobs)
                last.finish_reason = delta.finish_reason
                return
        self._put(delta_message(delta))

    def finished(self, outcome: Outcome) -> None:
        self.over = True
        self._put(finished_message(outcome))

    def failed(self, error: RankwayError) -> None:
        self.error = error
        self.over = True
        self._wake()

    def _put(self, message: generate_pb2.GenerateResponse) -> None:
        self._messages.append(message)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def routed_message(request: RouterRequest, routed: Routed) -> generate_pb2.GenerateResponse:
    """First message of a stream: where its first delta comes from."""
    return generate_pb2.GenerateResponse(
        routed=generate_pb2.Routed(
            request_id=request.request_id,
            worker_id=routed.target.worker_id,
            dp_rank=routed.target.dp_rank,
            overlap_blocks=routed.overlap_blocks,
            cost=routed.cost,
            prompt_tokens=request.prompt_tokens,
        )
    )


def delta_message(delta: worker_pb2.StepDelta) -> generate_pb2.GenerateResponse:
    """A worker's delta as clients get it."""
    return generate_pb2.GenerateResponse(
        delta=generate_pb2.Delta(
            index=delta.index,
            token_ids=types_pb2.TokenIds(packed=delta.tokens),
            text=delta.text,
            logprobs=delta.logprobs,
            finish_reason=delta.finish_reason,
        )
    )


def finished_message(outcome: Outcome) -> generate_pb2.GenerateResponse:
    """Last message of a stream that ended well."""
    return generate_pb2.GenerateResponse(
        finished=generate_pb2.Finished(
            reason=outcome.reasons[0],
            usage=types_pb2.Usage(
                prompt_tokens=outcome.prompt_tokens,
                completion_tokens=outcome.completion_tokens,
                cached_tokens=outcome.cached_tokens,
            ),
            reasons=outcome.reasons,
            migrations=outcome.migrations,
        )
    )


def deadline_of(context: Any, clock: Callable[[], float]) -> float | None:
    """Event loop time of the call's deadline, None if it has none."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else clock() + float(remaining_s)
