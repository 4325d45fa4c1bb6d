"""The registry's settings."""

from __future__ import annotations

from dataclasses import dataclass

from rankway import logs
from rankway.ranks import check_name
from rankway.settings import option


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    grpc_listen: str = option("address of the gRPC server, host:port; port 0 takes a free one", "127.0.0.1:50052")
    metrics_listen: str = option("address of Prometheus /metrics, host:port; port 0 takes a free one", "127.0.0.1:0")
    nats_url: str = option("NATS server, or several with commas between", "nats://127.0.0.1:4222")
    lease_ttl_s: int = option("how long a worker that doesn't renew its lease counts as alive, at least 1", 5, unit="s")
    bucket: str = option("JetStream KV bucket of the records; created if missing", "rankway")
    bucket_replicas: int = option("NATS servers that hold the bucket, 1 to 5; used when it is created", 1)
    log_level: str = option("least important lines to log", "info", choices=logs.LEVELS)

    def __post_init__(self) -> None:
        check_name("bucket", self.bucket)
        if self.lease_ttl_s < 1:
            raise ValueError(f"lease_ttl_s={self.lease_ttl_s}: must be at least 1, in whole seconds")
        if not 1 <= self.bucket_replicas <= 5:
            raise ValueError(f"bucket_replicas={self.bucket_replicas}: must be 1 to 5")
