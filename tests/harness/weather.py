"""What storms of every kind have in common: the cluster's settings, what goes wrong around it, and scripts of that."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.nats import NatsServer
from harness.proxies import Faults, NatsProxy

from rankway import rpc
from rankway.blocks import unpack_hashes
from rankway.indexer.settings import IndexerSettings
from rankway.indexer.slots import RankKey
from rankway.registry.settings import RegistrySettings
from rankway.router.settings import RouterSettings
from rankway.v1 import worker_pb2, worker_pb2_grpc
from rankway.worker.settings import WorkerSettings

DP_GROUP = "g"
BLOCK_SIZE = 4
KV_BLOCKS = 64
RANKS_PER_WORKER = 2
LEASE_S = 1
DRAIN_TIMEOUT_S = 0.1


@dataclass(slots=True)
class Report:
    """What a storm did and how it ended."""

    seed: int
    actions: list[str] = field(default_factory=list)
    calm_s: float = 0.0
    """From the end of the faults until everybody agreed."""
    blocks: int = 0


class Weather:
    """A cluster in bad weather: faults of NATS and of the workers' connections to it. Subclasses have the services.

    `rng` draws the script and nothing else, so a seed repeats it, whatever load and network make of it.
    """

    def __init__(self, nats: NatsServer) -> None:
        self.nats = nats
        self.rng = random.Random()
        self.network_rng = random.Random()
        self.done: Counter[str] = Counter()

    @property
    def links(self) -> Sequence[NatsProxy]:
        """Between each worker and NATS."""
        raise NotImplementedError

    def seed(self, seed: int) -> None:
        self.rng.seed(seed)
        self.network_rng.seed(seed)

    async def play(self, faults: Sequence[Callable[[Any], Awaitable[None]]], report: Report, count: int, pause_s: float) -> None:
        """A script of `count` faults, drawn from `faults`, with pauses of up to `pause_s` between."""
        for _ in range(count):
            fault = self.rng.choice(faults)
            report.actions.append(fault.__name__)
            self.done[fault.__name__] += 1
            await fault(self)
            await asyncio.sleep(self.rng.uniform(0.0, pause_s))

    def clear_up(self) -> None:
        """End the faults of the network."""
        for link in self.links:
            link.faults = Faults()
            link.heal()
            link.flow()

    async def bad_network(self) -> None:
        self.rng.choice(self.links).faults = Faults(
            drop=self.rng.choice([0.0, 0.05, 0.5]),
            duplicate=self.rng.choice([0.0, 0.2]),
            delay=self.rng.choice([0.0, 0.2]),
            reorder=self.rng.choice([0.0, 0.2]),
            corrupt=self.rng.choice([0.0, 0.05]),
        )

    async def lost_messages(self) -> None:
        link = self.rng.choice(self.links)
        link.faults = Faults(drop=1.0)
        await asyncio.sleep(self.rng.uniform(0.0, 0.1))
        link.faults = Faults()

    async def cut_connection(self) -> None:
        self.rng.choice(self.links).cut()

    async def stalled_connection(self) -> None:
        link = self.rng.choice(self.links)
        link.stall()
        await asyncio.sleep(self.rng.uniform(0.05, 0.3))
        link.flow()

    async def nats_restart(self) -> None:
        await asyncio.to_thread(self.nats.restart)

    async def nats_restart_without_store(self) -> None:
        await asyncio.to_thread(self.nats.restart, lose_store=True)

    async def nats_pause(self) -> None:
        self.nats.pause()
        await asyncio.sleep(self.rng.uniform(0.05, 0.4))
        self.nats.resume()


NETWORK_FAULTS: Sequence[Callable[[Weather], Awaitable[None]]] = (
    Weather.bad_network,
    Weather.bad_network,
    Weather.bad_network,
    Weather.lost_messages,
    Weather.cut_connection,
    Weather.stalled_connection,
    Weather.nats_restart,
    Weather.nats_restart_without_store,
    Weather.nats_pause,
)


def loopback(ports: Sequence[int]) -> tuple[str, ...]:
    """Addresses of these ports."""
    return tuple(f"127.0.0.1:{port}" for port in ports)


def registry_settings(listen: str, nats_url: str) -> RegistrySettings:
    return RegistrySettings(grpc_listen=listen, nats_url=nats_url, lease_ttl_s=LEASE_S)


def indexer_settings(number: int, listen: str, nats_url: str, registries: Sequence[str]) -> IndexerSettings:
    return IndexerSettings(
        grpc_listen=listen,
        nats_url=nats_url,
        registry_endpoints=tuple(registries),
        dp_group=DP_GROUP,
        indexer_id=f"i{number}",
        resync_timeout_s=2.0,
    )


def worker_settings(
    number: int, workers: int, nats_url: str, registries: Sequence[str], *, decode_ms: float = 2.0
) -> WorkerSettings:
    """Of worker `number` of `workers`, with caches that are full soon."""
    return WorkerSettings(
        worker_id=f"w{number}",
        dp_group=DP_GROUP,
        nats_url=nats_url,
        registry_endpoints=tuple(registries),
        data_parallel_size=RANKS_PER_WORKER * workers,
        start_rank=number * RANKS_PER_WORKER,
        size=RANKS_PER_WORKER,
        block_size=BLOCK_SIZE,
        num_kv_blocks=KV_BLOCKS,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        sim_decode_ms=decode_ms,
        sim_prefill_tokens_per_s=100_000.0,
        drain_timeout_s=DRAIN_TIMEOUT_S,
    )


def router_settings(
    number: int,
    nats_url: str,
    registries: Sequence[str],
    indexers: Sequence[str],
    *,
    grpc_listen: str = "127.0.0.1:0",
    http_listen: str = "127.0.0.1:0",
) -> RouterSettings:
    """Each router prefers another indexer."""
    first = number % len(indexers)
    return RouterSettings(
        grpc_listen=grpc_listen,
        http_listen=http_listen,
        nats_url=nats_url,
        registry_endpoints=tuple(registries),
        indexer_endpoints=(*indexers[first:], *indexers[:first]),
        router_id=f"r{number}",
        dp_group=DP_GROUP,
        drain_timeout_s=DRAIN_TIMEOUT_S,
    )


async def snapshot(endpoint: str, worker_id: str, dp_rank: int) -> tuple[RankKey, set[int]]:
    """What a rank holds, by its worker's Snapshot."""
    epoch = 0
    held: set[int] = set()
    async with rpc.open_channel(endpoint) as channel:
        async for part in worker_pb2_grpc.WorkerStub(channel).Snapshot(worker_pb2.SnapshotRequest(dp_rank=dp_rank), timeout=5):
            epoch = part.epoch
            held.update(unpack_hashes(part.block_hashes))
    return RankKey(worker_id, epoch, dp_rank), held
