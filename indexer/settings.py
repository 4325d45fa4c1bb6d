"""Settings of the indexer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rankway.logs import LEVELS
from rankway.ranks import check_name
from rankway.settings import option


@dataclass(frozen=True, slots=True)
class IndexerSettings:
    """Raises ValueError for a value out of its range."""

    grpc_listen: str = option("where gRPC is served; port 0: any free one", "127.0.0.1:50053", unit="host:port")
    metrics_listen: str = option("where Prometheus /metrics is served; port 0: any free one", "127.0.0.1:0", unit="host:port")
    nats_url: str = option("NATS servers, separated by commas", "nats://127.0.0.1:4222", unit="url")
    registry_endpoints: tuple[str, ...] = option(
        "registries; the next one serves when one fails", ("127.0.0.1:50052",), unit="host:port"
    )
    dp_group: str = option("index this DP group only; empty: every group", "")
    indexer_id: str = option("name in logs, metrics and Stats; empty: made of host and port", "")
    reorder_ms: int = option("how long a batch waits for an earlier one before its rank is repaired", 50, unit="ms")
    tail_ms: int = option("how long a load may be ahead of the batches before its rank is repaired", 500, unit="ms")
    waiting_batches: int = option("batches of one rank kept while it is repaired", 10_000, unit="batches")
    pending_messages: int = option(
        "messages from NATS that may wait; beyond, they are dropped and repaired", 65_536, unit="messages"
    )
    repair_concurrency: int = option("snapshots fetched at once", 16, unit="snapshots")
    repair_timeout_s: float = option("how long one snapshot may take", 10.0, unit="s")
    resync_timeout_s: float = option("ready after this even if a rank has not answered", 10.0, unit="s")
    follower_messages: int = option("messages that may wait for one follower; beyond, it is cut off", 100_000, unit="messages")
    follower_bytes: int = option("bytes that may wait for one follower; beyond, it is cut off", 64 * 2**20, unit="bytes")
    log_level: str = option("least severe log lines shown", "info", choices=LEVELS)

    def __post_init__(self) -> None:
        for name in ("dp_group", "indexer_id"):
            if getattr(self, name):
                check_name(name, getattr(self, name))
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")
        for name in ("grpc_listen", "metrics_listen"):
            if not re.fullmatch(r".+:\d{1,5}", getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be host:port")
        if not self.registry_endpoints:
            raise ValueError("registry_endpoints is empty: at least one is needed")


_POSITIVE = (
    "reorder_ms",
    "tail_ms",
    "waiting_batches",
    "pending_messages",
    "repair_concurrency",
    "repair_timeout_s",
    "resync_timeout_s",
    "follower_messages",
    "follower_bytes",
)
