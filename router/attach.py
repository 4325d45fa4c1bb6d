"""Links to workers: one Attach stream per worker instance, kept up for as long as the instance is a member.

The hot path: a Step arrives, each of its deltas goes straight to the request it belongs to. No task, log or metric per token.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import grpc
import grpc.aio

from rankway import logs, rpc
from rankway.errors import Overloaded, RankwayError, Unavailable
from rankway.ranks import Instance
from rankway.v1 import worker_pb2, worker_pb2_grpc

log = logs.get("attach")

WELCOME_TIMEOUT_S = 5.0
RETRY_MIN_S, RETRY_MAX_S = 0.05, 1.0
"""Pause before attaching again: doubles, with jitter."""

MAX_OUTBOX = 4096
"""Starts and Aborts that wait to be written; a worker that doesn't read that many is as good as full."""

AttachCall = grpc.aio.StreamStreamCall[worker_pb2.AttachRequest, worker_pb2.AttachResponse]


class Receiver(Protocol):
    """A request's side of a link. Methods must neither raise nor block."""

    def on_delta(self, delta: worker_pb2.StepDelta) -> None:
        """What one engine step did for the request, errors included."""

    def on_lost(self, error: RankwayError) -> None:
        """The link is broken: nothing more comes, the worker has aborted the request or is gone."""


class Link:
    """One Attach to one worker instance.

    Args:
        on_up, on_down: called when the worker has answered, and when the stream has broken (before its requests hear of it).
    """

    def __init__(
        self, instance: Instance, endpoint: str, router_id: str, on_up: Callable[[Link], None], on_down: Callable[[Link], None]
    ) -> None:
        self.instance = instance
        self.endpoint = endpoint
        self.connected = False
        self.reconnects = 0
        self._router_id = router_id
        self._on_up = on_up
        self._on_down = on_down
        self._receivers: dict[int, Receiver] = {}
        self._streams = itertools.count(1)
        self._outbox: deque[worker_pb2.AttachRequest] = deque()
        self._filled = asyncio.Event()
        self._retired = asyncio.Event()
        self._emptied: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """Requests on the link."""
        return len(self._receivers)

    @property
    def outbox_size(self) -> int:
        return len(self._outbox)

    def start(self, start: worker_pb2.Start, receiver: Receiver) -> int:
        """Send a request; `start.stream` is set here and returned.

        Raises:
            Unavailable: the link is down. Overloaded: the worker doesn't read.
        """
        if not self.connected:
            raise Unavailable(f"worker {self.instance.worker_id} is not connected")
        if len(self._outbox) >= MAX_OUTBOX:
            raise Overloaded(f"worker {self.instance.worker_id} doesn't read: {len(self._outbox)} messages wait")
        stream = start.stream = next(self._streams)
        self._receivers[stream] = receiver
        self._send(worker_pb2.AttachRequest(start=start))
        return stream

    def abort(self, stream: int) -> None:
        """Stop a request; its receiver hears nothing more."""
        if self._receivers.pop(stream, None) is not None and self.connected:
            self._send(worker_pb2.AttachRequest(abort=worker_pb2.Abort(stream=stream)))
        self._close_if_idle()

    def forget(self, stream: int) -> None:
        """The request has ended by itself."""
        self._receivers.pop(stream, None)
        self._close_if_idle()

    def retire(self) -> None:
        """Take nothing new; `run` returns once the requests that run have ended."""
        self._retired.set()
        self._close_if_idle()

    def revive(self) -> None:
        """The worker is a member again."""
        self._retired.clear()

    async def run(self) -> None:
        """Attach, and again whenever the stream breaks, until retired and idle. On cancellation the requests are lost."""
        pause_s = RETRY_MIN_S
        try:
            while not self._retired.is_set():
                began = asyncio.get_running_loop().time()
                reason = await self._attach_once()
                lived_s = asyncio.get_running_loop().time() - began
                self._lose(reason)
                if self._retired.is_set():
                    return
                pause_s = RETRY_MIN_S if lived_s > RETRY_MAX_S else min(2 * pause_s, RETRY_MAX_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._retired.wait(), pause_s * random.uniform(0.5, 1.0))
                self.reconnects += 1
        finally:
            self._retired.set()
            self._lose("the router gave the link up")

    def _send(self, message: worker_pb2.AttachRequest) -> None:
        self._outbox.append(message)
        self._filled.set()

    async def _attach_once(self) -> str:
        """Serve one stream until it ends; returns why it ended."""
        # A channel of its own each time: one that has seen its peer restart would stay in back-off.
        channel = rpc.open_channel(self.endpoint)
        tasks: list[asyncio.Task[None]] = []
        try:
            call = worker_pb2_grpc.WorkerStub(channel).Attach()
            await self._greet(call)
            tasks = [asyncio.create_task(role) for role in (self._read(call), self._write(call), self._idle())]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return "the stream has ended"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            return str(error)
        except TimeoutError:
            return f"no Welcome within {WELCOME_TIMEOUT_S:.0f} s"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await channel.close()

    async def _greet(self, call: AttachCall) -> None:
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            hello = worker_pb2.Hello(router_id=self._router_id, epoch=self.instance.epoch)
            await call.write(worker_pb2.AttachRequest(hello=hello))
            welcome = await call.read()
        if welcome is grpc.aio.EOF:
            raise grpc.aio.UsageError("the worker ended the stream before its Welcome")
        self._outbox.clear()
        self.connected = True
        log.info("attached", worker_id=self.instance.worker_id, epoch=self.instance.epoch, endpoint=self.endpoint)
        self._on_up(self)

    async def _read(self, call: AttachCall) -> None:
        receivers = self._receivers
        while True:
            message = await call.read()
            if not isinstance(message, worker_pb2.AttachResponse):
                return  # grpc.aio.EOF
            for delta in message.step.deltas:
                receiver = receivers.get(delta.stream)
                if receiver is not None:
                    receiver.on_delta(delta)

    async def _write(self, call: AttachCall) -> None:
        outbox, filled = self._outbox, self._filled
        while True:
            while outbox:
                await call.write(outbox.popleft())
            filled.clear()
            await filled.wait()

    async def _idle(self) -> None:
        """Return once the link is retired and nothing runs on it."""
        while True:
            await self._retired.wait()
            if not self._receivers:
                return
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied

    def _close_if_idle(self) -> None:
        if not self._receivers and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def _lose(self, reason: str) -> None:
        was_connected, self.connected = self.connected, False
        self._outbox.clear()
        if was_connected:
            note = log.info if self._retired.is_set() else log.warning
            note(
                "detached",
                worker_id=self.instance.worker_id,
                epoch=self.instance.epoch,
                reason=reason,
                requests=len(self._receivers),
            )
            self._on_down(self)
        receivers = list(self._receivers.values())
        self._receivers.clear()
        error = Unavailable(f"worker {self.instance.worker_id} was lost: {reason}")
        for receiver in receivers:
            receiver.on_lost(error)


class Links:
    """The links to all members. `run` owns their tasks."""

    def __init__(self, router_id: str, on_up: Callable[[Link], None], on_down: Callable[[Link], None]) -> None:
        self._router_id = router_id
        self._on_up = on_up
        self._on_down = on_down
        self._links: dict[Instance, Link] = {}
        self._tasks: dict[Instance, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    def get(self, instance: Instance) -> Link | None:
        return self._links.get(instance)

    def open(self, instance: Instance, endpoint: str) -> None:
        """Attach to a worker that has joined, or keep the link of one that is back."""
        known = self._links.get(instance)
        if known is not None:
            known.revive()
            if known.connected:
                self._on_up(known)
            return
        link = Link(instance, endpoint, self._router_id, self._on_up, self._on_down)
        self._links[instance] = link
        self._tasks[instance] = asyncio.create_task(link.run(), name=f"attach {instance.worker_id}/{instance.epoch}")
        self._tasks[instance].add_done_callback(lambda task: self._ended(instance, task))

    def retire(self, instance: Instance) -> None:
        """The worker has left: the link ends when its requests have."""
        link = self._links.get(instance)
        if link is not None:
            link.retire()

    async def close(self) -> None:
        """Give up every link; requests on them are lost."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, instance: Instance, task: asyncio.Task[None]) -> None:
        del self._links[instance]
        del self._tasks[instance]
        if not task.cancelled() and task.exception() is not None:
            log.error("a link failed", worker_id=instance.worker_id, exc_info=task.exception())
