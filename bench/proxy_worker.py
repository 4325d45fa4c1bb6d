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
import uvloop

from rankway import rpc
from rankway.h2.calls import Call
from rankway.h2.connection import Http2Limits
from rankway.h2.endpoint import Endpoint
from rankway.h2.messages import framed
from rankway.ranks import DpRange
from rankway.registry.client import LeaseKeeper, RegistryClient
from rankway.registry.records import Record, State, to_proto
from rankway.v1 import generate_pb2, registry_pb2, types_pb2, worker_pb2

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


class Paced:
    """A stream that gets a token a step. Most of its deltas' bytes are always the same."""

    __slots__ = ("_first", "_head", "left", "stream")

    def __init__(self, stream: int, tokens: int) -> None:
        self.stream = stream
        self.left = tokens
        self._first = True
        text = stamp()
        self._head = delta_bytes(stream, TOKEN, text, first=False, last=False).removesuffix(text)

    def delta(self, text: bytes) -> bytes:
        """The next; there must be one left."""
        self.left -= 1
        if self.left and not self._first:
            return self._head + text
        first, self._first = self._first, False
        return delta_bytes(self.stream, TOKEN, text, first=first, last=not self.left)


class Session:
    """One Attach: the streams of one router, stepped together."""

    def __init__(self, call: Call, record: registry_pb2.WorkerRecord) -> None:
        self._call = call
        self._record = record
        self._deltas: list[bytes] = []
        self._paced: dict[int, dict[int, Paced]] = {}
        """By pace and stream; there is a timer as long as there is an entry."""
        call.on_room = self._write

    def on_message(self, message: bytes) -> None:
        request = worker_pb2.AttachRequest.FromString(message)
        if request.HasField("start"):
            self._start(request.start)
        elif request.HasField("abort"):
            for running in self._paced.values():
                running.pop(request.abort.stream, None)
        else:
            self._call.send_message(worker_pb2.AttachResponse(welcome=worker_pb2.Welcome(record=self._record)))

    def on_end(self) -> None:
        self._paced.clear()
        self._call.finish()

    def _write(self) -> None:
        """Send what has come since the last time, unless the router has still to read that."""
        if self._deltas and self._call.clear and not self._call.over:
            step = b"".join(self._deltas)
            self._deltas = []
            self._call.send(framed(b"\x12%b%b" % (varint(len(step)), step)), now=True)

    def _start(self, start: worker_pb2.Start) -> None:
        loop = asyncio.get_running_loop()
        tokens, pace_ms = start.sampling.max_tokens, start.sampling.seed
        if pace_ms <= 0:
            if pace_ms < 0 or tokens <= 16:  # short answers are those that don't stream
                self._add(start.stream, TOKEN * tokens, stamp() * tokens, first=True, last=True)
            else:
                text = stamp()
                self._add(start.stream, TOKEN, text, first=True, last=False)
                self._deltas += [delta_bytes(start.stream, TOKEN, text, first=False, last=False)] * (tokens - 2)
                self._add(start.stream, TOKEN, text, first=False, last=True)
            self._call.wake()
            return
        if pace_ms not in self._paced:
            self._paced[pace_ms] = {}
            due = loop.time() + pace_ms / 1000
            loop.call_at(due, self._step, pace_ms, due)
        self._paced[pace_ms][start.stream] = Paced(start.stream, tokens)

    def _step(self, pace_ms: int, due: float) -> None:
        text = stamp()
        running = self._paced.get(pace_ms, {})
        self._deltas += [paced.delta(text) for paced in running.values()]
        self._write()
        for paced in [paced for paced in running.values() if not paced.left]:
            del running[paced.stream]
        if running:
            due += pace_ms / 1000
            asyncio.get_running_loop().call_at(due, self._step, pace_ms, due)
        else:
            self._paced.pop(pace_ms, None)

    def _add(self, stream: int, tokens: bytes, text: bytes, *, first: bool, last: bool) -> None:
        self._deltas.append(delta_bytes(stream, tokens, text, first=first, last=last))


class Worker:
    """What of the services a router, an indexer and a direct client need."""

    def __init__(self, record: Record) -> None:
        self._record = to_proto(record)
        self.methods = {"/rankway.v1.Generation/Generate": self._generate}
        self.streamed = {"/rankway.v1.Worker/Attach": lambda call: Session(call, self._record)}

    async def Snapshot(self, request: worker_pb2.SnapshotRequest, context: Any) -> AsyncIterator[worker_pb2.SnapshotResponse]:
        yield worker_pb2.SnapshotResponse(epoch=self._record.epoch)

    def _generate(self, call: Call, message: bytes) -> None:
        request = generate_pb2.GenerateRequest.FromString(message)
        send(call, routed=generate_pb2.Routed(worker_id="w"))
        pace_s, tokens = request.sampling.seed / 1000, request.sampling.max_tokens
        if pace_s > 0:
            loop = asyncio.get_running_loop()
            loop.call_at(loop.time() + pace_s, self._next, call, pace_s, tokens, loop.time() + pace_s)
            return
        for _ in range(tokens):
            send_token(call)
        finish(call)

    def _next(self, call: Call, pace_s: float, left: int, due: float) -> None:
        send_token(call)
        if left > 1:
            asyncio.get_running_loop().call_at(due + pace_s, self._next, call, pace_s, left - 1, due + pace_s)
        else:
            finish(call)


def send(call: Call, **message: Any) -> None:
    call.send_message(generate_pb2.GenerateResponse(**message))


def send_token(call: Call) -> None:
    send(call, delta=generate_pb2.Delta(text=stamp().decode(), token_ids=types_pb2.TokenIds(packed=TOKEN)))


def finish(call: Call) -> None:
    send(call, finished=generate_pb2.Finished(reason=LENGTH))
    call.finish()


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
    endpoint = Endpoint(rpc.Server(["rankway.v1.Worker", "rankway.v1.Generation"]), Http2Limits())
    worker = Worker(record)
    snapshot = grpc.unary_stream_rpc_method_handler(
        worker.Snapshot,
        request_deserializer=worker_pb2.SnapshotRequest.FromString,
        response_serializer=worker_pb2.SnapshotResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler("rankway.v1.Worker", {"Snapshot": snapshot})
    endpoint.inner.grpc.add_generic_rpc_handlers((handler,))
    await endpoint.bind(f"127.0.0.1:{port}")
    await endpoint.start(worker.methods, worker.streamed)
    keeper = LeaseKeeper(RegistryClient([registry]), record)
    await keeper.register()
    await keeper.run()


if __name__ == "__main__":
    name, first, number, group, listen, registry_endpoint = sys.argv[1:]
    uvloop.run(main(name, int(first), int(number), int(group), int(listen), registry_endpoint))
