"""A trivially fast Rankway worker: what stands behind the router in `make bench-proxy`. Same engine as `proxy_backend`.

    python bench/proxy_worker.py WORKER_ID START_RANK SIZE DATA_PARALLEL_SIZE PORT REGISTRY

It registers, answers Snapshot with nothing, and speaks Attach with a message per step, as a worker does. Generate is there for
clients that come directly or through a plain relay. `sampling.seed` is the pace in ms; 0: a whole answer at once, each token a
delta of its own; -1: at once, as one delta (which is what a worker makes of tokens that come faster than it can write).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import uvloop

from rankway import rpc
from rankway.ranks import DpRange
from rankway.registry.client import LeaseKeeper, RegistryClient
from rankway.registry.records import Record, State, to_proto
from rankway.v1 import generate_pb2, generate_pb2_grpc, types_pb2, worker_pb2

LENGTH = types_pb2.FINISH_REASON_LENGTH
TOKEN = (65).to_bytes(4, "little")


def stamp() -> bytes:
    """A token's text: 14 characters."""
    return b"~%013d" % (time.monotonic_ns() // 1000)


def delta_bytes(stream: int, tokens: bytes, text: bytes, *, first: bool, last: bool) -> bytes:
    """A StepDelta in a Step, as bytes: making it of protobuf objects would be the slowest part of this worker."""
    fields = b"\x08%b\x1a%b%b\x22%b%b" % (varint(stream), varint(len(tokens)), tokens, varint(len(text)), text)
    if last:
        fields += b"\x30%c" % LENGTH
    if first:
        fields += b"\x38\x00"  # cached_tokens = 0
    return b"\x0a%b%b" % (varint(len(fields)), fields)


def varint(value: int) -> bytes:
    if value < 128:
        return value.to_bytes()
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class Session:
    """One Attach: the streams of one router, stepped together."""

    def __init__(self) -> None:
        self.filled = asyncio.Event()
        self._deltas: list[bytes] = []
        self._paced: dict[int, dict[int, int]] = {}
        """By pace: tokens left by stream; there is a timer as long as there is an entry."""

    def take(self) -> bytes:
        """What has come since the last time, as an AttachResponse."""
        step = b"".join(self._deltas)
        self._deltas = []
        self.filled.clear()
        return b"\x12%b%b" % (varint(len(step)), step)

    def start(self, start: worker_pb2.Start) -> None:
        tokens, pace_ms = start.sampling.max_tokens, start.sampling.seed
        if pace_ms <= 0:
            if pace_ms < 0 or tokens <= 16:  # short answers are those that don't stream
                self._add(start.stream, TOKEN * tokens, stamp() * tokens, first=True, last=True)
            else:
                text = stamp()
                self._add(start.stream, TOKEN, text, first=True, last=False)
                self._deltas += [delta_bytes(start.stream, TOKEN, text, first=False, last=False)] * (tokens - 2)
                self._add(start.stream, TOKEN, text, first=False, last=True)
            self.filled.set()
            return
        if pace_ms not in self._paced:
            self._paced[pace_ms] = {}
            due = asyncio.get_running_loop().time() + pace_ms / 1000
            asyncio.get_running_loop().call_at(due, self._step, pace_ms, due)
        self._paced[pace_ms][start.stream] = -tokens

    def abort(self, stream: int) -> None:
        for running in self._paced.values():
            running.pop(stream, None)

    def _step(self, pace_ms: int, due: float) -> None:
        text = stamp()
        running = self._paced[pace_ms]
        for stream, left in list(running.items()):
            more = abs(left) - 1
            self._add(stream, TOKEN, text, first=left < 0, last=not more)
            if more:
                running[stream] = more
            else:
                del running[stream]
        self.filled.set()
        if running:
            due += pace_ms / 1000
            asyncio.get_running_loop().call_at(due, self._step, pace_ms, due)
        else:
            del self._paced[pace_ms]

    def _add(self, stream: int, tokens: bytes, text: bytes, *, first: bool, last: bool) -> None:
        self._deltas.append(delta_bytes(stream, tokens, text, first=first, last=last))


class Worker:
    """What of the service a router and an indexer need; Attach answers with bytes."""

    def __init__(self, record: Record) -> None:
        self._record = to_proto(record)

    async def Attach(self, requests: AsyncIterator[worker_pb2.AttachRequest], context: Any) -> None:
        await context.read()
        welcome = worker_pb2.AttachResponse(welcome=worker_pb2.Welcome(record=self._record))
        await context.write(welcome.SerializeToString())
        session = Session()
        writing = asyncio.create_task(self._write(session, context))
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                if message.HasField("start"):
                    session.start(message.start)
                else:
                    session.abort(message.abort.stream)
        finally:
            writing.cancel()

    async def Snapshot(self, request: worker_pb2.SnapshotRequest, context: Any) -> AsyncIterator[worker_pb2.SnapshotResponse]:
        yield worker_pb2.SnapshotResponse(epoch=self._record.epoch)

    async def _write(self, session: Session, context: Any) -> None:
        while True:
            await session.filled.wait()
            await context.write(session.take())


class Generation(generate_pb2_grpc.GenerationServicer):
    async def Generate(self, request: generate_pb2.GenerateRequest, context: Any) -> None:
        pace_s, tokens = request.sampling.seed / 1000, request.sampling.max_tokens
        await context.write(generate_pb2.GenerateResponse(routed=generate_pb2.Routed(worker_id="w")))
        loop = asyncio.get_running_loop()
        due = loop.time()
        for _ in range(tokens):
            if pace_s:
                due += pace_s
                await asyncio.sleep(due - loop.time())
            delta = generate_pb2.Delta(text=stamp().decode(), token_ids=types_pb2.TokenIds(packed=TOKEN))
            await context.write(generate_pb2.GenerateResponse(delta=delta))
        await context.write(generate_pb2.GenerateResponse(finished=generate_pb2.Finished(reason=LENGTH)))


def record_of(worker_id: str, window: DpRange, data_parallel_size: int, port: int) -> Record:
    """Limits that no run of the bench reaches: what is measured is the proxy."""
    return Record(
        worker_id=worker_id,
        epoch=int(time.time() * 1000),
        endpoint=f"127.0.0.1:{port}",
        model="bench",
        dp_group="bench",
        data_parallel_size=data_parallel_size,
        window=window,
        block_size=16,
        total_kv_blocks=10_000_000,
        max_num_seqs=1_000_000,
        max_num_batched_tokens=100_000_000,
        max_model_len=131_072,
        vocab_size=512,
        engine="sim",
        state=State.READY,
        tokenizer="bytes",
    )


async def main(worker_id: str, start_rank: int, size: int, data_parallel_size: int, port: int, registry: str) -> None:
    record = record_of(worker_id, DpRange(start_rank, size), data_parallel_size, port)
    server = rpc.Server(["rankway.v1.Worker", "rankway.v1.Generation"])
    worker = Worker(record)
    handlers = {
        "Attach": grpc.stream_stream_rpc_method_handler(
            worker.Attach, request_deserializer=worker_pb2.AttachRequest.FromString, response_serializer=None
        ),
        "Snapshot": grpc.unary_stream_rpc_method_handler(
            worker.Snapshot,
            request_deserializer=worker_pb2.SnapshotRequest.FromString,
            response_serializer=worker_pb2.SnapshotResponse.SerializeToString,
        ),
    }
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("rankway.v1.Worker", handlers),))
    generate_pb2_grpc.add_GenerationServicer_to_server(Generation(), server.grpc)
    await server.start(f"127.0.0.1:{port}")
    keeper = LeaseKeeper(RegistryClient([registry]), record)
    await keeper.register()
    await keeper.run()


if __name__ == "__main__":
    name, first, number, group, listen, registry_endpoint = sys.argv[1:]
    uvloop.run(main(name, int(first), int(number), int(group), int(listen), registry_endpoint))
