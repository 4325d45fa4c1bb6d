"""The router: chooses a rank for every request and carries its stream, over gRPC and OpenAI's HTTP API.

It watches the registry, follows an indexer, keeps one Attach to every worker, and shares its bookings with other routers. When
one of them is down, what was known last serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc.aio
from prometheus_client import CollectorRegistry

from rankway import logs, native, rpc, service
from rankway.choice import Weights
from rankway.errors import Unavailable, from_status
from rankway.indexer.client import Follower
from rankway.registry.client import RegistryClient
from rankway.registry.records import State
from rankway.router import grpc_generation, grpc_router
from rankway.router.admission import QueueLimits, WaitQueue
from rankway.router.affinity import Affinity
from rankway.router.attach import Links
from rankway.router.bookings import OwnBookings
from rankway.router.dispatcher import DispatchSettings, RouterDispatcher
from rankway.router.eligibility import Eligibility
from rankway.router.explain import Recent
from rankway.router.fleet import Fleet
from rankway.router.grpc_endpoint import GrpcEndpoint
from rankway.router.http_exchange import HttpLimits
from rankway.router.intake import Intake
from rankway.router.ledger import Ledger, RecentTerm
from rankway.router.limits import RateLimit
from rankway.router.members import Members
from rankway.router.metrics import Observed, RouterCollector
from rankway.router.openai_api import FrontDoor, FrontDoorLimits
from rankway.router.policy import Policy, PolicySettings
from rankway.router.replica import Replica
from rankway.router.reservations import Reservations
from rankway.router.settings import RouterSettings
from rankway.router.sharing import Sharing
from rankway.router.targets import Targets
from rankway.router.tokenizers import EncodingThreads, Tokenizers
from rankway.tokenizer import Tokenizer
from rankway.v1 import worker_pb2, worker_pb2_grpc

log = logs.get("router")

SWEEP_S = 0.5
"""Each wake-up of an idle processor costs more than what is done then."""

START_SWEEP_S = 0.1
"""As long as something is missing that the start waits for."""

START_S = 3.0
STOP_GRACE_S = 1.0
TOKENIZER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Router:
    """All parts of a router, wired."""

    fleet: Fleet
    targets: Targets
    ledger: Ledger
    eligibility: Eligibility
    members: Members
    links: Links
    replica: Replica
    policy: Policy
    recent: Recent
    bookings: OwnBookings
    sharing: Sharing | None
    dispatcher: RouterDispatcher
    tokenizers: Tokenizers
    intake: Intake
    generation: grpc_generation.GenerationServicer

    @property
    def complete(self) -> bool:
        """Whether every worker that takes requests answers, and a whole view of the index has come."""
        waiting = (record for record in self.fleet.records.values() if record.state is State.READY)
        return self.replica.complete and all(self.eligibility.is_connected(record.instance) for record in waiting)

    def not_ready(self) -> str:
        """Why requests can't be served now; "" when they can."""
        if not self.fleet.records:
            return "no worker is known"
        return "" if self.eligibility.any_connected() else "no worker answers"


@dataclass(frozen=True, slots=True)
class _Start:
    """What the start waits for."""

    listed: asyncio.Event = field(default_factory=asyncio.Event)
    """The registry has answered."""
    complete: asyncio.Event = field(default_factory=asyncio.Event)


async def run(settings: RouterSettings, *, ready: service.Ready, stop: asyncio.Event) -> None:
    """Serve until `stop`.

    Start: listen (health NOT_SERVING) → watch the registry, follow an indexer, learn others' bookings → attach to the workers →
    ready once the registry has answered and, within START_S, the workers and an indexer have. From then on health and /ready say
    SERVING while a worker answers.
    Stop: health NOT_SERVING, refuse what waits → accept nothing new → running requests end (drain_timeout_s), the rest is
    aborted at the engines → end the watches → close the links → close the metrics.

    Raises:
        OSError: an address can't be had, or the model's directory can't be read.
    """
    router_id = settings.router_id or f"{socket.gethostname()[:40]}-{os.getpid()}".replace(".", "-")
    router = build(settings, router_id)
    if settings.model:
        try:
            router.tokenizers.add(await asyncio.to_thread(Tokenizer.load, settings.model))
        except ValueError as error:
            raise OSError(f"--model {settings.model}: {error}") from None
    metrics = CollectorRegistry()
    metrics.register(RouterCollector(_observed(router), asyncio.get_running_loop()))
    door = _front_door(settings, router, metrics)
    server = open_endpoint(settings, router)
    metrics_host, _, metrics_port = settings.metrics_listen.rpartition(":")
    metrics_address, close_metrics = service.serve_metrics(metrics, metrics_host, int(metrics_port))
    try:
        http = await door.start(settings.http_listen, reuse_port=settings.reuse_port)
        try:
            grpc_host = settings.grpc_listen.rpartition(":")[0]
            addresses = {
                "grpc": f"{grpc_host}:{await server.start(settings.grpc_listen)}",
                "http": str(http),
                "metrics": metrics_address,
            }
            await _serve(settings, router, router_id, server, door, addresses, ready, stop)
        finally:
            await door.stop(0)
            await server.stop(0)
    finally:
        await router.links.close()
        await router.intake.close()
        # A scrape under way wants the event loop.
        await asyncio.to_thread(close_metrics)


async def _serve(
    settings: RouterSettings,
    router: Router,
    router_id: str,
    server: GrpcEndpoint,
    door: FrontDoor,
    addresses: Mapping[str, str],
    ready: service.Ready,
    stop: asyncio.Event,
) -> None:
    start = _Start()
    roles = asyncio.create_task(_roles(settings, router, router_id, server, start))
    starting = asyncio.create_task(_announce(start, ready, addresses))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({roles, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await server.set_ready(False)
            router.dispatcher.refuse_new(Unavailable("the router is stopping"))
            drained = asyncio.create_task(door.server.drain(settings.drain_timeout_s))
            closed = asyncio.create_task(server.stop(settings.drain_timeout_s))
            if not await router.dispatcher.idle(settings.drain_timeout_s):
                log.warning("requests cut off at the end of the drain", requests=len(router.dispatcher.flights))
                router.dispatcher.fail_all(Unavailable("the router has stopped"))
            closing = asyncio.create_task(door.stop(STOP_GRACE_S))
            await asyncio.wait({drained, closed, closing})
    finally:
        for task in (roles, starting, stopping):
            task.cancel()
        await asyncio.wait({roles, starting, stopping})
    if not roles.cancelled():
        roles.result()


async def _announce(start: _Start, ready: service.Ready, addresses: Mapping[str, str]) -> None:
    await start.listed.wait()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(start.complete.wait(), START_S)
    ready(addresses)


async def _roles(settings: RouterSettings, router: Router, router_id: str, server: GrpcEndpoint, start: _Start) -> None:
    """Everything that runs beside the requests; one that fails ends the router."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_watch(settings, router, start))
        tasks.create_task(_follow(settings, router, router_id))
        tasks.create_task(_sweep(router, start))
        tasks.create_task(_tell_readiness(router, server))
        if router.sharing is not None:
            tasks.create_task(router.sharing.run())


async def _watch(settings: RouterSettings, router: Router, start: _Start) -> None:
    registry = RegistryClient(settings.registry_endpoints)
    try:
        async for event in registry.watch(settings.dp_group):
            router.members.apply(event)
            start.listed.set()
    finally:
        await registry.close()


async def _follow(settings: RouterSettings, router: Router, router_id: str) -> None:
    follower = Follower(settings.indexer_endpoints, settings.dp_group, router_id)
    clock = asyncio.get_running_loop().time
    async for update in follower:
        wrong = router.replica.apply(update, clock())
        if wrong:
            follower.restart(wrong)


async def _sweep(router: Router, start: _Start) -> None:
    """Let time pass."""
    clock = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(SWEEP_S if start.complete.is_set() else START_SWEEP_S)
        now = clock()
        router.members.sweep(now)
        router.dispatcher.sweep(now)
        if not start.complete.is_set() and router.complete:
            start.complete.set()


async def _tell_readiness(router: Router, server: GrpcEndpoint) -> None:
    """Health follows the workers as they come and go."""
    reach = asyncio.Event()
    router.members.on_reach = reach.set
    was_ready = False
    while True:
        reach.clear()
        reason = router.not_ready()
        is_ready = not reason
        if is_ready != was_ready:
            was_ready = is_ready
            log.info("readiness", serving=is_ready, reason=reason)
            await server.set_ready(is_ready)
        await reach.wait()


def build(settings: RouterSettings, router_id: str) -> Router:
    """The parts of a router. No I/O; the event loop must run."""
    clock = asyncio.get_running_loop().time
    rng = random.Random()
    fleet, targets, index = Fleet(), Targets(), native.open_index()
    ledger = Ledger(RecentTerm(settings.recent_weight, settings.recent_half_life_s))
    eligibility = Eligibility(fleet, targets)
    members = Members(fleet, targets, ledger, eligibility, settings, clock)
    links = Links(router_id, members.link_up, members.link_down)
    replica = Replica(index, targets, members)
    policy = Policy(_policy_settings(settings), fleet, targets, eligibility, ledger, index)
    recent = Recent(settings.explain_recent, ledger.loads)
    epoch = int(time.time() * 1000)
    bookings, reservations = OwnBookings(ledger, f"{router_id}/{epoch}"), Reservations()
    sharing = None
    if settings.share_bookings:
        sharing = Sharing(settings, router_id, epoch, fleet, targets, ledger, bookings, reservations, clock)
        bookings.audience = sharing
    dispatcher = RouterDispatcher(
        policy,
        ledger,
        eligibility,
        links,
        WaitQueue(QueueLimits(settings.queue_requests, settings.queue_tokens, settings.queue_age_s)),
        Affinity(settings.session_ttl_s),
        bookings,
        reservations,
        recent,
        _dispatch_settings(settings),
        rng,
    )
    members.links, members.replica = links, replica
    members.on_change, members.on_left = dispatcher.changed, dispatcher.instance_left
    threads = EncodingThreads(settings.tokenizer_threads, max_waiting=256, max_waiting_chars=256 * 2**20)
    tokenizers = Tokenizers(TokenizerFetch(fleet).fetch)
    intake = Intake(fleet, tokenizers, threads)
    generation = grpc_generation.GenerationServicer(intake, dispatcher, settings.max_requests, clock)
    return Router(
        fleet,
        targets,
        ledger,
        eligibility,
        members,
        links,
        replica,
        policy,
        recent,
        bookings,
        sharing,
        dispatcher,
        tokenizers,
        intake,
        generation,
    )


class TokenizerFetch:
    """Gets tokenizers from the workers that have them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def fetch(self, fingerprint: str) -> dict[str, bytes]:
        """The files of a tokenizer, from the first worker that gives them.

        Raises:
            RankwayError: no worker does; the last one's answer.
        """
        failure = Unavailable("no worker has it")
        for record in list(self._fleet.records.values()):
            if record.tokenizer != fingerprint:
                continue
            try:
                return await self._from(record.endpoint)
            except grpc.aio.AioRpcError as error:
                cause = from_status(error.code(), error.details() or "")
                failure = Unavailable(f"worker {record.worker_id}: {cause.message}")
        raise failure

    async def _from(self, endpoint: str) -> dict[str, bytes]:
        files: dict[str, bytearray] = {}
        async with rpc.open_channel(endpoint) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).GetTokenizer(worker_pb2.GetTokenizerRequest(), timeout=TOKENIZER_TIMEOUT_S)
            async for part in call:
                files.setdefault(part.file, bytearray()).extend(part.data)
        return {name: bytes(data) for name, data in files.items()}


def _policy_settings(settings: RouterSettings) -> PolicySettings:
    return PolicySettings(
        name=settings.policy,
        weights=Weights(settings.overlap_weight, settings.temperature),
        hold_blocks_per_s=settings.hold_blocks_per_s,
        affinity_blocks=settings.session_slack_blocks,
    )


def _dispatch_settings(settings: RouterSettings) -> DispatchSettings:
    return DispatchSettings(
        max_attempts=settings.max_attempts,
        set_aside_s=settings.set_aside_s,
        failover_wait_s=settings.failover_wait_s,
        reservation_ttl_s=settings.reservation_ttl_s,
    )


def _front_door(settings: RouterSettings, router: Router, metrics: CollectorRegistry) -> FrontDoor:
    limits = FrontDoorLimits(
        http=HttpLimits(body_bytes=settings.max_body_bytes, connections=settings.max_connections),
        max_requests=settings.max_requests,
        request_timeout_s=settings.request_timeout_s,
    )
    rate_limit = RateLimit(settings.rate_limit_per_s, settings.rate_limit_burst)
    return FrontDoor(router.intake, router.dispatcher, limits, rate_limit, metrics, router.not_ready)


def open_endpoint(settings: RouterSettings, router: Router) -> GrpcEndpoint:
    """The gRPC address of a router, not yet listening."""
    clock = asyncio.get_running_loop().time
    routing = grpc_router.RouterServicer(
        router.intake, router.dispatcher, router.policy, router.recent, router.replica, clock, random.Random()
    )
    return GrpcEndpoint(router.generation, routing, direct=settings.grpc_server == "direct", reuse_port=settings.reuse_port)


def _observed(router: Router) -> Observed:
    return Observed(
        router.fleet,
        router.targets,
        router.ledger,
        router.eligibility,
        router.links,
        router.replica,
        router.dispatcher,
        router.generation,
        router.sharing,
    )
