"""The KV event stream of one vLLM rank, over ZeroMQ: subscribe, notice gaps, ask for replays.

Imported only together with vLLM, which brings pyzmq along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from rankway import logs
from rankway.errors import EngineFailed
from rankway.worker.engine import EngineEvent
from rankway.worker.vllm_events import REPLAY_END, Batch, Continuity, EventDecoder, MalformedBatch, Verdict

log = logs.get("worker.vllm")

ATTACH_TIMEOUT_S = 30.0
REPLAY_TIMEOUT_S = 5.0
PROBE_S = 5.0
"""Silence after which a replay is asked for: a batch that got lost at the end of a burst shows up in no later gap."""
RECEIVE_QUEUE = 100_000
"""Batches that ZeroMQ keeps for us, as many as vLLM's publisher keeps; beyond, it drops, which shows as a gap."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where a rank publishes, as AsyncLLM.get_kv_event_sources() tells it."""

    endpoint: str
    replay_endpoint: str


@dataclass(slots=True)
class StreamCounts:
    """What happened on a rank's stream since the start."""

    batches: int = 0
    replayed: int = 0
    gaps: int = 0
    losses: int = 0
    malformed: int = 0


class RankStream:
    """Reads one rank's batches and hands their events on, in order and without holes.

    Attributes:
        source: where it reads.
        counts: what happened so far.

    Args:
        dp_rank: global rank, for the log.
        deliver: takes the events of a batch.
        lose: called with the reason when batches are gone for good; events of later batches still come.
    """

    def __init__(
        self,
        dp_rank: int,
        source: EventSource,
        deliver: Callable[[Sequence[EngineEvent]], None],
        lose: Callable[[str], None],
    ) -> None:
        self.counts = StreamCounts()
        self.decoder = EventDecoder()
        self._dp_rank = dp_rank
        self.source = source
        self._deliver = deliver
        self._lose = lose
        self._continuity = Continuity()
        self._context = zmq.asyncio.Context()
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.linger = 0

    async def attach(self) -> None:
        """Connect and catch up with what was published so far; the stream is known to work afterwards.

        Raises:
            EngineFailed: the publisher doesn't answer within ATTACH_TIMEOUT_S.
        """
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                await self._connect()
                await self._catch_up()
        except (TimeoutError, zmq.ZMQError) as error:
            raise EngineFailed(
                f"dp_rank={self._dp_rank}: no answer from vLLM's KV event publisher at {self.source.endpoint} "
                f"(replay {self.source.replay_endpoint}): {type(error).__name__}"
            ) from error

    async def run(self) -> None:
        """Read until cancelled."""
        self._subscriber.rcvtimeo = int(PROBE_S * 1000)
        while True:
            try:
                _topic, seq, payload = await self._subscriber.recv_multipart()
            except zmq.Again:
                await self._catch_up()
                continue
            self.counts.batches += 1
            await self._take_live(int.from_bytes(seq, "big"), payload)

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        self._context.destroy(linger=0)

    async def _connect(self) -> None:
        self._subscriber.rcvhwm = RECEIVE_QUEUE
        self._subscriber.subscribe(b"")
        monitor = self._subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._subscriber.connect(self.source.endpoint)
            await recv_monitor_message(monitor)
        finally:
            self._subscriber.disable_monitor()

    async def _take_live(self, seq: int, payload: bytes) -> None:
        batch = self._decode(seq, payload)
        if batch is None:
            return
        verdict = self._continuity.judge(seq, batch.ts)
        if verdict is Verdict.RESTARTED:
            self._give_up(f"the publisher began anew at batch {seq}, {self._continuity.expected} was expected")
            self._continuity = Continuity()
            verdict = self._continuity.judge(seq, batch.ts)
        if verdict is Verdict.GAP:
            self.counts.gaps += 1
            log.warning("gap in vLLM's KV events", dp_rank=self._dp_rank, expected=self._continuity.expected, seq=seq)
            await self._catch_up(goal=seq)
            verdict = self._continuity.judge(seq, batch.ts)
        if verdict is Verdict.GAP:
            self._give_up(f"batches {self._continuity.expected} … {seq - 1} can't be had: the replay buffer didn't give them")
        if verdict is not Verdict.SEEN:
            self._apply(batch)

    async def _catch_up(self, goal: int = 0) -> None:
        """Apply what the publisher's replay buffer has beyond what we know, for as long as that brings something.

        A buffer that begins later than we know has lost what was before: no live batch has to come to show that. Under load a
        replay always brings something, so the live stream takes over again once it has a batch and all before `goal` is known.
        """
        while True:
            before = self._continuity.expected
            for seq, payload in await self._replay(before):
                batch = self._decode(seq, payload)
                if batch is None:
                    continue
                verdict = self._continuity.judge(seq, batch.ts)
                if verdict is Verdict.GAP:
                    self._give_up(f"batches {self._continuity.expected} … {seq - 1} are gone from the replay buffer")
                if verdict in (Verdict.NEXT, Verdict.GAP):
                    self.counts.replayed += 1
                    self._apply(batch)
            expected = self._continuity.expected
            if expected == before or (expected >= goal and await self._subscriber.poll(0)):
                return

    async def _replay(self, start: int) -> list[tuple[int, bytes]]:
        """The publisher's answer to a replay request: the batches from `start` that it still has. Empty if it's silent."""
        answers: list[tuple[int, bytes]] = []
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.rcvhwm = 0
            socket.rcvtimeo = int(REPLAY_TIMEOUT_S * 1000)
            socket.connect(self.source.replay_endpoint)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            try:
                while True:
                    _empty, _topic, seq_bytes, payload = await socket.recv_multipart()
                    seq = int.from_bytes(seq_bytes, "big", signed=True)
                    if seq == REPLAY_END:
                        return answers
                    answers.append((seq, payload))
            except zmq.Again:
                log.warning("vLLM's replay socket is silent", dp_rank=self._dp_rank, endpoint=self.source.replay_endpoint)
                return answers

    def _decode(self, seq: int, payload: bytes) -> Batch | None:
        try:
            return self.decoder.decode(seq, payload)
        except MalformedBatch as error:
            self.counts.malformed += 1
            self._give_up(str(error))
            self._continuity.skip(seq)
            return None

    def _apply(self, batch: Batch) -> None:
        self._continuity.applied(batch.seq, batch.ts)
        if batch.events:
            self._deliver(batch.events)

    def _give_up(self, reason: str) -> None:
        self.counts.losses += 1
        self._lose(reason)
