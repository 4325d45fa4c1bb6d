"""Registry replicas in the test's process, over real gRPC and NATS."""

from __future__ import annotations

import asyncio
from typing import Any

from rankway.ranks import DpRange
from rankway.registry import service
from rankway.registry.client import RegistryClient
from rankway.registry.records import Put, Record, Snapshot, State, WatchEvent
from rankway.registry.settings import RegistrySettings


def record(worker_id: str = "w1", start_rank: int = 0, size: int = 4, **changes: Any) -> Record:
    """A valid record of DP group `g` with 8 ranks."""
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "epoch": 1000,
        "endpoint": "127.0.0.1:7001",
        "model": "model-a",
        "dp_group": "g",
        "data_parallel_size": 8,
        "window": DpRange(start_rank, size),
        "block_size": 16,
        "total_kv_blocks": 1024,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len": 4096,
        "vocab_size": 512,
        "engine": "sim",
        "state": State.READY,
        "tokenizer": "bytes",
    }
    return Record(**{**fields, **changes})


class Replica:
    """One registry, running as a task. `stop` ends it as SIGTERM would."""

    def __init__(self, settings: RegistrySettings) -> None:
        self.settings = settings
        self.addresses: dict[str, str] = {}
        self._ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(service.run(settings, ready=self._on_ready, stop=self._stop))

    @property
    def endpoint(self) -> str:
        return self.addresses["grpc"]

    async def wait_ready(self) -> None:
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({ready, self._task}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()
        assert self._ready.is_set()

    async def stop(self) -> None:
        """Idempotent."""
        self._stop.set()
        await self._task

    def _on_ready(self, addresses: Any) -> None:
        self.addresses = dict(addresses)
        self._ready.set()


class Watcher:
    """Follows a registry through `RegistryClient.watch`: what it saw, and what it knows now by worker_id."""

    def __init__(self, client: RegistryClient, dp_group: str = "") -> None:
        self.events: list[WatchEvent] = []
        self.known: dict[str, Record] = {}
        self._task = asyncio.create_task(self._follow(client, dp_group))

    async def _follow(self, client: RegistryClient, dp_group: str) -> None:
        async for event in client.watch(dp_group):
            self.events.append(event)
            if isinstance(event, Snapshot):
                self.known = {record.worker_id: record for record in event.records}
            elif isinstance(event, Put):
                self.known[event.record.worker_id] = event.record
            else:
                self.known.pop(event.instance.worker_id, None)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
