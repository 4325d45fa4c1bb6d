"""Settings of the worker."""

from __future__ import annotations

import math
import re
import socket
from dataclasses import dataclass

from rankway import logs
from rankway.errors import InvalidField
from rankway.ranks import DpRange, check_name
from rankway.registry.records import check_endpoint
from rankway.settings import check_listen, option


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Raises ValueError for values that don't go together."""

    grpc_listen: str = option("address of the gRPC server, host:port; port 0 takes any free one", "127.0.0.1:0")
    advertise_endpoint: str = option("host:port by which routers and indexers reach this worker; empty: where it listens", "")
    metrics_listen: str = option("address of the Prometheus endpoint, host:port", "127.0.0.1:0")
    nats_url: str = option("NATS servers, with commas between", "nats://127.0.0.1:4222")
    registry_endpoints: tuple[str, ...] = option("registries, with commas between", ("127.0.0.1:50052",))
    worker_id: str = option("unique name of this worker; empty: <hostname>-<start-rank>", "")
    dp_group: str = option("DP group that the worker's ranks belong to", "default")
    data_parallel_size: int = option("ranks of the whole DP group; 0: up to the end of this worker's window", 0)
    start_rank: int = option("first global rank of this worker's window", 0)
    size: int = option("ranks of this worker's window", 1)
    engine: str = option("what generates", "sim", choices=("sim", "vllm"))
    model: str = option("directory of the model (vLLM takes hub ids too); the simulator needs its tokenizer only", "")
    served_model_name: tuple[str, ...] = option(
        "names of the model in requests, the first one canonical; empty: the model directory's name", ()
    )
    lora_adapters: tuple[str, ...] = option("LoRA adapters that the simulator pretends to have, with commas between", ())
    block_size: int = option("KV cache block; 0: the engine's default (simulator: 16)", 0, unit="tokens")
    num_kv_blocks: int = option("KV cache of a rank; 0: as many as the engine has room for (simulator: 16384)", 0, unit="blocks")
    max_num_seqs: int = option("most requests running at once on a rank; 0: the engine's default", 0)
    max_num_batched_tokens: int = option("most tokens of one engine step of a rank; 0: the engine's default", 0, unit="tokens")
    max_model_len: int = option("most tokens of prompt and output together; 0: the model's", 0, unit="tokens")
    max_requests: int = option("most requests at once on this worker, running and waiting; more get RESOURCE_EXHAUSTED", 8192)
    drain_timeout_s: float = option("how long running requests may take to finish when the worker stops", 30.0, unit="seconds")
    sim_prefill_tokens_per_s: float = option("simulator: prefill rate of a rank", 20_000.0, unit="tokens/s")
    sim_decode_ms: float = option("simulator: duration of a step in which requests decode", 10.0, unit="ms")
    sim_speedup: float = option("simulator: divides every duration; 0: steps take no time", 1.0)
    sim_eos_probability: float = option("simulator: how likely the output ends after a word before max_tokens", 0.0)
    log_level: str = option("least severe log lines shown", "info", choices=logs.LEVELS)

    def __post_init__(self) -> None:
        check_listen("grpc_listen", self.grpc_listen)
        check_listen("metrics_listen", self.metrics_listen)
        if not self.registry_endpoints:
            raise ValueError("registry_endpoints is empty: a worker must be found to be used")
        try:
            if self.worker_id:
                check_name("worker_id", self.worker_id)
            check_name("dp_group", self.dp_group)
            if self.advertise_endpoint:
                check_endpoint("advertise_endpoint", self.advertise_endpoint)
            window = self.window
            if self.data_parallel_size:
                window.check_within(self.data_parallel_size)
        except InvalidField as error:
            raise ValueError(error.message) from None
        for name in (
            "num_kv_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "drain_timeout_s",
            "sim_speedup",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must not be negative")
        if not 0 <= self.sim_eos_probability <= 1:
            raise ValueError(f"sim_eos_probability={self.sim_eos_probability}: must be in [0, 1]")
        if self.max_requests < 1:
            raise ValueError(f"max_requests={self.max_requests}: must be at least 1")
        if self.block_size < 0:
            raise ValueError(f"block_size={self.block_size}: must not be negative")

    @property
    def window(self) -> DpRange:
        return DpRange(self.start_rank, self.size)

    @property
    def speedup(self) -> float:
        return self.sim_speedup or math.inf

    def name(self, window: DpRange) -> str:
        """worker_id, or one made of this machine's name and the window."""
        host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:50]
        return self.worker_id or f"{host or 'worker'}-{window.start_rank}"
