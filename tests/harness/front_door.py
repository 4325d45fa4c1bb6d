"""The OpenAI front door on a real socket with a fleet and a dispatcher that tests script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from rankway.errors import NotFound, RankOutOfRange, RankwayError, Unavailable, UnknownModel
from rankway.ranks import DpRange, GlobalRank, Target
from rankway.router.http_exchange import HttpLimits
from rankway.router.intake import Intake, ModelCard, ServedModel
from rankway.router.limits import RateLimit
from rankway.router.openai_api import FrontDoor, FrontDoorLimits
from rankway.router.requests import Outcome, Routed, RouterRequest, Sink
from rankway.router.tokenizers import EncodingThreads, Tokenizers
from rankway.tokenizer import Tokenizer
from rankway.v1 import types_pb2, worker_pb2

STOP = types_pb2.FINISH_REASON_STOP
LENGTH = types_pb2.FINISH_REASON_LENGTH
ABORT = types_pb2.FINISH_REASON_ABORT


class FakeFleet:
    """Model "tiny" (alias "small", adapter "tiny-lora") on workers w1 (ranks 0-3) and w2 (4-7)."""

    def __init__(self, tokenizer: str = "bytes", vocab_size: int = 512, max_model_len: int = 4096) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.windows = {"w1": DpRange(0, 4), "w2": DpRange(4, 4)}

    def resolve(self, model: str, dp_group: str) -> ModelCard:
        if not self.windows:
            raise Unavailable("there are no workers")
        if dp_group not in ("", "default"):
            raise NotFound(f"dp_group={dp_group!r}: no such DP group")
        if model not in ("", "tiny", "small", "tiny-lora"):
            raise UnknownModel(model, ["tiny", "small", "tiny-lora"])
        lora = model if model == "tiny-lora" else ""
        return ModelCard("tiny", lora, self.max_model_len, self.vocab_size, self.tokenizer)

    def check_pin(self, card: ModelCard, dp_group: str, worker_id: str, dp_rank: int | None) -> None:
        if worker_id and worker_id not in self.windows:
            raise NotFound(f"worker_id={worker_id!r}: no such worker")
        if dp_rank is None:
            return
        if worker_id:
            self.windows[worker_id].to_local(dp_rank, f"worker {worker_id}")
        elif not any(dp_rank in window for window in self.windows.values()):
            raise RankOutOfRange(dp_rank, "DP group default", "[0, 8)")

    def served_models(self) -> Sequence[ServedModel]:
        size = self.max_model_len
        return [
            ServedModel("tiny", "tiny", size),
            ServedModel("small", "tiny", size),
            ServedModel("tiny-lora", "tiny", size, is_lora=True),
        ]


class Running:
    """One dispatched request: the test says what happens to it."""

    def __init__(self, request: RouterRequest, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled.set()

    def route(self, worker_id: str = "w1", dp_rank: int = 0, overlap_blocks: int = 0) -> Running:
        target = Target(worker_id, GlobalRank(dp_rank))
        self.sink.routed(Routed(target, overlap_blocks, 1.0))
        return self

    def say(self, text: str, index: int = 0, logprobs: Sequence[types_pb2.TokenLogprob] = ()) -> Running:
        self.sink.delta(worker_pb2.StepDelta(index=index, text=text, tokens=b"\0\0\0\0", logprobs=logprobs))
        return self

    def say_all(self, text: str) -> None:
        """The only delta, and the outcome."""
        self.sink.delta(worker_pb2.StepDelta(text=text, tokens=b"\0\0\0\0", finish_reason=STOP))
        self.sink.finished(Outcome([STOP], self.request.prompt_tokens, 1, 0))

    def end(self, *reasons: types_pb2.FinishReason.ValueType, completion_tokens: int = 3, cached_tokens: int = 0) -> None:
        """Each choice's last delta, then the outcome."""
        for index, reason in enumerate(reasons or (STOP,)):
            self.sink.delta(worker_pb2.StepDelta(index=index, finish_reason=reason))
        self.sink.finished(Outcome(list(reasons or (STOP,)), self.request.prompt_tokens, completion_tokens, cached_tokens))

    def fail(self, error: RankwayError) -> None:
        self.sink.failed(error)


def echo(running: Running) -> None:
    """Answers `Hello` in two deltas in each choice."""
    running.route()
    n = running.request.sampling.n
    for index in range(n):
        running.say("Hel", index).say("lo", index)
    running.end(*[STOP] * n)


@dataclass
class FakeDispatcher:
    """Hands each request to `script`, or to whoever waits in `next`."""

    script: Callable[[Running], None] | None = None
    seen: list[Running] = field(default_factory=list)
    _arrived: asyncio.Queue[Running] = field(default_factory=asyncio.Queue)

    def dispatch(self, request: RouterRequest, sink: Sink) -> Running:
        running = Running(request, sink)
        self.seen.append(running)
        if self.script is not None:
            asyncio.get_running_loop().call_soon(self.script, running)
        else:
            self._arrived.put_nowait(running)
        return running

    async def next(self) -> Running:
        return await asyncio.wait_for(self._arrived.get(), 10)


@dataclass
class House:
    """A front door and what is behind it."""

    door: FrontDoor
    fleet: FakeFleet
    dispatcher: FakeDispatcher
    intake: Intake
    address: str
    host: str
    port: int
    clients: list[Client] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """A POST on a connection of its own; `body` as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, data, headers)

    async def get(self, path: str) -> Answer:
        return await self.request("GET", path)

    async def request(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
        client = await self.connect()
        await client.send_request(method, path, body, headers)
        try:
            return await client.answer(head_only=method == "HEAD")
        finally:
            client.close()

    async def connect(self) -> Client:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=2**26)
        client = Client(reader, writer)
        self.clients.append(client)
        return client

    async def close(self) -> None:
        """Close every client's connection."""
        for client in self.clients:
            client.abort()
        await asyncio.gather(*(client.writer.wait_closed() for client in self.clients), return_exceptions=True)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, checked to be one."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[str]:
        """The data of a stream's events, checked to be framed as such."""
        text = self.body.decode()
        assert text.endswith("\n\n")
        events = text[:-2].split("\n\n")
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        return [event.removeprefix("data: ") for event in events]


class Client:
    """A raw HTTP/1.1 client over one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_request(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        lines = [f"{method} {path} HTTP/1.1", "host: test", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        await self.send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        status, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return int(status.split(" ")[1]), headers

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; b"" at its regular end. IncompleteReadError where it broke off."""
        size = int((await asyncio.wait_for(self.reader.readuntil(b"\r\n"), 10)).strip(), 16)
        data = await asyncio.wait_for(self.reader.readexactly(size + 2), 10)
        return data[:-2]

    async def answer(self, *, head_only: bool = False) -> Answer:
        """A whole answer, its framing checked."""
        status, headers = await self.head()
        body = b""
        if head_only:
            pass
        elif headers.get("transfer-encoding") == "chunked":
            while chunk := await self.chunk():
                body += chunk
        elif "content-length" in headers:
            body = await asyncio.wait_for(self.reader.readexactly(int(headers["content-length"])), 10)
        else:
            body = await asyncio.wait_for(self.reader.read(), 10)
        return Answer(status, headers, body)

    async def broken_stream(self) -> bytes:
        """The body of a stream that breaks off without its regular end."""
        body = b""
        try:
            while chunk := await self.chunk():
                body += chunk
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return body
        raise AssertionError("the stream ended regularly")

    async def answer_of_open_stream(self) -> list[str]:
        """The data of the events up to the regular end of a stream whose head has been read."""
        body = b""
        while chunk := await self.chunk():
            body += chunk
        return Answer(200, {}, body).events

    async def closed(self) -> bytes:
        """What still comes until the server closes."""
        return await asyncio.wait_for(self.reader.read(), 10)


@asynccontextmanager
async def open_house(
    *,
    script: Callable[[Running], None] | None = None,
    tokenizer: Tokenizer | None = None,
    http: HttpLimits | None = None,
    max_requests: int = 100,
    rate_limit: RateLimit | None = None,
    max_model_len: int = 4096,
    fetch: Callable[[str], Any] | None = None,
) -> AsyncIterator[House]:
    """A served front door. With a `tokenizer` the fleet's model has it, else the byte-level one."""

    async def no_fetch(fingerprint: str) -> Mapping[str, bytes]:
        raise Unavailable(f"nobody has {fingerprint}")

    tokenizers = Tokenizers(fetch or no_fetch)
    fleet = FakeFleet(max_model_len=max_model_len)
    if tokenizer is not None:
        tokenizers.add(tokenizer)
        fleet.tokenizer, fleet.vocab_size = tokenizer.fingerprint, tokenizer.vocab_size
    intake = Intake(fleet, tokenizers, EncodingThreads(2, 64, 2**26))
    dispatcher = FakeDispatcher(script)
    limits = FrontDoorLimits(http=http or HttpLimits(), max_requests=max_requests)
    door = FrontDoor(
        intake,
        dispatcher,
        limits,
        RateLimit(0, 1) if rate_limit is None else rate_limit,
        CollectorRegistry(),
        lambda: "" if fleet.windows else "no worker",
    )
    listening = await door.start("127.0.0.1:0")
    house = House(door, fleet, dispatcher, intake, str(listening), listening.host, listening.port)
    try:
        yield house
    finally:
        await house.close()
        await door.stop(0)
        await intake.close()
