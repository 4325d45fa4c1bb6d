"""A steady load of streams on a cluster, and what became of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
from harness.calls import Answer, fresh_tokens, generate, request

from rankway import rpc
from rankway.v1 import generate_pb2_grpc


@dataclass(slots=True)
class Tally:
    """What became of the requests so far."""

    done: int = 0
    failures: list[str] = field(default_factory=list)

    async def more(self, count: int, timeout_s: float = 30.0) -> None:
        """Wait for `count` more requests to end well."""
        goal = self.done + count
        async with asyncio.timeout(timeout_s):
            while self.done < goal:
                assert not self.failures, self.failures[:3]
                await asyncio.sleep(0.01)


@asynccontextmanager
async def steady_load(endpoint: str, clients: int = 8, prompt_tokens: int = 48, max_tokens: int = 8) -> AsyncIterator[Tally]:
    """`clients` callers that send one request after the other, until the block ends."""
    tally = Tally()
    stopping = asyncio.Event()

    async def client(stub: generate_pb2_grpc.GenerationAsyncStub) -> None:
        while not stopping.is_set():
            try:
                answer = await generate(stub, request(fresh_tokens(prompt_tokens), max_tokens=max_tokens))
                assert answer.usage.completion_tokens == max_tokens
                tally.done += 1
            except (grpc.aio.AioRpcError, AssertionError) as error:
                tally.failures.append(repr(error))

    async with rpc.open_channel(endpoint) as channel, asyncio.TaskGroup() as callers:
        stub = generate_pb2_grpc.GenerationStub(channel)
        for _ in range(clients):
            callers.create_task(client(stub))
        try:
            yield tally
        finally:
            stopping.set()


async def reference(endpoint: str, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """What each prompt generates when nothing goes wrong."""
    async with rpc.open_channel(endpoint) as channel:
        stub = generate_pb2_grpc.GenerationStub(channel)
        return list(await asyncio.gather(*(generate(stub, request(p, max_tokens=max_tokens)) for p in prompts)))
