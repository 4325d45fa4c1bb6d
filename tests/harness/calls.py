"""Requests as a client makes them, over gRPC and HTTP, and their whole answers."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rankway.v1 import generate_pb2, generate_pb2_grpc, types_pb2

_fresh = itertools.count(1)


def fresh_tokens(count: int) -> list[int]:
    """Byte tokens of a prompt that nobody has sent before: its first block is unique in this process."""
    start = list(f"{next(_fresh):016d}".encode())
    return (start + [ord("a") + i % 26 for i in range(count)])[:count]


@dataclass(slots=True)
class Answer:
    """All that one Generate call gave."""

    routed: generate_pb2.Routed = field(default_factory=generate_pb2.Routed)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finished: generate_pb2.Finished | None = None

    @property
    def usage(self) -> types_pb2.Usage:
        assert self.finished is not None
        return self.finished.usage

    @property
    def where(self) -> tuple[str, int]:
        return self.routed.worker_id, self.routed.dp_rank


def request(tokens: Sequence[int] | str, max_tokens: int = 4, **fields: Any) -> generate_pb2.GenerateRequest:
    """A greedy request for token ids or a text."""
    prompt = {"text": tokens} if isinstance(tokens, str) else {"token_ids": types_pb2.TokenIds(ids=tokens)}
    sampling = types_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return generate_pb2.GenerateRequest(**{"sampling": sampling} | prompt | fields)


async def generate(
    stub: generate_pb2_grpc.GenerationAsyncStub,
    request: generate_pb2.GenerateRequest,
    timeout_s: float = 30,
    answer: Answer | None = None,
) -> Answer:
    """Send a request and read its stream to the end; checks the order of its messages. `answer` is filled as it comes."""
    answer = answer or Answer()
    seen: list[str] = []
    async for response in stub.Generate(request, timeout=timeout_s):
        kind = str(response.WhichOneof("event"))
        seen.append(kind)
        if kind == "routed":
            answer.routed = response.routed
        elif kind == "delta":
            answer.text += response.delta.text
            ids = response.delta.token_ids
            answer.tokens += ids.ids or memoryview(ids.packed).cast("I").tolist()
        else:
            answer.finished = response.finished
    assert seen[0] == "routed", seen
    assert seen[-1] == "finished", seen
    assert set(seen[1:-1]) <= {"delta"}, seen
    return answer


@dataclass(slots=True)
class HttpAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def http(url: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = 30) -> HttpAnswer:
    """GET, or POST when there is a body (bytes as they are, anything else as JSON). Blocks; an HTTP error is an answer."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    call = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(call, timeout=timeout_s) as response:
            return HttpAnswer(response.status, {k.lower(): v for k, v in response.headers.items()}, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return HttpAnswer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())
