"""`Router` over gRPC: Route, Release and Explain."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from rankway import rpc
from rankway.errors import InvalidField, NotFound, RankwayError
from rankway.router import drafts
from rankway.router.dispatcher import RouterDispatcher
from rankway.router.eligibility import Query
from rankway.router.explain import Candidate, Explanation, Recent, explain, explain_past
from rankway.router.grpc_generation import deadline_of
from rankway.router.intake import MAX_NAME_CHARS, Intake
from rankway.router.policy import Policy, Prompt
from rankway.router.replica import Replica
from rankway.router.requests import Dispatch, RouterRequest
from rankway.router.reservations import Reservation
from rankway.router.route import RouteSink
from rankway.v1 import router_pb2, types_pb2

SERVICE_NAME = "rankway.v1.Router"


class RouterServicer:
    """The choice, for clients that stream from the worker themselves."""

    def __init__(
        self,
        intake: Intake,
        dispatcher: RouterDispatcher,
        policy: Policy,
        recent: Recent,
        replica: Replica,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._intake = intake
        self._dispatcher = dispatcher
        self._policy = policy
        self._recent = recent
        self._replica = replica
        self._clock = clock
        self._rng = rng

    @rpc.unary
    async def Route(self, request: router_pb2.RouteRequest, context: Any) -> router_pb2.RouteResponse:
        checked = await self._intake.prepare(drafts.from_proto(request.request, deadline_of(context, self._clock)))
        sink = _FutureRoute()
        route = self.reserve(request, checked, sink)
        try:
            answer = await sink.answer
        finally:
            route.cancel()
        if isinstance(answer, RankwayError):
            raise answer
        return self.response(request, checked, answer)

    def reserve(self, request: router_pb2.RouteRequest, checked: RouterRequest, sink: RouteSink) -> Dispatch:
        """Reserve for a checked request, as `RouterDispatcher.reserve`."""
        return self._dispatcher.reserve(checked, request.ttl_ms, sink)

    def response(
        self, request: router_pb2.RouteRequest, checked: RouterRequest, reservation: Reservation
    ) -> router_pb2.RouteResponse:
        """The answer to Route."""
        decision = reservation.decision
        given_as_tokens = request.request.WhichOneof("prompt") == "token_ids"
        return router_pb2.RouteResponse(
            reservation_id=reservation.reservation_id,
            request_id=reservation.request_id,
            worker_id=decision.place.target.worker_id,
            dp_rank=decision.place.target.dp_rank,
            endpoint=decision.endpoint,
            epoch=decision.place.epoch,
            overlap_blocks=decision.overlap_blocks,
            cost=decision.cost,
            prompt_tokens=decision.prompt_tokens,
            ttl_ms=reservation.ttl_ms,
            token_ids=None if given_as_tokens else types_pb2.TokenIds(packed=checked.prompt),
        )

    @rpc.unary
    async def Release(self, request: router_pb2.ReleaseRequest, context: Any) -> router_pb2.ReleaseResponse:
        return self.release(request)

    def release(self, request: router_pb2.ReleaseRequest) -> router_pb2.ReleaseResponse:
        """End a reservation. Raises InvalidField: none is named, or none has such a name."""
        if not request.reservation_id:
            raise InvalidField("reservation_id", "", "must be given")
        if len(request.reservation_id) > MAX_NAME_CHARS:
            raise InvalidField("reservation_id", request.reservation_id, f"at most {MAX_NAME_CHARS} characters")
        return router_pb2.ReleaseResponse(released=self._dispatcher.release_reservation(request.reservation_id))

    @rpc.unary
    async def Explain(self, request: router_pb2.ExplainRequest, context: Any) -> router_pb2.ExplainResponse:
        now = self._clock()
        subject = request.WhichOneof("subject")
        if subject == "request_id":
            past = self._recent.find(request.request_id)
            if past is None:
                raise NotFound(
                    f"request_id={request.request_id!r}: no such recent request (the last {len(self._recent)} are kept)"
                )
            return self._response(request.request_id, explain_past(self._policy, past, now, self._replica.age_s(now)))
        if subject is None:
            raise InvalidField("request", None, "give a request or the request_id of a recent one")
        checked = await self._intake.prepare(drafts.from_proto(request.request))
        query = Query(checked.model, checked.lora, checked.dp_group, checked.worker_id, checked.dp_rank)
        prompt = Prompt(checked.prompt, checked.cache_salt, self._dispatcher.preferred(checked.session_id, query, now))
        explanation = explain(self._policy, query, prompt, now, self._rng.getrandbits(64), self._replica.age_s(now))
        return self._response(checked.request_id, explanation)

    def _response(self, request_id: str, explanation: Explanation) -> router_pb2.ExplainResponse:
        weights = self._policy.settings.weights
        response = router_pb2.ExplainResponse(
            request_id=request_id,
            prompt_tokens=explanation.prompt_tokens,
            block_size=explanation.block_size,
            overlap_weight=weights.overlap_weight,
            temperature=weights.temperature,
            candidates=map(_candidate, explanation.candidates),
            remarks=explanation.remarks,
        )
        if explanation.chosen is not None:
            response.worker_id = explanation.chosen.target.worker_id
            response.dp_rank = explanation.chosen.target.dp_rank
        return response


class _FutureRoute(RouteSink):
    def __init__(self) -> None:
        self.answer: asyncio.Future[Reservation | RankwayError] = asyncio.get_running_loop().create_future()

    def reserved(self, reservation: Reservation) -> None:
        self._set(reservation)

    def failed(self, error: RankwayError) -> None:
        self._set(error)

    def _set(self, answer: Reservation | RankwayError) -> None:
        if not self.answer.done():  # cancelled, and its handler hasn't run since
            self.answer.set_result(answer)


def _candidate(candidate: Candidate) -> router_pb2.Candidate:
    term = candidate.term
    message = router_pb2.Candidate(
        worker_id=candidate.record.worker_id,
        dp_rank=candidate.dp_rank,
        eligible=not candidate.reason,
        reason=candidate.reason,
        cost=term.cost,
        overlap_blocks=term.overlap_blocks,
        prefill_blocks=term.prefill_blocks,
        queued_prefill_tokens=term.queued_prefill_tokens,
        decode_blocks=term.decode_blocks,
        recent=term.recent,
        tree_size=term.tree_size,
        index_known=candidate.known,
        total_blocks=candidate.record.total_kv_blocks,
    )
    if candidate.report is not None:
        message.running = candidate.report.running
        message.waiting = candidate.report.waiting
        message.used_blocks = candidate.report.used_blocks
    if candidate.report_age_s is not None:
        message.load_age_ms = max(0, int(candidate.report_age_s * 1000))
    return message
