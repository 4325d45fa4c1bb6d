"""What the router's front doors (gRPC, HTTP) hand to its dispatcher, and what comes back.

Everything happens on one event loop. A request has no task of its own: its sink is called as things happen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rankway.errors import RankwayError
from rankway.ranks import Target
from rankway.router.steps import Events
from rankway.sampling import Sampling
from rankway.v1 import types_pb2, worker_pb2


@dataclass(slots=True)
class RouterRequest:
    """A checked request. `intake.Intake` makes them: model resolved, prompt tokenised, every field in its range."""

    request_id: str
    model: str
    """Canonical name: the one that enters the block hashes."""
    prompt: bytes
    """Token ids, packed little-endian uint32."""
    sampling: Sampling
    """With max_tokens set."""
    lora: str = ""
    cache_salt: str = ""
    worker_id: str = ""
    """Pin to a worker; empty: any."""
    dp_rank: int | None = None
    """Pin to a global rank; None: any."""
    dp_group: str = ""
    priority: int = 0
    """Lower runs first."""
    session_id: str = ""
    tenant: str = ""
    deadline: float | None = None
    """Event loop time after which nobody waits for the answer."""
    reservation_id: str = ""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4


@dataclass(frozen=True, slots=True)
class Routed:
    """Where a request went."""

    target: Target
    overlap_blocks: int
    cost: float


@dataclass(slots=True)
class Outcome:
    """How a request ended well."""

    reasons: list[types_pb2.FinishReason.ValueType]
    """One for each of the n choices."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    migrations: int = 0


class Sink(Protocol):
    """A client's side of a request. Calls come in this order: routed, delta …, then finished or failed, once.

    Methods must not raise and must not block. After `Dispatch.cancel` none is called.
    """

    def routed(self, routed: Routed) -> None:
        """The target, and each further one until a first delta has come; a later migration isn't told."""

    def delta(self, delta: worker_pb2.StepDelta) -> None:
        """New tokens and text of one choice, the worker's message as it came. `stream` and `error` mean nothing here."""

    def plain_events(self) -> Events | None:
        """How text of the only choice becomes events at the client, without `delta` being called; None: not at all. Asked for
        after `routed`, and again when the request moves.
        """

    def finished(self, outcome: Outcome) -> None: ...

    def failed(self, error: RankwayError) -> None:
        """Nothing more comes. Deltas may have come before: the client must see that the end is not a normal one."""


class Dispatch(Protocol):
    """A request under way."""

    def cancel(self) -> None:
        """The client is gone: abort at the engine, release every booking. Idempotent, and harmless after the end."""


class Dispatcher(Protocol):
    def dispatch(self, request: RouterRequest, sink: Sink) -> Dispatch:
        """Start a request; returns at once. Waiting for capacity, retries and migrations happen behind it."""
