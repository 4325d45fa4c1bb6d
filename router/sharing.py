"""Sharing bookings and reservations with the other routers over NATS: what this one books goes out in batches, what others book
comes in.

Without NATS nothing is shared and nothing else changes: loads that workers publish still tell of the others, a little later.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable

import nats.errors
from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.aio.msg import Msg

from rankway import bus, logs
from rankway.registry.records import Record
from rankway.router.active_updates import BOOKING_TTL_S, Updates
from rankway.router.bookings import Batch, OtherBookings, OwnBookings
from rankway.router.fleet import Fleet
from rankway.router.ledger import Booking, Ledger
from rankway.router.reservations import Reservations
from rankway.router.settings import RouterSettings
from rankway.router.targets import Place, Targets
from rankway.v1 import events_pb2

log = logs.get("sharing")

FULL_EVERY_S = 10.0
"""How often all bookings are told."""

ANSWER_PAUSE_S = 0.2
"""Least time between two full updates, whoever asks."""

ASK_PAUSE_S = 0.5
"""Most time until something that was missed is asked for."""

LOOK_EVERY_S = 2.0
"""How often groups that are new are looked for, once there is one."""


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
        own: OwnBookings,
        reservations: Reservations,
        clock: Callable[[], float],
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Messages: "sent", "received", "malformed", "holes", "failed" (not sent: no connection)."""
        self._settings = settings
        self._router_id = router_id
        self._epoch = epoch
        self._fleet = fleet
        self._targets = targets
        self._ledger = ledger
        self._own = own
        self._updates = Updates(targets, reservations)
        self._clock = clock
        self._others = OtherBookings(ledger, own, reservations, self._member, BOOKING_TTL_S)
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
            for group, batch in self._own.take().items():
                for update in self._updates.of(batch, self._clock()):
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
        self._own.told_in_full()
        for group in self._groups():
            for update in self._updates.of(Batch(booked=bookings[group]), self._clock(), full=True):
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

    def _member(self, place: Place) -> tuple[int, Record] | None:
        slot = self._targets.find(place.target, place.epoch)
        record = self._fleet.record(place.instance)
        return (slot, record) if slot is not None and record is not None and self._ledger.is_open(slot) else None
