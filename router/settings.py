"""Settings of the router."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rankway import logs
from rankway.ranks import check_name
from rankway.settings import option


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Raises ValueError or InvalidField for a value out of its range."""

    grpc_listen: str = option("address of the gRPC API; port 0: any free one", "127.0.0.1:50051", unit="host:port")
    http_listen: str = option("address of the OpenAI HTTP API; port 0: any free one", "127.0.0.1:8000", unit="host:port")
    metrics_listen: str = option("address of Prometheus /metrics; port 0: any free one", "127.0.0.1:0", unit="host:port")
    nats_url: str = option(
        "NATS servers, for sharing bookings with other routers", "nats://127.0.0.1:4222", unit="url, commas between"
    )
    registry_endpoints: tuple[str, ...] = option(
        "registries; another serves when one fails", ("127.0.0.1:50052",), unit="host:port"
    )
    indexer_endpoints: tuple[str, ...] = option("indexers; another serves when one fails", ("127.0.0.1:50053",), unit="host:port")
    grpc_server: str = option(
        "direct: requests are answered straight on HTTP/2, a fifth of the CPU a token; grpcio: by grpcio's server",
        "direct",
        choices=("direct", "grpcio"),
    )
    router_id: str = option("name among the routers; empty: made of host name and process id", "")
    dp_group: str = option("serve this DP group only; empty: every group", "")
    processes: int = option("router processes that share the ports", 1, unit="processes")
    reuse_port: bool = option("let other routers listen on the same ports (SO_REUSEPORT)", False)

    policy: str = option("how a target is chosen: cheapest by prefix and load, or in turn", "kv", choices=("kv", "round_robin"))
    overlap_weight: float = option("blocks of decode load that one block of prefill is worth; at least 0", 1.0)
    temperature: float = option("0: the cheapest target; above: softmax over the normalised costs", 0.0)
    recent_weight: float = option("what a dispatch adds to its target's cost for a moment; 0: nothing", 1.0, unit="blocks")
    recent_half_life_s: float = option("how fast that fades", 1.0, unit="s")
    session_ttl_s: float = option("how long a session prefers its last target; 0: no affinity", 600.0, unit="s")
    session_slack_blocks: float = option("how much dearer than the cheapest a session's last target may be", 64.0, unit="blocks")

    limit_running: float = option("requests in flight on a rank, as a multiple of its max_num_seqs; 0: no limit", 2.0)
    limit_prefill_batches: float = option(
        "tokens to prefill in flight on a rank, as a multiple of its max_num_batched_tokens; 0: no limit", 16.0
    )
    limit_kv_share: float = option("active blocks of a rank, as a share of its KV cache; 0: no limit", 1.0)
    queue_requests: int = option("requests that may wait while every target is full", 1024, unit="requests")
    queue_tokens: int = option("prompt tokens of all that wait", 4_000_000, unit="tokens")
    queue_age_s: float = option("how long a request may wait", 30.0, unit="s")
    hold_blocks_per_s: float = option("what a second of waiting for a full, warm target costs", 100.0, unit="blocks/s")

    max_requests: int = option("requests under way at once on each API; beyond, RESOURCE_EXHAUSTED / 429", 4096, unit="requests")
    max_attempts: int = option("targets that one request may be sent to when workers fail", 4)
    set_aside_s: float = option("how long a worker whose engine broke a request takes none", 2.0, unit="s")
    failover_wait_s: float = option("how long a request waits for a worker that is a member but out of reach", 5.0, unit="s")
    lease_grace_s: float = option("how long a worker that answers is kept when its lease has ended", 10.0, unit="s")
    reservation_ttl_s: float = option("how long a reservation of Route lives unless asked otherwise", 30.0, unit="s")
    explain_recent: int = option("decisions kept for Explain", 256, unit="decisions")
    share_bookings: bool = option("tell the other routers what is booked, and learn theirs", True)
    share_interval_ms: int = option("bookings are told in batches this far apart", 5, unit="ms")

    model: str = option("directory with the model's tokenizer.json; empty: fetched from the workers", "")
    tokenizer_threads: int = option("threads that tokenise long texts", 1, unit="threads")
    request_timeout_s: float = option("after which nobody waits for an answer over HTTP", 600.0, unit="s")
    max_body_bytes: int = option("longest HTTP request body; beyond, 413", 16 * 2**20, unit="bytes")
    max_connections: int = option("HTTP connections at once", 8192, unit="connections")
    rate_limit_per_s: float = option("requests a second of one API key or tenant over HTTP; 0: no limit", 0.0, unit="requests/s")
    rate_limit_burst: float = option("requests of one key at once", 20.0, unit="requests")
    drain_timeout_s: float = option("how long running requests may take to end at SIGTERM", 30.0, unit="s")
    log_level: str = option("least severe log lines shown", "info", choices=logs.LEVELS)

    def __post_init__(self) -> None:
        for name in ("dp_group", "router_id"):
            if getattr(self, name):
                check_name(name, getattr(self, name))
        for name in ("grpc_listen", "http_listen", "metrics_listen"):
            if not re.fullmatch(r".+:\d{1,5}", getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be host:port")
        for name in ("registry_endpoints", "indexer_endpoints"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: at least one is needed")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 0")


_POSITIVE = (
    "processes",
    "recent_half_life_s",
    "queue_age_s",
    "max_requests",
    "max_attempts",
    "reservation_ttl_s",
    "share_interval_ms",
    "tokenizer_threads",
    "request_timeout_s",
    "max_body_bytes",
    "max_connections",
    "rate_limit_burst",
)
_NOT_NEGATIVE = (
    "overlap_weight",
    "temperature",
    "recent_weight",
    "session_ttl_s",
    "session_slack_blocks",
    "limit_running",
    "limit_prefill_batches",
    "limit_kv_share",
    "queue_requests",
    "queue_tokens",
    "hold_blocks_per_s",
    "set_aside_s",
    "failover_wait_s",
    "lease_grace_s",
    "explain_recent",
    "rate_limit_per_s",
    "drain_timeout_s",
)
