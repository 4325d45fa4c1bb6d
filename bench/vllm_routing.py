"""KV-aware against round-robin routing on a real vLLM: the same multi-turn conversations, one policy after the other.

    python bench/vllm_routing.py --model models/smollm2-135m-instruct [--json FILE]

Starts `rankway up` with two vLLM workers of two ranks each, and beside it a router of each policy. Every conversation has a
system prompt that all share, and a history that grows turn by turn; the caches are emptied before each policy. Time to first
token is taken at the client, over HTTP with streaming. On a machine with fewer cores than ranks the engines compete: figures
compare the policies with each other, and say nothing about vLLM's speed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

# The cluster that the tests start is the cluster that is measured.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness import cluster as harness

from rankway import rpc
from rankway.v1 import registry_pb2, registry_pb2_grpc, worker_pb2, worker_pb2_grpc

POLICIES = ("round_robin", "kv")
START_TIMEOUT_S = 600.0
SYSTEM_WORDS = 120
USER_WORDS = 100
PAUSE_S = 1.0
"""At most, before a turn. Without pauses as many conversations as ranks run in step, and round robin brings each back to its rank
by accident."""
ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # what lets vLLM's CPU engine do without a worker process a rank
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
ENGINE_FLAGS = (
    "--distributed-executor-backend=uni",
    "--enforce-eager",
    "--block-size=32",
    "--max-model-len=2048",
    "--num-gpu-blocks-override=512",
    "--max-num-batched-tokens=512",
    "--max-num-seqs=16",
)
_WORDS = (
    "river",
    "stone",
    "garden",
    "winter",
    "market",
    "teacher",
    "copper",
    "music",
    "island",
    "letter",
    "window",
    "forest",
    "bridge",
    "silver",
    "morning",
    "captain",
    "yellow",
    "village",
    "pocket",
    "thunder",
    "engine",
    "harbor",
    "pepper",
    "candle",
    "ladder",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request as its client saw it."""

    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """One policy's figures."""

    policy: str
    requests: int
    ttft_mean_ms: float
    ttft_p95_ms: float
    cached_share: float
    predicted_exactly: float

    @classmethod
    def of(cls, policy: str, turns: list[Turn]) -> Row:
        times = sorted(turn.ttft_ms for turn in turns)
        return cls(
            policy,
            len(turns),
            statistics.fmean(times),
            times[min(len(times) - 1, round(0.95 * len(times)))],
            sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns),
            sum(turn.cached_tokens == turn.predicted_tokens for turn in turns) / len(turns),
        )


@contextlib.contextmanager
def cluster(model: str) -> Iterator[harness.Cluster]:
    """Two workers of two ranks, hybrid load balancing."""
    harness.START_TIMEOUT_S = START_TIMEOUT_S
    with tempfile.TemporaryDirectory() as directory:
        options = (
            "--engine=vllm",
            f"--model={model}",
            "--workers=2",
            "--ranks-per-worker=2",
            "--log-format=json",
            "--",
            *ENGINE_FLAGS,
        )
        running = harness.Cluster(*options, tmp_path=Path(directory), environ=ENVIRON)
        try:
            yield running.wait_ready()
        finally:
            running.stop(60)


@contextlib.contextmanager
def router(running: harness.Cluster, policy: str) -> Iterator[str]:
    """A router of a policy beside the cluster's own; gives host:port of its HTTP API."""
    reader, writer = os.pipe()
    options = {
        "grpc-listen": "127.0.0.1:0",
        "http-listen": "127.0.0.1:0",
        "nats-url": running.nats_url,
        "registry-endpoints": running.address("registry"),
        "indexer-endpoints": running.address("indexer"),
        "policy": policy,
        "log-level": "warning",
    }
    argv = [f"--{name}={value}" for name, value in options.items()]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "rankway", "router", *argv],
        env={**os.environ, "RANKWAY_READY_FD": str(writer)},
        pass_fds=(writer,),
    )
    os.close(writer)
    try:
        with os.fdopen(reader) as ready:
            yield json.loads(ready.readline())["http"]
    finally:
        process.terminate()
        process.wait(30)


async def reset_caches(running: harness.Cluster) -> None:
    """Empty every rank's prefix cache."""
    async with rpc.open_channel(running.address("registry")) as channel:
        listed = await registry_pb2_grpc.RegistryStub(channel).List(registry_pb2.ListRequest())
    for record in listed.records:
        async with rpc.open_channel(record.endpoint) as channel:
            answer = await worker_pb2_grpc.WorkerStub(channel).ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest())
            if len(answer.dp_ranks) != record.dp_range.size:
                raise RuntimeError(f"{record.worker_id}: only the ranks {list(answer.dp_ranks)} were reset")


def memory_gib(running: harness.Cluster) -> float:
    """Memory of the launcher and everything below it; pages that processes share count once."""
    return sum(process.memory_full_info().pss for process in running.processes()) / 2**30


def ask(address: str, messages: list[dict[str, str]], max_tokens: int, block_size: int = 32) -> tuple[Turn, str]:
    """One streamed chat completion; blocks. (what was measured, the answer's text)."""
    body = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(address, timeout=300)
    begun = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {response.read()!r}")
    predicted = int(response.headers["x-rankway-overlap-blocks"]) * block_size
    first, text, usage = 0.0, "", {}
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        content = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        if content and not first:
            first = time.perf_counter() - begun
        text += content
    connection.close()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Turn((first or time.perf_counter() - begun) * 1000, usage["prompt_tokens"], cached, predicted), text


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


def converse(address: str, seed: str, turns: int, system: str, max_tokens: int, pause_s: float = 0.0) -> list[Turn]:
    """One conversation, turn after turn, `pause_s` at most before each; blocks."""
    rng, pauses = random.Random(seed), random.Random(f"pauses of {seed}")
    messages = [{"role": "system", "content": system}]
    measured = []
    for _ in range(turns):
        time.sleep(pauses.uniform(0, pause_s))
        messages.append({"role": "user", "content": sentence(rng, USER_WORDS)})
        turn, text = ask(address, messages, max_tokens)
        messages.append({"role": "assistant", "content": text})
        measured.append(turn)
    return measured


def measure(
    running: harness.Cluster,
    policy: str,
    conversations: int,
    turns: int,
    at_once: int,
    max_tokens: int = 24,
    pause_s: float = PAUSE_S,
) -> Row:
    """All conversations through a router of the policy, `at_once` of them side by side, on empty caches."""
    asyncio.run(reset_caches(running))
    system = "You are a helpful assistant. " + sentence(random.Random("system"), SYSTEM_WORDS)
    with router(running, policy) as address, ThreadPoolExecutor(at_once) as threads:
        answers = threads.map(
            lambda number: converse(address, f"conversation-{number}", turns, system, max_tokens, pause_s), range(conversations)
        )
        return Row.of(policy, [turn for conversation in answers for turn in conversation])


def table(rows: list[Row]) -> str:
    lines = [f"{'policy':<12} {'requests':>8} {'TTFT mean':>10} {'TTFT p95':>10} {'cached tokens':>14} {'predicted exactly':>18}"]
    lines += [
        f"{row.policy:<12} {row.requests:>8} {row.ttft_mean_ms:>7.0f} ms {row.ttft_p95_ms:>7.0f} ms "
        f"{row.cached_share:>13.1%} {row.predicted_exactly:>17.1%}"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="directory of a chat model")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=4, help="conversations side by side")
    parser.add_argument("--pause-s", type=float, default=PAUSE_S, help="longest pause before a turn")
    parser.add_argument("--json", help="file for the figures")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    with cluster(str(Path(arguments.model).resolve())) as running:
        print(f"ready after {time.perf_counter() - begun:.1f} s, {memory_gib(running):.1f} GiB in all processes")
        rows = [
            measure(running, policy, arguments.conversations, arguments.turns, arguments.at_once, pause_s=arguments.pause_s)
            for policy in POLICIES
        ]
    print(table(rows))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
