"""A router in the test's process, and a sink that remembers what it was told."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Sequence
from typing import Any

from harness.fake_worker import FakeWorker
from harness.waiting import eventually

from rankway.blocks import pack_tokens, unpack_tokens
from rankway.errors import RankwayError
from rankway.registry.records import Gone, Put
from rankway.router import service
from rankway.router.grpc_endpoint import GrpcEndpoint
from rankway.router.request import Flight
from rankway.router.requests import Outcome, Routed, RouterRequest
from rankway.router.reservations import Reservation
from rankway.router.route import Route, RouteSink
from rankway.router.settings import RouterSettings
from rankway.sampling import Sampling
from rankway.v1 import worker_pb2

_ids = itertools.count()


class RecordingSink:
    """`requests.Sink` that keeps everything."""

    def __init__(self) -> None:
        self.target: Routed | None = None
        self.tokens: array[int] = array("I")
        self.text = ""
        self.outcome: Outcome | None = None
        self.error: RankwayError | None = None
        self.over = asyncio.Event()
        self.first = asyncio.Event()
        self.calls_after_end = 0

    def routed(self, routed: Routed) -> None:
        # Another target may follow until a delta has come.
        assert not self.tokens
        self.target = routed

    def plain_events(self) -> None:
        return None

    def delta(self, delta: worker_pb2.StepDelta) -> None:
        self.calls_after_end += self.over.is_set()
        self.tokens += unpack_tokens(delta.tokens)
        self.text += delta.text
        self.first.set()

    def finished(self, outcome: Outcome) -> None:
        self.calls_after_end += self.over.is_set()
        self.outcome = outcome
        self.over.set()

    def failed(self, error: RankwayError) -> None:
        self.calls_after_end += self.over.is_set()
        self.error = error
        self.over.set()

    async def end(self) -> RecordingSink:
        """Wait for the end."""
        await asyncio.wait_for(self.over.wait(), 5)
        return self


class RecordingRoute(RouteSink):
    """`route.RouteSink` that keeps its answer."""

    def __init__(self) -> None:
        self.reservation: Reservation | None = None
        self.error: RankwayError | None = None
        self.over = asyncio.Event()

    def reserved(self, reservation: Reservation) -> None:
        assert not self.over.is_set()
        self.reservation = reservation
        self.over.set()

    def failed(self, error: RankwayError) -> None:
        assert not self.over.is_set()
        self.error = error
        self.over.set()

    async def end(self) -> RecordingRoute:
        """Wait for the answer."""
        await asyncio.wait_for(self.over.wait(), 5)
        return self


class TestRouter:
    """A router whose members the test announces. What time does happens every 20 ms."""

    __test__ = False

    def __init__(self, **settings: Any) -> None:
        given = {"share_bookings": False, "router_id": "r1", "recent_weight": 0.0}
        self.settings = RouterSettings(**(given | settings))
        self.parts = service.build(self.settings, self.settings.router_id)
        self._tasks = [asyncio.create_task(self._sweep())]
        if self.parts.sharing is not None:
            self._tasks.append(asyncio.create_task(self.parts.sharing.run()))
        self._server: GrpcEndpoint | None = None

    async def join(self, worker: FakeWorker) -> None:
        """Attach to a worker, which is started unless it serves already."""
        record = worker.record if worker.serving else await worker.serve()
        self.parts.members.apply(Put(record))
        await eventually(lambda: self.parts.eligibility.is_connected(record.instance))

    def leave(self, worker: FakeWorker) -> None:
        """The registry says that the worker is gone."""
        self.parts.members.apply(Gone(worker.record.instance))

    def send(self, prompt: Sequence[int] | int = 40, **fields: Any) -> tuple[Flight, RecordingSink]:
        """Dispatch a request for these tokens, or for so many."""
        sink = RecordingSink()
        return self.parts.dispatcher.dispatch(a_request(prompt, **fields), sink), sink

    def reserve(self, prompt: Sequence[int] | int = 40, *, ttl_ms: int = 0, **fields: Any) -> tuple[Route, RecordingRoute]:
        """Ask for a reservation for these tokens, or for so many."""
        sink = RecordingRoute()
        return self.parts.dispatcher.reserve(a_request(prompt, **fields), ttl_ms, sink), sink

    async def serve(self) -> str:
        """Serve the gRPC API; returns its address."""
        self._server = service.open_endpoint(self.settings, self.parts)
        return f"127.0.0.1:{await self._server.start('127.0.0.1:0')}"

    def is_idle(self) -> bool:
        """Whether nothing is booked, held, waiting or under way."""
        loads = self.parts.ledger.loads
        return (
            not any(loads.prefill_tokens)
            and not any(loads.decode_blocks)
            and not list(self.parts.ledger.bookings())
            and not self.parts.dispatcher.flights
            and not len(self.parts.dispatcher.queue)
            and not sum(len(link) for link in self.parts.links)
        )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(0)
        await self.parts.links.close()
        await self.parts.intake.close()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0.02)
            self.parts.members.sweep(loop.time())
            self.parts.dispatcher.sweep(loop.time())


def a_request(prompt: Sequence[int] | int = 40, *, max_tokens: int = 8, n: int = 1, **fields: Any) -> RouterRequest:
    """A checked request of model "m"."""
    tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    sampling = fields.pop("sampling", None) or Sampling(max_tokens=max_tokens, n=n)
    given = {"request_id": f"req-{next(_ids)}", "model": "m"}
    return RouterRequest(prompt=pack_tokens(tokens), sampling=sampling, **(given | fields))
