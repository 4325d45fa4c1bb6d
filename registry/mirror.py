"""Keeps a `View` equal to the bucket: one JetStream consumer, loaded anew whenever a change may have been missed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import UTC, datetime

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api

from rankway import logs
from rankway.bus import BusStatus
from rankway.errors import Unavailable
from rankway.registry.bucket import Bucket
from rankway.registry.view import Entry, View

log = logs.get("registry.mirror")

SILENCE_S = 3.5
"""The consumer sends a heartbeat each second; after so long without one it is taken as lost."""

LOAD_TIMEOUT_S = 10.0
RETRY_S = 0.2
QUEUE_SIZE = 4096
"""Delivered changes not yet applied. When it is full the NATS client buffers up to its own limit, then drops; the hole in the
consumer's sequence is seen and the view loaded anew."""


class Mirror:
    """Owns the feed of a view. `run` is its only task."""

    def __init__(self, client: Client, status: BusStatus, bucket: Bucket, view: View, lease_s: float) -> None:
        self.view = view
        self.reloads = 0
        self._client = client
        self._status = status
        self._bucket = bucket
        self._lease_s = lease_s
        self._base = 0
        self._following = False
        self._loaded = asyncio.Event()
        self._changed = asyncio.Event()
        self._state_changed = asyncio.Event()

    @property
    def following(self) -> bool:
        """Whether the view is up to date, as far as this process can know."""
        return self._following

    @property
    def is_loaded(self) -> bool:
        """Whether there is a view to show, be it old."""
        return self._loaded.is_set()

    async def state_changed(self) -> None:
        """Wait until `following` has changed since the last call (one waiter)."""
        await self._state_changed.wait()
        self._state_changed.clear()

    def revision_of(self, sequence: int) -> int:
        """The revision of a write to the bucket."""
        return self._base + sequence

    async def loaded(self) -> None:
        """Wait for the first load."""
        await self._loaded.wait()

    async def changed(self) -> None:
        """Wait for the next change of the view."""
        await self._changed.wait()

    def wake(self) -> None:
        """Have everybody who waits for a change look."""
        # Waiters hold the old event; whoever comes later waits for the next change.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def applied(self, sequence: int, timeout_s: float = 1.0) -> int:
        """Wait (a little) until the view contains a write of this process; returns the write's revision."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.view.revision < self.revision_of(sequence):
                    await self.changed()
        return self.revision_of(sequence)

    async def run(self) -> None:
        """Follow the bucket until cancelled.

        Raises:
            OSError: the bucket can't be used.
        """
        while True:
            try:
                reason = await self._follow()
            except Unavailable as error:
                reason = error.message
            except (nats.errors.Error, ConnectionError) as error:
                # NATS restarts with an empty store between two of our calls: what we just made is gone.
                reason = f"{type(error).__name__}: {error}"
            self._set_following(False)
            log.warning("loading the bucket anew", reason=reason)
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> str:
        """Load, then apply changes; returns why it must be loaded anew."""
        self._status.reconnected.clear()
        queue: asyncio.Queue[Msg] = asyncio.Queue(QUEUE_SIZE)
        inbox = self._client.new_inbox()
        info = await self._bucket.open()
        subscription = await self._client.subscribe(inbox, cb=queue.put, pending_msgs_limit=4 * QUEUE_SIZE)
        try:
            consumer = await self._bucket.follow(inbox)
            delivered = await self._load(queue, consumer, info)
            return await self._apply(queue, delivered)
        finally:
            if not self._client.is_closed:
                await subscription.unsubscribe()

    async def _load(self, queue: asyncio.Queue[Msg], consumer: api.ConsumerInfo, info: api.StreamInfo) -> int:
        """Reload the view from the consumer's first deliveries; returns how many they were."""
        created = info.created or datetime.now(UTC)
        # Revisions go on growing over a bucket that was lost and made anew (at up to a million writes per second of its life),
        # and stay below 2^53, the largest that JavaScript clients read exactly.
        base = int(created.timestamp() * 1000) << 10
        entries: list[Entry] = []
        pending = consumer.num_pending or 0
        while pending:
            message = await self._next(queue, LOAD_TIMEOUT_S)
            if message is None:
                raise Unavailable("JetStream stopped delivering the bucket")
            if not message.reply:  # a heartbeat: nothing is left to deliver
                break
            entries.append(self._bucket.entry(message, base))
            pending = message.metadata.num_pending
        now = time.monotonic()
        is_new = (datetime.now(UTC) - created).total_seconds() < self._lease_s
        if is_new or self._loaded.is_set():
            # Nobody could renew a lease while NATS was away, and a new bucket may stand for one that was lost: workers get the
            # time to come back.
            self.view.interrupted(now)
        self._base = base
        last = max((entry.revision for entry in entries), default=base)
        self.view.reload(entries, max(last, base + info.state.last_seq), now)
        self.reloads += 1
        self._loaded.set()
        self._set_following(True)
        self.wake()
        log.info("following the bucket", workers=len(self.view), revision=self.view.revision)
        return len(entries)

    async def _apply(self, queue: asyncio.Queue[Msg], delivered: int) -> str:
        while True:
            if self._status.reconnected.is_set():
                return "NATS was reconnected"
            message = await self._next(queue, SILENCE_S)
            if message is None:
                return f"no heartbeat for {SILENCE_S} s"
            if not message.reply:
                if int((message.headers or {}).get("Nats-Last-Consumer", delivered)) != delivered:
                    return "changes were lost at the end"
                continue
            delivered += 1
            if message.metadata.sequence.consumer != delivered:
                return "changes were lost"
            self.view.apply(self._bucket.entry(message, self._base), time.monotonic())
            self.wake()

    async def _next(self, queue: asyncio.Queue[Msg], timeout_s: float) -> Msg | None:
        """The next delivery, None after `timeout_s` of silence; ends that were held back are given up meanwhile.

        Raises:
            Unavailable: NATS was reconnected: what the consumer sends from now on has holes.
        """
        self._expire(time.monotonic())
        if not queue.empty():
            return queue.get_nowait()
        silent_at = time.monotonic() + timeout_s
        getting = asyncio.ensure_future(queue.get())
        reconnected = asyncio.ensure_future(self._status.reconnected.wait())
        try:
            while True:
                now = time.monotonic()
                self._expire(now)
                wait_s = min(silent_at, self.view.next_expiry() or silent_at) - now
                done, _ = await asyncio.wait({getting, reconnected}, timeout=max(wait_s, 0), return_when="FIRST_COMPLETED")
                if reconnected in done:
                    raise Unavailable("NATS was reconnected")
                if getting in done:
                    return getting.result()
                if time.monotonic() >= silent_at:
                    return None
        finally:
            getting.cancel()
            reconnected.cancel()

    def _expire(self, now: float) -> None:
        expiry = self.view.next_expiry()
        if expiry is not None and expiry <= now:
            self.view.expire(now)
            self.wake()

    def _set_following(self, following: bool) -> None:
        if following != self._following:
            self._following = following
            self._state_changed.set()
