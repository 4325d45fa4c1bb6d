"""Links to workers: one Attach stream per worker instance, kept up for as long as the instance is a member.

The hot path: a Step arrives, each of its deltas goes straight to the request it belongs to. No task, log or metric per token.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from rankway import logs
from rankway.errors import Overloaded, RankwayError, Unavailable
from rankway.ranks import Instance
from rankway.router import steps
from rankway.router.attach_wire import BidiCall, CallFailed
from rankway.v1 import worker_pb2

log = logs.get("attach")

WELCOME_TIMEOUT_S = 5.0
RETRY_MIN_S, RETRY_MAX_S = 0.05, 1.0
"""Pause before attaching again: doubles, with jitter."""

MAX_OUTBOX = 4096
"""Starts and Aborts that wait to be written; a worker that doesn't read that many is as good as full."""

ATTACH = "/rankway.v1.Worker/Attach"


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
        self._call: BidiCall | None = None
        self._welcome: asyncio.Future[None] | None = None
        self._retired = asyncio.Event()
        self._emptied: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """Requests on the link."""
        return len(self._receivers)

    @property
    def outbox_size(self) -> int:
        return len(self._call.waiting) if self._call is not None else 0

    def start(self, start: worker_pb2.Start, receiver: Receiver) -> int:
        """Send a request; `start.stream` is set here and returned.

        Raises:
            Unavailable: the link is down. Overloaded: the worker doesn't read.
        """
        if not self.connected:
            raise Unavailable(f"worker {self.instance.worker_id} is not connected")
        if self.outbox_size >= MAX_OUTBOX:
            raise Overloaded(f"worker {self.instance.worker_id} doesn't read: {self.outbox_size} messages wait")
        stream = start.stream = next(self._streams)
        self._receivers[stream] = receiver
        self._send(worker_pb2.AttachRequest(start=start))
        return stream

    def abort(self, stream: int) -> None:
        """Stop a request; its receiver hears nothing more."""
        if self._receivers.pop(stream, None) is not None and self.connected:
            self._send(worker_pb2.AttachRequest(abort=worker_pb2.Abort(stream=stream)))
        self._close_if_idle()

    def hand_over(self, stream: int, receiver: Receiver) -> None:
        """Another receiver takes what is still to come for a request."""
        if stream in self._receivers:
            self._receivers[stream] = receiver

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
                    async with asyncio.timeout(pause_s * random.uniform(0.5, 1.0)):
                        await self._retired.wait()
                self.reconnects += 1
        finally:
            self._retired.set()
            self._lose("the router gave the link up")

    def _send(self, message: worker_pb2.AttachRequest) -> None:
        if self._call is not None:
            self._call.send(message.SerializeToString())

    async def _attach_once(self) -> str:
        """Serve one stream until it ends; returns why it ended."""
        idle = asyncio.create_task(self._idle())
        self._welcome = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                self._call = call = await BidiCall.open(self.endpoint, ATTACH, self._received)
                hello = worker_pb2.Hello(router_id=self._router_id, epoch=self.instance.epoch)
                self._send(worker_pb2.AttachRequest(hello=hello))
                await _first(self._welcome, call.ended)
            await _first(call.ended, idle)
            return call.ended.result() if call.ended.done() else "nothing runs on it any more"
        except CallFailed as error:
            return str(error)
        except TimeoutError:
            return f"no Welcome within {WELCOME_TIMEOUT_S:.0f} s"
        finally:
            idle.cancel()
            await asyncio.gather(idle, return_exceptions=True)
            if self._call is not None:
                self._call.close()
                self._call = None

    def _received(self, message: bytes) -> None:
        """Called with each message of the stream; the first is the Welcome. Raises `steps.MALFORMED`."""
        if self.connected:
            steps.dispatch(message, self._receivers)
        else:
            self._greeted(worker_pb2.AttachResponse.FromString(message))

    def _greeted(self, answer: worker_pb2.AttachResponse) -> None:
        record = answer.welcome.record
        if (record.worker_id, record.epoch) != (self.instance.worker_id, self.instance.epoch):
            what = f"worker {record.worker_id!r} of epoch {record.epoch}" if answer.HasField("welcome") else "no Welcome"
            if self._call is not None:
                self._call.close(f"the first message is from {what}")
            return
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(None)
        if self._call is not None:
            self._call.short_way = steps.frame_dispatcher(self._receivers)
        self.connected = True
        log.info("attached", worker_id=self.instance.worker_id, epoch=self.instance.epoch, endpoint=self.endpoint)
        self._on_up(self)

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
            try:
                receiver.on_lost(error)
            except Exception:
                # One request's fault must not leave the others waiting.
                log.exception("a request failed on a lost link", worker_id=self.instance.worker_id)


async def _first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


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
        if known is not None and not self._tasks[instance].done():
            known.revive()
            if known.connected:
                self._on_up(known)
            return
        link = Link(instance, endpoint, self._router_id, self._on_up, self._on_down)
        self._links[instance] = link
        task = self._tasks[instance] = asyncio.create_task(link.run(), name=f"attach {instance.worker_id}/{instance.epoch}")
        task.add_done_callback(lambda task: self._ended(instance, task))

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
        if self._tasks.get(instance) is task:  # another one may have been opened since it returned
            del self._links[instance]
            del self._tasks[instance]
        if not task.cancelled() and task.exception() is not None:
            log.error("a link failed", worker_id=instance.worker_id, exc_info=task.exception())
