"""The OpenAI front door: what each path does.

    POST /v1/chat/completions, /v1/completions     generate; GET /v1/models, /v1/models/<name>
    POST /tokenize, /detokenize                    as vLLM has them
    GET  /health (alive), /ready (a worker serves, not draining), /metrics

Request headers: x-rankway-worker-id, x-rankway-dp-rank (global), x-rankway-session-id place the request, as the body's `rankway`
does; x-rankway-tenant, else the API key, else `user`, says whose fair share it uses; x-request-id names it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rankway import logs
from rankway.errors import InvalidField, NotFound, Overloaded, RankwayError
from rankway.router import openai_schema as schema
from rankway.router.http_error import error_answer, error_body
from rankway.router.http_exchange import Exchange, HttpLimits
from rankway.router.http_metrics import FrontDoorCollector
from rankway.router.http_server import HttpServer, Listening
from rankway.router.intake import Draft, Intake, ServedModel
from rankway.router.limits import RateLimit
from rankway.router.openai_form import ChatForm, CompletionForm, Form
from rankway.router.openai_sinks import BROKEN_OFF, CLIENT_LEFT, Answer, StreamedAnswer, WholeAnswer, request_id_header
from rankway.router.requests import Dispatcher, RouterRequest
from rankway.sampling import Sampling

log = logs.get("http")

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_DIGITS = re.compile(r"[0-9]{1,10}")


@dataclass(slots=True)
class FrontDoorStats:
    """Counts since the start."""

    active: int = 0
    """Generating requests now, those being tokenised included."""
    answers: Counter[str] = field(default_factory=Counter)
    """By HTTP status; "broken_off": an error after the first byte; "client_left": before the end."""

    def answered(self, status: int) -> None:
        """`openai_sinks.Observer`."""
        self.active -= 1
        self.answers[{BROKEN_OFF: "broken_off", CLIENT_LEFT: "client_left"}.get(status) or str(status)] += 1


@dataclass(frozen=True, slots=True)
class FrontDoorLimits:
    """What one front door takes on."""

    http: HttpLimits = field(default_factory=HttpLimits)
    max_requests: int = 4096
    """Generating requests at once; beyond, 429."""
    request_timeout_s: float = 600.0
    """After which nobody waits for an answer."""


class FrontDoor:
    """The OpenAI API over HTTP.

    Args:
        intake: checks and tokenises.
        dispatcher: takes checked requests.
        limits: sizes, times, counts.
        rate_limit: by tenant.
        registry: what /metrics shows; the front door's own series are added.
        not_ready: why requests can't be served now; "" when they can.
    """

    def __init__(
        self,
        intake: Intake,
        dispatcher: Dispatcher,
        limits: FrontDoorLimits,
        rate_limit: RateLimit,
        registry: CollectorRegistry,
        not_ready: Callable[[], str],
    ) -> None:
        self.stats = FrontDoorStats()
        self.server = HttpServer(self._handle, limits.http)
        self._intake = intake
        self._dispatcher = dispatcher
        self._limits = limits
        self._rate_limit = rate_limit
        self._registry = registry
        registry.register(FrontDoorCollector(self.server.state, self.stats, intake.threads.stats))
        self._not_ready = not_ready
        self._started_at = int(time.time())
        self._routes: dict[str, tuple[str, Callable[[Exchange], None]]] = {
            "/v1/chat/completions": ("POST", functools.partial(self._generate, schema.CHAT, schema.chat_draft, ChatForm)),
            "/v1/completions": (
                "POST",
                functools.partial(self._generate, schema.COMPLETION, schema.completion_draft, CompletionForm),
            ),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
        }

    async def start(self, listen: str, *, reuse_port: bool = False) -> Listening:
        """Serve on host:port. Raises OSError if the address can't be had."""
        return await self.server.start(listen, reuse_port=reuse_port)

    async def stop(self, grace_s: float) -> None:
        """/ready says no, nothing new is accepted, running answers end for up to `grace_s`, the rest is cut off."""
        await self.server.stop(grace_s)

    def _handle(self, exchange: Exchange) -> None:
        try:
            self._route(exchange)(exchange)
        except RankwayError as error:
            self._refuse(exchange, error)
        except Exception:
            log.exception("request failed", method=exchange.method, path=exchange.path)
            self._respond_error(exchange, 500, "internal error")

    def _route(self, exchange: Exchange) -> Callable[[Exchange], None]:
        path = exchange.path
        method, handler = self._routes.get(path, ("", None))
        if handler is None and path.startswith("/v1/models/"):
            method, handler = "GET", self._model
        if handler is None:
            return functools.partial(self._respond_error, status=404, message=f"no such path: {path[:100]}")
        if exchange.method != method and not (exchange.method == "HEAD" and method == "GET"):
            return functools.partial(
                self._respond_error, status=405, message=f"{path} takes {method}", headers=f"allow: {method}\r\n".encode()
            )
        return handler

    # Generating

    def _generate(
        self,
        body_schema: schema.Schema,
        to_draft: Callable[[Any], Draft],
        make_form: Callable[[str, str, int, int, bool], Form],
        exchange: Exchange,
    ) -> None:
        body = body_schema.decode(exchange.body)
        draft = to_draft(body)
        self._place(exchange, draft, body.user)
        now = asyncio.get_running_loop().time()
        self._rate_limit.take(draft.tenant, now)
        if self.stats.active >= self._limits.max_requests:
            raise Overloaded(f"{self.stats.active} requests are under way already")
        draft.deadline = now + self._limits.request_timeout_s
        request = self._intake.prepare_now(draft)
        self.stats.active += 1
        if request is not None:
            self._start(exchange, draft, request, body, make_form)
            return
        exchange.on_gone = functools.partial(self.stats.answered, CLIENT_LEFT)
        exchange.spawn(self._prepare_and_start(exchange, draft, body, make_form))

    async def _prepare_and_start(
        self, exchange: Exchange, draft: Draft, body: Any, make_form: Callable[[str, str, int, int, bool], Form]
    ) -> None:
        try:
            request = await self._intake.prepare(draft)
        except RankwayError as error:
            self.stats.active -= 1
            self._refuse(exchange, error)
        except Exception:
            self.stats.active -= 1
            log.exception("request failed", method=exchange.method, path=exchange.path)
            self._respond_error(exchange, 500, "internal error")
        else:
            self._start(exchange, draft, request, body, make_form)

    def _start(
        self,
        exchange: Exchange,
        draft: Draft,
        request: RouterRequest,
        body: Any,
        make_form: Callable[[str, str, int, int, bool], Form],
    ) -> None:
        n = request.sampling.n
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        shown_model = draft.model or request.model
        form = make_form(request.request_id, shown_model, int(time.time()), n, include_usage)
        answer: Answer
        if body.stream:
            answer = StreamedAnswer(
                exchange,
                form,
                request.request_id,
                self.stats,
                include_usage=include_usage,
                logprobs=request.sampling.logprobs is not None,
                n=n,
            )
        else:
            answer = WholeAnswer(exchange, form, request.request_id, self.stats, n)
        answer.start(self._dispatcher, request)

    def _place(self, exchange: Exchange, draft: Draft, user: str | None) -> None:
        """Take in what the headers say."""
        headers = exchange.headers
        request_id = exchange.header(b"x-request-id")
        if request_id and not _REQUEST_ID.fullmatch(request_id):
            raise InvalidField("x-request-id", request_id, "1 to 128 characters of A-Z, a-z, 0-9, _ . : -")
        draft.request_id = request_id
        draft.worker_id = _agreed(draft.worker_id, exchange.header(b"x-rankway-worker-id"), "worker_id")
        draft.session_id = _agreed(draft.session_id, exchange.header(b"x-rankway-session-id"), "session_id")
        if b"x-rankway-dp-rank" in headers:
            text = exchange.header(b"x-rankway-dp-rank").strip()
            rank: object = int(text) if _DIGITS.fullmatch(text) else text
            if draft.dp_rank is not None and draft.dp_rank != rank:
                raise InvalidField("x-rankway-dp-rank", text, f"contradicts the body's dp_rank={draft.dp_rank}")
            draft.dp_rank = rank
        draft.tenant = exchange.header(b"x-rankway-tenant") or _key_name(headers.get(b"authorization")) or user or ""

    # The rest

    def _models(self, exchange: Exchange) -> None:
        served = [self._model_object(model) for model in self._intake.catalog.served_models()]
        exchange.respond(200, msgspec.json.encode({"object": "list", "data": served}))

    def _model(self, exchange: Exchange) -> None:
        name = urllib.parse.unquote(exchange.path.removeprefix("/v1/models/"))
        served = self._intake.catalog.served_models()
        for model in served:
            if model.name == name:
                exchange.respond(200, msgspec.json.encode(self._model_object(model)))
                return
        raise NotFound(f"model={name[:100]!r}: no such model; there is: {', '.join(model.name for model in served) or 'none'}")

    def _model_object(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "rankway",
            "root": model.model,
            "parent": model.model if model.is_lora else None,
            "max_model_len": model.max_model_len,
        }

    def _tokenize(self, exchange: Exchange) -> None:
        body = schema.TOKENIZE.decode(exchange.body)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidField("prompt", None, "exactly one of prompt and messages must be given")
        draft = Draft(Sampling(), text=body.prompt, model=body.model or "")
        if body.messages is not None:
            draft.messages = schema.plain_messages(body.messages)
            draft.prompt_field = "messages"
            draft.template_kwargs = body.chat_template_kwargs or {}
        add_special_tokens = body.add_special_tokens is not False
        self._spawn(exchange, functools.partial(self._tokenize_slowly, exchange, draft, add_special_tokens))

    async def _tokenize_slowly(self, exchange: Exchange, draft: Draft, add_special_tokens: bool) -> None:
        tokens, card = await self._intake.tokenize(draft, add_special_tokens=add_special_tokens)
        answer = {"count": len(tokens), "max_model_len": card.max_model_len, "tokens": tokens.tolist()}
        exchange.respond(200, msgspec.json.encode(answer))

    def _detokenize(self, exchange: Exchange) -> None:
        body = schema.DETOKENIZE.decode(exchange.body)
        self._spawn(exchange, functools.partial(self._detokenize_slowly, exchange, body.model or "", body.tokens))

    async def _detokenize_slowly(self, exchange: Exchange, model: str, tokens: list[int]) -> None:
        exchange.respond(200, msgspec.json.encode({"prompt": await self._intake.detokenize(model, tokens)}))

    def _health(self, exchange: Exchange) -> None:
        exchange.respond(200, b'{"status":"ok"}')

    def _ready(self, exchange: Exchange) -> None:
        reason = "the router is stopping" if self.server.state.draining else self._not_ready()
        if reason:
            exchange.respond(503, msgspec.json.encode({"status": "not ready", "reason": reason}))
        else:
            exchange.respond(200, b'{"status":"ready"}')

    def _metrics(self, exchange: Exchange) -> None:
        self._spawn(exchange, functools.partial(self._metrics_slowly, exchange))

    async def _metrics_slowly(self, exchange: Exchange) -> None:
        # In a thread: a big fleet has tens of thousands of series.
        text = await asyncio.to_thread(generate_latest, self._registry)
        exchange.respond(200, text, content_type=CONTENT_TYPE_LATEST.encode())

    def _spawn(self, exchange: Exchange, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def guarded() -> None:
            try:
                await work()
            except RankwayError as error:
                self._refuse(exchange, error)
            except Exception:
                log.exception("request failed", method=exchange.method, path=exchange.path)
                self._respond_error(exchange, 500, "internal error")

        exchange.spawn(guarded())

    # Errors

    def _refuse(self, exchange: Exchange, error: RankwayError) -> None:
        status, body, headers = error_answer(error)
        self.stats.answers[str(status)] += 1
        request_id = exchange.header(b"x-request-id")
        if _REQUEST_ID.fullmatch(request_id):
            headers += request_id_header(request_id)
        exchange.respond(status, body, headers=headers)

    def _respond_error(self, exchange: Exchange, status: int, message: str, headers: bytes = b"") -> None:
        self.stats.answers[str(status)] += 1
        exchange.respond(status, msgspec.json.encode(error_body(status, message)), headers=headers)


def _agreed(in_body: str, in_header: str, name: str) -> str:
    if in_body and in_header and in_body != in_header:
        raise InvalidField(name, in_header, f"the header contradicts the body's {in_body[:80]!r}")
    return in_header or in_body


@functools.lru_cache(maxsize=4096)
def _key_name(authorization: bytes | None) -> str:
    """A tenant's name made from an API key, which must not show in logs or on the wire to others."""
    if not authorization:
        return ""
    return "key-" + hashlib.blake2b(authorization, digest_size=8).hexdigest()
