"""Generate, Route and Release on `h2.server`: the grpcio servicers' answers, with nothing between dispatcher and transport."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from rankway.errors import Overloaded, RankwayError
from rankway.h2 import messages
from rankway.h2.calls import Call, Method
from rankway.router import drafts
from rankway.router.grpc_generation import GenerationServicer, delta_message, finished_message, routed_message
from rankway.router.grpc_router import RouterServicer
from rankway.router.requests import Outcome, Routed, RouterRequest
from rankway.router.reservations import Reservation
from rankway.router.route import RouteSink
from rankway.v1 import generate_pb2, router_pb2, worker_pb2


def methods(generation: GenerationServicer, routing: RouterServicer) -> Mapping[str, Method]:
    """The methods that the router answers itself, by path."""
    direct = _Direct(generation, routing)
    return {
        "/rankway.v1.Generation/Generate": direct.generate,
        "/rankway.v1.Router/Route": direct.route,
        "/rankway.v1.Router/Release": direct.release,
    }


class _Direct:
    def __init__(self, generation: GenerationServicer, routing: RouterServicer) -> None:
        self._generation = generation
        self._routing = routing

    def generate(self, call: Call, payload: bytes) -> None:
        generation = self._generation
        request = messages.parsed(generate_pb2.GenerateRequest, payload)
        if generation.active >= generation.max_requests:
            raise Overloaded(f"{generation.active} requests are under way already")
        draft = drafts.from_proto(request, call.deadline)
        checked = generation.intake.prepare_now(draft)
        if checked is not None:
            self._start(call, checked)
        else:
            call.spawn(self._prepare_and_start(call, draft))

    async def _prepare_and_start(self, call: Call, draft: Any) -> None:
        checked = await self._generation.intake.prepare(draft)
        if not call.over:
            self._start(call, checked)

    def _start(self, call: Call, request: RouterRequest) -> None:
        sink = DirectSink(call, request, self._generation)
        call.on_gone = sink.gone
        sink.cancel = self._generation.dispatcher.dispatch(request, sink).cancel

    def route(self, call: Call, payload: bytes) -> None:
        request = messages.parsed(router_pb2.RouteRequest, payload)
        draft = drafts.from_proto(request.request, call.deadline)
        checked = self._generation.intake.prepare_now(draft)
        if checked is not None:
            self._reserve(call, request, checked)
        else:
            call.spawn(self._prepare_and_reserve(call, request, draft))

    async def _prepare_and_reserve(self, call: Call, request: router_pb2.RouteRequest, draft: Any) -> None:
        checked = await self._generation.intake.prepare(draft)
        if not call.over:
            self._reserve(call, request, checked)

    def _reserve(self, call: Call, request: router_pb2.RouteRequest, checked: RouterRequest) -> None:
        sink = DirectRoute(call, functools.partial(self._routing.response, request, checked))
        call.on_gone = self._routing.reserve(request, checked, sink).cancel

    def release(self, call: Call, payload: bytes) -> None:
        _answer(call, self._routing.release(messages.parsed(router_pb2.ReleaseRequest, payload)))


class DirectSink:
    """`requests.Sink` that writes to the call. What a slow client leaves unread waits in the stream's bounded buffer."""

    __slots__ = ("_call", "_generation", "_opening", "_request", "cancel")

    def __init__(self, call: Call, request: RouterRequest, generation: GenerationServicer) -> None:
        self.cancel: Callable[[], None] = _nothing
        self._call = call
        self._opening = b""
        """The framed Routed, until a delta takes it along."""
        self._request = request
        self._generation = generation
        generation.active += 1

    def routed(self, routed: Routed) -> None:
        self._opening = messages.framed(routed_message(self._request, routed).SerializeToString())

    def plain_events(self) -> None:
        return None

    def delta(self, delta: worker_pb2.StepDelta) -> None:
        if self._opening:
            opening, self._opening = self._opening, b""
            self._call.send(opening)
        tokens, text = delta.tokens, delta.text.encode()
        if is_short(delta, tokens, text):
            self._call.send(short_delta(tokens, text))
        else:
            self._call.send_message(delta_message(delta))

    def finished(self, outcome: Outcome) -> None:
        self._leave()
        self._call.send_message(finished_message(outcome))
        self._call.finish()

    def failed(self, error: RankwayError) -> None:
        self._leave()
        self._call.finish(error)

    def gone(self) -> None:
        """The client has left."""
        self._leave()
        self.cancel()

    def _leave(self) -> None:
        # A client that doesn't read may be given up by the very message that ends the stream.
        self._call.on_gone = None
        self._generation.active -= 1


class DirectRoute(RouteSink):
    """Answers the call."""

    def __init__(self, call: Call, response: Callable[[Reservation], router_pb2.RouteResponse]) -> None:
        self._call = call
        self._response = response

    def reserved(self, reservation: Reservation) -> None:
        _answer(self._call, self._response(reservation))

    def failed(self, error: RankwayError) -> None:
        self._call.finish(error)


def short_delta(tokens: bytes, text: bytes) -> bytes:
    """A framed GenerateResponse with a Delta of choice 0 that has nothing but these; both shorter than 100 bytes together."""
    size, chars = len(tokens), len(text)
    ids = b"\x12%c\x12%c%b" % (size + 2, size, tokens)
    body = b"%b\x1a%c%b" % (ids, chars, text) if chars else ids
    return b"\x00\x00\x00\x00%c\x12%c%b" % (len(body) + 2, len(body), body)


def is_short(delta: worker_pb2.StepDelta, tokens: bytes, text: bytes) -> bool:
    """Whether `short_delta` can carry it."""
    return len(tokens) + len(text) < 100 and not delta.index and not delta.finish_reason and not delta.logprobs


def _nothing() -> None:
    pass


def _answer(call: Call, message: Message) -> None:
    call.send_message(message)
    call.finish()
