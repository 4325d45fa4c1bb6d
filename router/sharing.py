"""Sharing bookings with the other routers over NATS: what this one books goes out in batches, what others book comes in.

Without NATS nothing is shared and nothing else changes: loads that workers publish still tell of the others, a little later.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

import nats.errors
from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.aio.msg import Msg

from rankway import bus, logs
from rankway.ranks import GlobalRank, Target
from rankway.router.bookings import Batch, OtherBookings, OwnBookings
from rankway.router.fleet import Fleet
from rankway.router.ledger import Booking, Ledger
from rankway.router.settings import RouterSettings
from rankway.router.targets import Targets
from rankway.v1 import events_pb2

log = logs.get("sharing")

FULL_EVERY_S = 10.0
"""How often all bookings are told."""

BOOKING_TTL_S = 30.0
"""How long a booking of a router that fell silent counts."""

ANSWER_PAUSE_S = 0.2
"""Least time between two full updates, whoever asks."""

ASK_PAUSE_S = 0.5
"""Most time until something that was missed is asked for."""

LOOK_EVERY_S = 2.0
"""How often groups that are new are looked for, once there is one."""

MESSAGE_BYTES = bus.MAX_PAYLOAD_BYTES // 2
"""A batch is split into messages of about this size."""


class Sharing:
    """The exchange of bookings. `run` owns its connection and tasks."""

    def __init__(
        self,
        settings: RouterSettings,
        router_id: str,
        epoch: int,
        fleet: Fleet,
        targets: Targets,
        ledger: Ledger,
        clock: Callable[[], float],
    ) -> None:
        self.own: OwnBookings
        self.counts: Counter[str] = Counter()
        """Messages: "sent", "received", "malformed", "holes", "failed" (not sent: no connection)."""
        self._settings = settings
        self._router_id = router_id
        self._epoch = epoch
        self._fleet = fleet
        self._targets = targets
        self._ledger = ledger
        self._clock = clock
        self._others = OtherBookings(ledger, self._slot_of, BOOKING_TTL_S)
        self._changed = asyncio.Event()
        self._full_wanted = asyncio.Event()
        self._seqs: defaultdict[str, int] = defaultdict(int)
        self._missed = asyncio.Event()
        self._client: Client | None = None

    @property
    def routers(self) -> int:
        """Other routers heard of lately."""
        return self._others.routers

    @property
    def connected(self) -> bool:
        """Whether NATS can be reached now."""
        return self._client is not None and self._client.is_connected

    @property
    def listening(self) -> bool:
        """`bookings.Audience.listening`."""
        return bool(self._others)

    def notify(self) -> None:
        """There is something to tell."""
        self._changed.set()

    def group_of(self, slot: int) -> str | None:
        """The DP group of a slot."""
        place = self._targets.place(slot)
        record = self._fleet.record(place.instance) if place is not None else None
        return record.dp_group if record is not None else None

    async def run(self) -> None:
        """Share until cancelled."""
        client, status = await bus.connect(self._settings.nats_url, name="rankway-router")
        try:
            await bus.subscribe(client, bus.active_subject(self._settings.dp_group or "*"), self._on_message)
            self._client = client
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tell())
                tasks.create_task(self._tell_all())
                tasks.create_task(self._after_reconnects(status))
                tasks.create_task(self._ask())
        finally:
            self._client = None
            with contextlib.suppress(nats.errors.Error, OSError):
                await client.close()

    async def _tell(self) -> None:
        """What has changed, in batches."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(self._settings.share_interval_ms / 1000)
            self._changed.clear()
            for group, batch in self.own.take().items():
                for update in self._updates(group, batch):
                    await self._publish(group, update)

    async def _tell_all(self) -> None:
        """Everything, on request and now and then."""
        while True:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: on Python 3.11 it loses a cancellation that comes together with the event.
                async with asyncio.timeout(FULL_EVERY_S):
                    await self._full_wanted.wait()
            self._full_wanted.clear()
            self._others.tidy(self._clock())
            await self._publish_full()
            await asyncio.sleep(ANSWER_PAUSE_S)

    async def _after_reconnects(self, status: bus.BusStatus) -> None:
        """What was said while the connection was lost is lost."""
        while True:
            await status.reconnected.wait()
            status.reconnected.clear()
            self._full_wanted.set()
            self._missed.set()  # and so may be an answer to what was asked a moment ago

    async def _publish_full(self) -> None:
        bookings: defaultdict[str, dict[str, Booking]] = defaultdict(dict)
        for booking in self._ledger.bookings():
            group = self.group_of(booking.slot) if booking.own else None
            if group is not None:
                bookings[group][booking.booking_id] = booking
        self.own.told_in_full()
        for group in self._groups():
            for update in self._updates(group, Batch(booked=bookings[group]), full=True):
                await self._publish(group, update)

    async def _ask(self) -> None:
        """Ask the others for all of theirs: at the start, in groups that are new here, and when something was missed."""
        asked: set[str] = set()
        while True:
            groups = self._groups()
            wanted = groups if self._missed.is_set() else groups - asked
            self._missed.clear()
            for group in wanted:
                await self._publish(group, events_pb2.ActiveUpdate(want_full=True))
            asked = groups
            await asyncio.sleep(ASK_PAUSE_S * random.uniform(0.5, 1.0))
            if groups:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._missed.wait()

    def _groups(self) -> set[str]:
        return {record.dp_group for record in self._fleet.records.values()}

    async def _publish(self, group: str, update: events_pb2.ActiveUpdate) -> None:
        self._seqs[group] += 1
        update.router_id, update.router_epoch, update.seq = self._router_id, self._epoch, self._seqs[group]
        try:
            if self._client is None or not self._client.is_connected:
                raise nats.errors.ConnectionClosedError
            await self._client.publish(bus.active_subject(group, self._router_id), update.SerializeToString())
            self.counts["sent"] += 1
        except (nats.errors.Error, OSError):
            # The seq that is missing now makes the others ask, and a reconnect tells them all.
            self.counts["failed"] += 1

    def _updates(self, group: str, batch: Batch, *, full: bool = False) -> Iterator[events_pb2.ActiveUpdate]:
        """A batch as messages: the first one carries what is short."""
        update = events_pb2.ActiveUpdate(full=full, prefilled=batch.prefilled, released=batch.released)
        size = 64 * (len(batch.prefilled) + len(batch.released))
        for booking in self._messages(batch.booked.values()):
            if size > 0 and size + len(booking.block_hashes) > MESSAGE_BYTES:
                yield update
                update, size = events_pb2.ActiveUpdate(), 0
            update.booked.append(booking)
            size += len(booking.block_hashes) + 128
        yield update

    def _messages(self, bookings: Iterable[Booking]) -> Iterator[events_pb2.Booking]:
        now = self._clock()
        for booking in bookings:
            place = self._targets.place(booking.slot)
            if booking.ended or place is None:
                continue
            ttl_s = BOOKING_TTL_S if booking.expires_at is None else min(BOOKING_TTL_S, booking.expires_at - now)
            yield events_pb2.Booking(
                booking_id=booking.booking_id,
                worker_id=place.target.worker_id,
                epoch=place.epoch,
                dp_rank=place.target.dp_rank,
                prefill_tokens=booking.prefill_tokens,
                block_hashes=booking.hashes,
                ttl_ms=max(1, int(ttl_s * 1000)),
                prefilled=booking.prefilled,
                requests=booking.requests,
            )

    async def _on_message(self, message: Msg) -> None:
        self.counts["received"] += 1
        try:
            update = events_pb2.ActiveUpdate.FromString(message.data)
        except DecodeError:
            self.counts["malformed"] += 1
            return
        if update.router_id == self._router_id:
            return
        group = message.subject.split(".")[2]
        if update.want_full:
            self._full_wanted.set()
        if not self._others.apply(group, update, self._clock()):
            self.counts["holes"] += 1
            self._missed.set()

    def _slot_of(self, worker_id: str, epoch: int, dp_rank: int) -> int | None:
        slot = self._targets.find(Target(worker_id, GlobalRank(dp_rank)), epoch)
        return slot if slot is not None and self._ledger.is_open(slot) else None
