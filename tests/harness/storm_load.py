"""A load on routers, over gRPC and HTTP, whose answers are known before: every whole stream is compared with them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
from harness.calls import generate, request
from harness.front_door import Answer as HttpAnswer
from harness.front_door import Client
from harness.load import reference
from harness.service_process import ServiceProcess

from rankway import rpc
from rankway.blocks import hash_chain, root_hash, unpack_hashes
from rankway.v1 import generate_pb2_grpc

CLIENTS = 8
FAMILIES = 6
PROMPTS = 24
MAX_PROMPT_TOKENS = 80
MAX_TOKENS = 40
CANCELLED_SHARE = 0.3
HTTP_SHARE = 0.5
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt and the longest answer that is ever asked for. A rank that served it holds some of `blocks`."""

    prompt: list[int]
    tokens: list[int]
    text: str
    blocks: list[int] = field(repr=False)
    """Block hashes of the prompt and the answer after it."""


@dataclass(slots=True)
class Tally:
    """What became of the requests."""

    whole: int = 0
    moved: int = 0
    """Of the whole ones over gRPC: those that went on at another target."""
    cancelled: int = 0
    excused: int = 0
    """Failed, and nobody could have helped it."""
    failures: list[str] = field(default_factory=list)


class Refused(Exception):
    """An HTTP answer that is an error."""


class _Life:
    """One life of a router, as its clients know it."""

    def __init__(self, router: ServiceProcess) -> None:
        self.name = router.name
        self.kills = router.kills
        self.channel = rpc.open_channel(router.addresses["grpc"])
        self._http = router.addresses["http"].rpartition(":")
        self._serving = False

    async def serves(self) -> bool:
        """Whether it has ever said that it is ready. What happens afterwards is its own affair, and no client's."""
        if not self._serving:
            try:
                self._serving = (await self.ask("GET", "/ready")).status == 200
            except (OSError, EOFError):
                return False
        return self._serving

    async def ask(self, method: str, path: str, body: bytes = b"") -> HttpAnswer:
        """A request on a connection of its own, and the whole answer.

        Raises:
            OSError, EOFError: there is none.
        """
        host, _, port = self._http
        client = Client(*await asyncio.open_connection(host, int(port)))
        try:
            await client.send_request(method, path, body)
            return await client.answer()
        finally:
            client.abort()


class StormLoad:
    """Clients of the routers. `learn` first, then `running`, as often as wanted, and `close`.

    Args:
        excused: whether a request may fail that was begun at this time (monotonic) and fails now. One whose router was killed
            meanwhile always may.
    """

    def __init__(self, routers: Sequence[ServiceProcess], seed: int, excused: Callable[[float], bool]) -> None:
        self.rng = random.Random(seed)
        self.known: list[Known] = []
        self._routers = routers
        self._excused = excused
        self._lives: dict[tuple[str, int], _Life] = {}

    async def learn(self, model: str, block_size: int) -> None:
        """Get the answers, in calm."""
        families = [[self.rng.randrange(256) for _ in range(MAX_PROMPT_TOKENS)] for _ in range(FAMILIES)]
        prompts = [
            [*self.rng.choice(families)[: self.rng.randrange(MAX_PROMPT_TOKENS)], self.rng.randrange(256)] for _ in range(PROMPTS)
        ]
        root = root_hash(model)
        for prompt, answer in zip(prompts, await reference(self._routers[0].addresses["grpc"], prompts, MAX_TOKENS), strict=True):
            assert len(answer.tokens) == len(answer.text) == MAX_TOKENS, "a token is a character"
            blocks = list(unpack_hashes(hash_chain(prompt + answer.tokens, block_size, root)))
            self.known.append(Known(prompt, answer.tokens, answer.text, blocks))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Tally]:
        """The load goes on until the block ends, and is over when this has."""
        tally = Tally()
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(self._client(tally, stopping))
            try:
                yield tally
            finally:
                stopping.set()

    async def close(self) -> None:
        for life in self._lives.values():
            await life.channel.close()

    async def _client(self, tally: Tally, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            ready = [router for router in self._routers if router.ready]
            if ready:
                router = self.rng.choice(ready)
                life = self._life(router)
                if await life.serves():
                    await self._request(router, life, tally)
            await asyncio.sleep(self.rng.uniform(0.0, 0.02))

    def _life(self, router: ServiceProcess) -> _Life:
        key = router.name, router.kills
        if key not in self._lives:
            self._lives[key] = _Life(router)
        return self._lives[key]

    async def _request(self, router: ServiceProcess, life: _Life, tally: Tally) -> None:
        known = self.rng.choice(self.known)
        ask = self._over_http if self.rng.random() < HTTP_SHARE else self._over_grpc
        call = asyncio.create_task(ask(life, known, self.rng.randint(1, MAX_TOKENS), tally))
        begun = time.monotonic()
        give_up_s = self.rng.uniform(0.0, 0.3) if self.rng.random() < CANCELLED_SHARE else None
        try:
            done, _ = await asyncio.wait((call,), timeout=give_up_s)
        finally:
            call.cancel()
        if not done:
            await asyncio.gather(call, return_exceptions=True)
            tally.cancelled += 1
            return
        try:
            call.result()
            tally.whole += 1
        except (grpc.aio.AioRpcError, OSError, EOFError, Refused, AssertionError) as error:
            wrong = isinstance(error, AssertionError)
            if not wrong and (router.kills > life.kills or self._excused(begun)):
                tally.excused += 1
            else:
                tally.failures.append(f"{ask.__name__} to {life.name}, after {time.monotonic() - begun:.2f} s: {error!r}")

    async def _over_grpc(self, life: _Life, known: Known, max_tokens: int, tally: Tally) -> None:
        stub = generate_pb2_grpc.GenerationStub(life.channel)
        answer = await generate(stub, request(known.prompt, max_tokens), TIMEOUT_S)
        assert (answer.text, answer.tokens) == (known.text[:max_tokens], known.tokens[:max_tokens])
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(known.prompt), max_tokens)
        assert answer.finished is not None
        tally.moved += answer.finished.migrations > 0

    async def _over_http(self, life: _Life, known: Known, max_tokens: int, tally: Tally) -> None:
        body = {
            "model": "sim",
            "prompt": known.prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = await life.ask("POST", "/v1/completions", json.dumps(body).encode())
        if answer.status != 200:
            raise Refused(f"{answer.status} {answer.body!r}")
        *chunks, done = answer.events
        assert done == "[DONE]"
        text, reasons, used = "", [], 0
        for chunk in map(json.loads, chunks):
            for choice in chunk["choices"]:
                text += choice["text"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            used = chunk["usage"]["completion_tokens"] if chunk.get("usage") else used
        assert (text, reasons, used) == (known.text[:max_tokens], ["length"], max_tokens)
