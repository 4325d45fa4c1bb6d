"""What `rankway up` starts: its settings, and the command line of each service. Pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rankway import logs
from rankway.errors import InvalidField
from rankway.settings import option


@dataclass(frozen=True, slots=True)
class UpSettings:
    workers: int = option("worker processes", 2)
    ranks_per_worker: int = option("global ranks that each worker owns; 0: 4 of the simulator, 2 of vLLM", 0)
    engine: str = option("engine of the workers", "sim", choices=("sim", "vllm"))
    model: str = option("model directory (vLLM: or hub id); empty with sim: a byte-level tokenizer", "")
    block_size: int = option("KV cache block; 0: the engine's default (simulator: 16)", 0, unit="tokens")
    http_port: int = option("port of the OpenAI API; 0: any free one", 8000)
    grpc_port: int = option("port of the router's gRPC API; 0: any free one", 50051)
    listen_host: str = option("address that the router listens on; everything else listens on loopback", "127.0.0.1")
    log_level: str = option("least important log lines to show", "info", choices=logs.LEVELS)
    log_format: str = option("readable text, or one JSON object a line", "text", choices=("text", "json"))
    registry_args: str = option("more options for the registry, as in a shell", "")
    indexer_args: str = option("more options for the indexer, as in a shell", "")
    worker_args: str = option("more options for each worker, as in a shell", "")
    router_args: str = option("more options for the router, as in a shell", "")

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise InvalidField("workers", self.workers, "must be at least 1")
        if self.block_size < 0:
            raise InvalidField("block_size", self.block_size, "must be at least 1, or 0 for the engine's default")
        if self.ranks_per_worker < 0:
            raise InvalidField("ranks_per_worker", self.ranks_per_worker, "must be at least 1, or 0 for the engine's default")
        for name in ("http_port", "grpc_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise InvalidField(name, getattr(self, name), "must be 0 … 65535")
        if self.http_port and self.http_port == self.grpc_port:
            raise InvalidField("http_port", self.http_port, "is grpc_port too")
        if self.engine == "vllm" and not self.model:
            raise InvalidField("model", self.model, "engine vllm needs a model directory or hub id (`make demo-model` makes one)")

    @property
    def ranks(self) -> int:
        """Ranks of each worker."""
        return self.ranks_per_worker or (2 if self.engine == "vllm" else 4)


class Plan:
    """The command lines of a cluster. Pure: addresses are told as they become known.

    Args:
        engine_args: what goes to each worker's vLLM.
        nats_server: path of the binary.
        directory: for nats-server's store and the file that tells its port.
        vllm_port: a free port where vLLM's processes meet.
        cuda_devices: CUDA_VISIBLE_DEVICES; empty: left alone.
    """

    def __init__(
        self,
        up: UpSettings,
        engine_args: Sequence[str],
        nats_server: str,
        directory: Path,
        *,
        vllm_port: int = 0,
        cuda_devices: str = "",
    ) -> None:
        self._up = up
        self._vllm_port = vllm_port
        self._cuda_devices = cuda_devices
        self._engine_args = list(engine_args)
        self._nats_server = nats_server
        self._directory = directory
        self.nats_url = ""
        self.registry = ""
        self.indexer = ""

    @property
    def names(self) -> tuple[str, ...]:
        return ("nats", "registry", "indexer", *self.worker_ids, "router")

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return tuple(f"worker-{i}" for i in range(self._up.workers))

    def nats_argv(self, port: int = -1) -> list[str]:
        """-1: a free port, told in a file of `directory`."""
        store = self._directory / "jetstream"
        # fmt: off
        return [self._nats_server, "--addr", "127.0.0.1", "--port", str(port), "--jetstream", "--store_dir", str(store),
                "--ports_file_dir", str(self._directory)]
        # fmt: on

    def registry_argv(self) -> list[str]:
        return self._service("registry", self._up.registry_args)

    def indexer_argv(self) -> list[str]:
        return self._service("indexer", self._up.indexer_args, f"--registry-endpoints={self.registry}")

    def worker_argv(self, number: int) -> list[str]:
        up = self._up
        return self._service(
            "worker",
            up.worker_args,
            f"--registry-endpoints={self.registry}",
            f"--worker-id={self.worker_ids[number]}",
            "--dp-group=default",
            f"--data-parallel-size={up.workers * up.ranks}",
            f"--start-rank={number * up.ranks}",
            f"--size={up.ranks}",
            f"--engine={up.engine}",
            f"--model={up.model}",
            f"--block-size={up.block_size}",
        ) + self._engine_part(number)

    def worker_environ(self, number: int) -> dict[str, str]:
        """On GPUs each worker gets its share of CUDA_VISIBLE_DEVICES: vLLM counts a process's devices from 0."""
        devices = [device for device in self._cuda_devices.split(",") if device]
        share = len(devices) // self._up.workers
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices[number * share : (number + 1) * share])} if share else {}

    def _engine_part(self, number: int) -> list[str]:
        """vLLM's own flags: hybrid load balancing over all workers; one worker balances internally; workers of one rank each are
        independent engines, which is what vLLM wants of dense models (a MoE model needs its flags given after --)."""
        up = self._up
        flags = []
        if up.engine == "vllm" and up.ranks > 1:
            flags = [f"--data-parallel-size={up.workers * up.ranks}"]
            if up.workers > 1:
                flags += [
                    f"--data-parallel-size-local={up.ranks}",
                    f"--data-parallel-start-rank={number * up.ranks}",
                    "--data-parallel-hybrid-lb",
                    "--data-parallel-address=127.0.0.1",
                    f"--data-parallel-rpc-port={self._vllm_port}",
                ]
        flags += self._engine_args
        return ["--", *flags] if flags else []

    def router_argv(self) -> list[str]:
        up = self._up
        return self._service(
            "router",
            up.router_args,
            f"--registry-endpoints={self.registry}",
            f"--indexer-endpoints={self.indexer}",
            f"--http-listen={up.listen_host}:{up.http_port}",
            "--model=",  # the workers hand out their tokenizer
            listen=f"{up.listen_host}:{up.grpc_port}",
        )

    def _service(self, name: str, more: str, *options: str, listen: str = "127.0.0.1:0") -> list[str]:
        common = [
            f"--grpc-listen={listen}",
            "--metrics-listen=127.0.0.1:0",
            f"--nats-url={self.nats_url}",
            f"--log-level={self._up.log_level}",
        ]
        # -P keeps the working directory, which may be anything, from shadowing modules.
        return [sys.executable, "-P", "-m", "rankway", name, *common, *options, *shlex.split(more)]
