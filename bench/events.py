"""KV events from a worker's publish to a router's replica, through a real nats-server, registry and indexer.

Four processes, as in a deployment: worker (mirror, batches, NATS), nats-server, indexer, and this one with a router's replica. An
engine step tells of 4 blocks stored and 4 removed, in one batch. Measured are the batches a second in bursts, the lag of paced
ones from publish to replica, how fast a new replica of 1,000,000 blocks is ready, and for comparison how fast plain nats-py
receives the very same messages in this same run.

    python bench/events.py [--batches 40000] [--paced-s 5] [--rate 1000]     JSON=<file> writes the figures
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import psutil
import uvloop

from rankway import bus, logs, rpc
from rankway.blocks import pack_hashes
from rankway.indexer.client import Follower, RankBlocks, ViewReady
from rankway.indexer.events import KvBatch
from rankway.native import open_index
from rankway.ranks import DpRange, Instance, LocalRank
from rankway.registry.client import LeaseKeeper, RegistryClient
from rankway.registry.records import Record, State
from rankway.router.replica import Replica
from rankway.router.targets import Targets
from rankway.v1 import worker_pb2, worker_pb2_grpc
from rankway.worker.engine import BlockRemoved, BlockStored, EngineInfo, EngineLoad
from rankway.worker.publisher import Publisher

BLOCKS_PER_STEP = 4
BLOCK_SIZE = 16
HELD_STEPS = 5_000
"""Steps whose blocks are held before the oldest go."""
WINDOW = 10_000
"""Batches that may be on their way in a burst: more would be dropped by somebody's bounded queue."""
ACK_EVERY = 500
SNAPSHOT_BLOCKS = 1_000_000


# --- the worker's process


class SnapshotServicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, publisher: Publisher, epoch: int) -> None:
        self._publisher = publisher
        self._epoch = epoch

    async def Snapshot(  # type: ignore[override]
        self, request: worker_pb2.SnapshotRequest, context: Any
    ) -> AsyncIterator[worker_pb2.SnapshotResponse]:
        snapshot = self._publisher.snapshot(LocalRank(request.dp_rank))
        step = rpc.CHUNK_BYTES // 8
        for start in range(0, max(1, len(snapshot.blocks)), step):
            yield worker_pb2.SnapshotResponse(
                epoch=self._epoch,
                seq=snapshot.seq,
                block_hashes=pack_hashes(snapshot.blocks[start : start + step]),
                kv_digest=snapshot.digest,
                kv_block_count=len(snapshot.blocks),
            )


class Steps:
    """Engine steps that fill a cache and then replace its oldest blocks."""

    def __init__(self) -> None:
        self.step = 0

    def next(self) -> list[BlockStored | BlockRemoved]:
        first = self.step * BLOCKS_PER_STEP
        hashes = range(first, first + BLOCKS_PER_STEP)
        tokens = array("I", [self.step & 0xFFFF, self.step >> 16, *range(BLOCKS_PER_STEP * BLOCK_SIZE - 2)])
        events: list[BlockStored | BlockRemoved] = [BlockStored(hashes, None, tokens, BLOCK_SIZE)]
        if self.step >= HELD_STEPS:
            old = first - HELD_STEPS * BLOCKS_PER_STEP
            events.append(BlockRemoved(range(old, old + BLOCKS_PER_STEP)))
        self.step += 1
        return events


async def worker(options: argparse.Namespace) -> None:
    """Publishes on command: lines of standard input say "burst n", "paced n rate", "fill n"; each is answered by "done seq"."""
    instance = Instance("bench", int(time.time() * 1000))
    publisher = Publisher(instance, "bench")
    window = DpRange(0, 1)
    publisher.open(EngineInfo("bench", "0", "m", window, 1, BLOCK_SIZE, 10**6, 64, 8192, 8192, 65536), lambda: [EngineLoad()])
    server = rpc.Server(["rankway.v1.Worker"])
    worker_pb2_grpc.add_WorkerServicer_to_server(SnapshotServicer(publisher, instance.epoch), server.grpc)
    port = await server.start("127.0.0.1:0")
    running = asyncio.create_task(publisher.run(options.nats_url))
    registry = RegistryClient([options.registry])
    keeper = LeaseKeeper(registry, _record(instance, f"127.0.0.1:{port}", window))
    await keeper.register()
    leasing = asyncio.create_task(keeper.run())
    acknowledged = Acknowledged()
    await acknowledged.follow(options.nats_url)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    steps = Steps()
    while line := (await commands.readline()).decode().split():
        await _obey(publisher, steps, acknowledged, line)
        print("done", publisher.feeds[0].seq, flush=True)
    for task in (leasing, running):
        task.cancel()
    await server.stop(0)


async def _obey(publisher: Publisher, steps: Steps, acknowledged: Acknowledged, command: list[str]) -> None:
    feed = publisher.feeds[0]
    if command[0] == "fill":
        # Faster than a million stored events; the next load's digest tells the indexer.
        blocks = array("Q", range(2**40, 2**40 + int(command[1])))
        feed.mirror._known.update(zip(blocks, blocks, strict=True))
        feed.mirror._held.store(0, blocks)
        return
    rate = float(command[2]) if len(command) > 2 else 0.0
    started = time.perf_counter()
    for number in range(int(command[1])):
        if rate:
            await asyncio.sleep(max(started + number / rate - time.perf_counter(), 0))
        elif not number % 64:
            while feed.seq - acknowledged.seq > WINDOW:
                await acknowledged.wait()
            await asyncio.sleep(0)
        publisher.kv_events(LocalRank(0), steps.next())
    await publisher.flush(5)


class Acknowledged:
    """The last seq that the replica is known to have."""

    def __init__(self) -> None:
        self.seq = 0
        self._moved = asyncio.Event()

    async def follow(self, url: str) -> None:
        client, _ = await bus.connect(url, name="bench-acks")
        await client.subscribe("bench.ack", cb=self._on_ack)

    async def wait(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    async def _on_ack(self, message: Any) -> None:
        self.seq = int(message.data)
        self._moved.set()


def _record(instance: Instance, endpoint: str, window: DpRange) -> Record:
    return Record(
        worker_id=instance.worker_id,
        epoch=instance.epoch,
        endpoint=endpoint,
        model="m",
        dp_group="bench",
        data_parallel_size=1,
        window=window,
        block_size=BLOCK_SIZE,
        total_kv_blocks=10**6,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        vocab_size=65536,
        engine="bench",
        state=State.READY,
    )


# --- the router's side


class Sink:
    """A replica that follows the indexer, acknowledges, and takes the time of what arrives."""

    def __init__(self, endpoint: str, acks: Any) -> None:
        self.replica = Replica(open_index(), Targets())
        self.follower = Follower([endpoint], "bench", "bench")
        self.seq = 0
        self.lags_us: list[int] = []
        self.restarts: list[str] = []
        self._acks = acks
        self._grown = asyncio.Event()
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        clock = asyncio.get_running_loop().time
        async for update in self.follower:
            if why := self.replica.apply(update, clock()):
                self.restarts.append(why)
                self.follower.restart(why)
            if isinstance(update, KvBatch):
                self.seq = update.seq
                self.lags_us.append(time.time_ns() // 1000 - update.published_us)
                if not update.seq % ACK_EVERY:
                    await self._acks.publish("bench.ack", str(update.seq).encode())
            elif isinstance(update, RankBlocks):
                self.seq = update.seq
            self._grown.set()

    async def reach(self, seq: int) -> None:
        while self.seq < seq:
            self._grown.clear()
            await self._grown.wait()


class Worker:
    """The worker's process, by its commands."""

    def __init__(self, nats_url: str, registry: str) -> None:
        arguments = [sys.executable, __file__, "--worker", f"--nats-url={nats_url}", f"--registry={registry}"]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def obey(self, command: str) -> int:
        """Returns the worker's seq after it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = await asyncio.to_thread(self.process.stdout.readline)
        return int(answer.split()[1])


@contextlib.contextmanager
def child(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """A service as a process; its addresses once it is ready."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments, "--log-level=warning"],
        env={**os.environ, "RANKWAY_READY_FD": str(writing)},
        pass_fds=(writing,),
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            yield process, json.loads(pipe.readline())
    finally:
        process.terminate()
        process.wait(10)


@contextlib.contextmanager
def nats_server() -> Iterator[str]:
    binary = Path(sys.executable).with_name("nats-server")
    with tempfile.TemporaryDirectory() as store:
        ports = Path(store) / "ports"
        ports.mkdir()
        process = subprocess.Popen(
            [str(binary), "-a", "127.0.0.1", "-p", "-1", "-js", "-sd", store, "--ports_file_dir", str(ports)],
            stderr=subprocess.DEVNULL,
        )
        try:
            while not (found := [path for path in ports.iterdir() if path.stat().st_size]):
                time.sleep(0.01)
            yield json.loads(found[0].read_text())["nats"][0]
        finally:
            process.terminate()
            process.wait(10)


async def plain_rate(url: str, worker: Worker, first_seq: int, batches: int) -> float:
    """Messages a second that nats-py takes in from the same publisher, doing nothing but keeping it in step."""
    client = await nats.connect(url)
    count, ended = 0, asyncio.Event()

    async def on_message(message: Any) -> None:
        nonlocal count
        count += 1
        if not count % ACK_EVERY:
            await client.publish("bench.ack", str(first_seq + count).encode())
        if count >= batches:
            ended.set()

    await client.subscribe(bus.kv_subject("bench"), cb=on_message, pending_msgs_limit=10**6, pending_bytes_limit=2**30)
    await client.flush()
    started = time.perf_counter()
    await worker.obey(f"burst {batches}")
    await ended.wait()
    rate = count / (time.perf_counter() - started)
    await client.close()
    return rate


async def measure(
    options: argparse.Namespace, nats_url: str, indexer: psutil.Process, endpoint: str, registry: str
) -> list[dict[str, Any]]:
    acks = await nats.connect(nats_url)
    worker = Worker(nats_url, registry)
    sink = Sink(endpoint, acks)
    try:
        await sink.reach(await worker.obey(f"burst {HELD_STEPS}"))
        sink.lags_us.clear()
        own = psutil.Process()
        before = _cpu_s(own), _cpu_s(indexer)
        started = time.perf_counter()
        await sink.reach(await worker.obey(f"burst {options.batches}"))
        burst = options.batches / (time.perf_counter() - started)
        own_us, indexer_us = (
            (after - b) / options.batches * 1e6 for after, b in zip((_cpu_s(own), _cpu_s(indexer)), before, strict=True)
        )
        sink.lags_us.clear()
        await sink.reach(await worker.obey(f"paced {int(options.rate * options.paced_s)} {options.rate}"))
        lags = sorted(sink.lags_us)
        sink.task.cancel()
        plain = await plain_rate(nats_url, worker, sink.seq, options.batches)
        ready_s = await snapshot_time(worker, endpoint)
    finally:
        sink.task.cancel()
        worker.process.stdin.close()  # type: ignore[union-attr]
        worker.process.wait(10)
        await acks.close()
    if sink.restarts:
        raise SystemExit(f"the replica had to follow afresh: {sink.restarts}")
    p50, p99 = lags[len(lags) // 2] / 1000, lags[len(lags) * 99 // 100] / 1000
    return [
        _row("batches from publish to replica, burst", burst, plain, "1/s", burst / plain),
        _row("KV events from publish to replica, burst", 2 * burst, 2 * plain, "1/s", burst / plain),
        _row("indexer's CPU a batch", indexer_us, None, "µs"),
        _row("replica's CPU a batch (Follow stream, decode, apply)", own_us, None, "µs"),
        _row(f"lag from publish to replica, {options.rate:g} batches/s, p50", p50, None, "ms"),
        _row(f"lag from publish to replica, {options.rate:g} batches/s, p99", p99, None, "ms"),
        _row("a new router's replica of 1,000,000 blocks is ready", ready_s, None, "s", reach=10, holds=ready_s < 10),
    ]


async def snapshot_time(worker: Worker, endpoint: str) -> float:
    """Seconds until a new replica has all blocks of a rank that holds SNAPSHOT_BLOCKS more."""
    await worker.obey(f"fill {SNAPSHOT_BLOCKS}")
    await worker.obey("burst 1")
    while True:
        replica = Replica(open_index(), Targets())
        started = time.perf_counter()
        async for update in Follower([endpoint], "bench", "new"):
            replica.apply(update, 0.0)
            if isinstance(update, ViewReady):
                break
        if len(replica.index) > SNAPSHOT_BLOCKS:
            return time.perf_counter() - started
        await asyncio.sleep(0.1)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _row(
    name: str,
    ours: float,
    theirs: float | None,
    unit: str,
    ratio: float | None = None,
    *,
    reach: float | None = None,
    holds: bool = True,
) -> dict[str, Any]:
    return {"name": name, "ours": ours, "theirs": theirs, "unit": unit, "ratio": ratio, "reach": reach, "holds": holds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=40_000, help="batches of the burst")
    parser.add_argument("--paced-s", type=float, default=5.0, help="seconds of the paced part")
    parser.add_argument("--rate", type=float, default=1000.0, help="batches a second of the paced part")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--nats-url", help=argparse.SUPPRESS)
    parser.add_argument("--registry", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logs.configure("warning", service="bench")
    if options.worker:
        uvloop.run(worker(options))
        return
    with contextlib.ExitStack() as stack:
        nats_url = stack.enter_context(nats_server())
        _, registry = stack.enter_context(child("rankway.registry", "--grpc-listen=127.0.0.1:0", f"--nats-url={nats_url}"))
        arguments = ["--grpc-listen=127.0.0.1:0", f"--nats-url={nats_url}", f"--registry-endpoints={registry['grpc']}"]
        indexer, addresses = stack.enter_context(child("rankway.indexer", *arguments))
        rows = uvloop.run(measure(options, nats_url, psutil.Process(indexer.pid), addresses["grpc"], registry["grpc"]))
    for row in rows:
        beside = f"   plain nats-py {row['theirs']:,.0f}, ratio {row['ratio']:.2f}" if row["theirs"] else ""
        print(f"{row['name']:60} {row['ours']:12,.2f} {row['unit']}{beside}")
    if path := os.environ.get("JSON"):
        Path(path).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
