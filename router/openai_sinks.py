"""The client's side of a generating request: a stream of events, or a whole answer at its end."""

from __future__ import annotations

from typing import Any, Protocol

from rankway.errors import EngineFailed, RankwayError
from rankway.router.http_error import error_answer, error_of
from rankway.router.http_exchange import Exchange
from rankway.router.openai_form import REASONS, Choice, Form
from rankway.router.requests import Dispatch, Dispatcher, Outcome, Routed, RouterRequest
from rankway.router.sse import DONE, event
from rankway.router.steps import Events
from rankway.v1 import types_pb2, worker_pb2

_ABORT = types_pb2.FINISH_REASON_ABORT


class Observer(Protocol):
    """Who counts answers."""

    def answered(self, status: int) -> None:
        """The request is over: its HTTP status; 0 after the client has left, 1 when a stream broke off."""


BROKEN_OFF = 1
CLIENT_LEFT = 0


class _Answer:
    """What both kinds of answer share. `start` is called once, with the request."""

    __slots__ = ("_dispatch", "_exchange", "_form", "_observer", "_request_id", "_routed")

    def __init__(self, exchange: Exchange, form: Form, request_id: str, observer: Observer) -> None:
        self._exchange = exchange
        self._form = form
        self._request_id = request_id
        self._observer = observer
        self._dispatch: Dispatch | None = None
        self._routed: Routed | None = None

    def start(self, dispatcher: Dispatcher, request: RouterRequest) -> None:
        """Hand the request over; from here on the client's leaving cancels it."""
        self._exchange.on_gone = self._gone
        self._dispatch = dispatcher.dispatch(request, self)  # type: ignore[arg-type]  # the subclasses are whole sinks

    def failed(self, error: RankwayError) -> None:
        status, body, headers = error_answer(error)
        self._observer.answered(status)
        self._exchange.respond(status, body, headers=headers + request_id_header(self._request_id))

    def _gone(self) -> None:
        self._observer.answered(CLIENT_LEFT)
        if self._dispatch is not None:
            self._dispatch.cancel()

    def _headers(self) -> bytes:
        return _routed_headers(self._routed) + request_id_header(self._request_id)


class StreamedAnswer(_Answer):
    """Server-sent events, written as things happen.

    The head waits for the first delta: until then the request may move, or fail with a status of its own.
    """

    __slots__ = ("_head", "_include_usage", "_last", "_logprobs", "_opening", "_single")

    def __init__(
        self, exchange: Exchange, form: Form, request_id: str, observer: Observer, *, include_usage: bool, logprobs: bool, n: int
    ) -> None:
        super().__init__(exchange, form, request_id, observer)
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._single = n == 1
        self._head = self._opening = b""
        """What comes before the first delta's events: made while it is waited for."""
        self._last = b""
        """The events of an only choice's last delta, which leave together with the end."""

    def routed(self, routed: Routed) -> None:
        self._routed = routed
        headers = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n" + self._headers()
        self._head = self._exchange.stream_head(headers)
        self._opening = self._form.opening()

    def plain_events(self) -> Events | None:
        if self._logprobs:
            return None
        exchange = self._exchange
        head, opening = (b"", b"") if exchange.started else (self._head, self._opening)
        return Events(exchange.socket, exchange.chunked, head, opening, *self._form.around_text(), exchange.stream_opened)

    def delta(self, delta: worker_pb2.StepDelta) -> None:
        text = delta.text
        if self._logprobs and delta.logprobs:
            data = self._form.text_with_logprobs(delta.index, text, delta.logprobs)
        else:
            data = self._form.text(delta.index, text) if text else b""
        reason = delta.finish_reason
        if reason and self._single:
            self._last = data
            return
        if reason and reason != _ABORT:
            data += self._end(delta.index, reason)
        if not self._exchange.started:
            self._exchange.open_stream(self._head, self._opening + data)
        elif data:
            self._exchange.write(data)

    def finished(self, outcome: Outcome) -> None:
        if _ABORT in outcome.reasons:
            self.failed(EngineFailed("the engine aborted the request"))
            return
        self._observer.answered(200)
        last = self._last
        if self._single:
            last += self._end(0, outcome.reasons[0])
        last += self._form.usage(outcome) + DONE if self._include_usage else DONE
        if self._exchange.started:
            self._exchange.end_stream(last)
        else:
            self._exchange.whole_stream(self._head, self._opening + last)

    def failed(self, error: RankwayError) -> None:
        if not self._exchange.started:
            super().failed(error)
            return
        self._observer.answered(BROKEN_OFF)
        self._exchange.break_off(self._last + event(error_of(error)))

    def _end(self, index: int, reason: types_pb2.FinishReason.ValueType) -> bytes:
        return self._form.end(index, REASONS.get(reason, "stop"))


class WholeAnswer(_Answer):
    """One JSON object at the end."""

    __slots__ = ("_choices",)

    def __init__(self, exchange: Exchange, form: Form, request_id: str, observer: Observer, n: int) -> None:
        super().__init__(exchange, form, request_id, observer)
        self._choices = [Choice() for _ in range(n)]

    def routed(self, routed: Routed) -> None:
        self._routed = routed

    def plain_events(self) -> None:
        return None

    def delta(self, delta: worker_pb2.StepDelta) -> None:
        choice = self._choices[delta.index]
        choice.texts.append(delta.text)
        if delta.logprobs:
            choice.logprobs.extend(delta.logprobs)
        if delta.finish_reason:
            choice.reason = delta.finish_reason

    def finished(self, outcome: Outcome) -> None:
        if _ABORT in outcome.reasons:
            self.failed(EngineFailed("the engine aborted the request"))
            return
        self._observer.answered(200)
        self._exchange.respond(200, self._form.whole(self._choices, outcome), headers=self._headers())


Answer = StreamedAnswer | WholeAnswer


def request_id_header(request_id: str) -> bytes:
    return b"x-request-id: %b\r\n" % request_id.encode()


def _routed_headers(routed: Routed | None) -> bytes:
    if routed is None:
        return b""
    values: tuple[Any, ...] = (routed.target.worker_id.encode(), routed.target.dp_rank, routed.overlap_blocks)
    return b"x-rankway-worker-id: %b\r\nx-rankway-dp-rank: %d\r\nx-rankway-overlap-blocks: %d\r\n" % values
