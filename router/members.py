"""Membership at the router, in one place: what has to happen when a worker joins, changes, is reached, is lost, or leaves."""

from __future__ import annotations

from collections.abc import Callable

from rankway import logs
from rankway.indexer.events import RankLoad
from rankway.indexer.slots import RankKey
from rankway.ranks import Instance, Target
from rankway.registry.records import Gone, Put, Record, Snapshot, State, WatchEvent
from rankway.router.attach import Link, Links
from rankway.router.eligibility import Eligibility
from rankway.router.fleet import Fleet
from rankway.router.ledger import Ledger, Report, SlotLimits
from rankway.router.replica import Observer, Replica, ReplicaRank
from rankway.router.settings import RouterSettings
from rankway.router.targets import Holder, Targets

log = logs.get("members")


class Members(Observer):
    """Keeps fleet, slots, ledger, links and eligibility in step.

    A worker whose lease has ended but that still answers on its Attach is kept for `lease_grace_s`: the store may have lost its
    leases, and the workers are about to register again. It goes at once when its link breaks or a newer epoch joins.
    """

    def __init__(
        self,
        fleet: Fleet,
        targets: Targets,
        ledger: Ledger,
        eligibility: Eligibility,
        settings: RouterSettings,
        clock: Callable[[], float],
    ) -> None:
        self.links: Links
        self.replica: Replica
        self.on_change: Callable[[], None] = lambda: None
        """Called when somebody may be eligible who wasn't."""
        self.on_left: Callable[[Instance], None] = lambda instance: None
        self.on_reach: Callable[[], None] = lambda: None
        """Called when another set of workers may be in reach."""
        self._fleet = fleet
        self._targets = targets
        self._ledger = ledger
        self._eligibility = eligibility
        self._settings = settings
        self._clock = clock
        self._lapsed: dict[Instance, float] = {}

    def apply(self, event: WatchEvent) -> None:
        """Take in what the registry says."""
        match event:
            case Gone(instance):
                if self._lingers(instance):
                    return
            case Put(record):
                self._lapsed.pop(record.instance, None)
            case Snapshot(records):
                event = self._with_lapsed(records)
        self._apply(event)

    def sweep(self, now: float) -> None:
        """Let go of workers whose lease ended a while ago."""
        for instance in [instance for instance, until in self._lapsed.items() if until <= now]:
            self._let_go(instance)

    def link_up(self, link: Link) -> None:
        """The worker answers."""
        if self._fleet.record(link.instance) is not None:
            self._eligibility.connect(link.instance)
            self.on_change()
            self.on_reach()

    def link_down(self, link: Link) -> None:
        """The worker doesn't answer."""
        self._eligibility.disconnect(link.instance)
        self.on_reach()
        if link.instance in self._lapsed:
            self._let_go(link.instance)

    def known_changed(self, rank: ReplicaRank) -> None:
        """`replica.Observer`."""
        self._ledger.loads.grow(rank.slot + 1)
        self._ledger.loads.known[rank.slot] = rank.known

    def loaded(self, rank: ReplicaRank, load: RankLoad) -> None:
        """`replica.Observer`."""
        self._ledger.report(rank.slot, _report(load), self._clock())
        self.on_change()

    def _apply(self, event: WatchEvent) -> None:
        change = self._fleet.apply(event)
        if not change:
            return
        for record in change.left:
            self._left(record)
        for record in change.joined:
            self._joined(record)
        self._eligibility.changed()
        for record in change.joined:
            self.links.open(record.instance, record.endpoint)
        for record in change.updated:
            log.info("worker changed", worker_id=record.worker_id, state=record.state.name, draining=list(record.draining_ranks))
        self.on_change()
        self.on_reach()

    def _joined(self, record: Record) -> None:
        for rank in record.ranks:
            slot = self._targets.hold(Target(record.worker_id, rank), record.epoch, Holder.FLEET)
            self._ledger.open(slot, self._limits(record))
            known = self.replica.ranks.get(RankKey(record.worker_id, record.epoch, rank))
            self._ledger.loads.known[slot] = known is not None and known.known
            if known is not None and known.load is not None:
                self._ledger.report(slot, _report(known.load), self._clock())
        others = {other.tokenizer for other in self._fleet.serving(record.model, "", "")} - {record.tokenizer}
        if others:
            # Their blocks' hashes may agree only by luck, and the commonest tokenizer counts the tokens.
            what = "workers of one model have different tokenizers"
            log.warning(what, worker_id=record.worker_id, model=record.model, tokenizer=record.tokenizer, others=sorted(others))
        log.info(
            "worker joined",
            worker_id=record.worker_id,
            epoch=record.epoch,
            endpoint=record.endpoint,
            dp_group=record.dp_group,
            window=str(record.window),
            state=record.state.name,
        )

    def _left(self, record: Record) -> None:
        instance = record.instance
        self._lapsed.pop(instance, None)
        self._eligibility.forget(instance)
        for slot in self._targets.slots(instance).values():
            self._ledger.close(slot)
            self._targets.drop(slot, Holder.FLEET)
        self.links.retire(instance)
        self.on_left(instance)
        log.info("worker left", worker_id=record.worker_id, epoch=record.epoch, window=str(record.window))

    def _lingers(self, instance: Instance) -> bool:
        record = self._fleet.record(instance)
        if record is None or record.state is not State.READY or not self._eligibility.is_connected(instance):
            return False
        if self._settings.lease_grace_s <= 0:
            return False
        self._lapsed.setdefault(instance, self._clock() + self._settings.lease_grace_s)
        log.warning("a worker's lease has ended, but it answers: kept for a while", worker_id=instance.worker_id)
        return True

    def _with_lapsed(self, records: tuple[Record, ...]) -> Snapshot:
        named = {record.worker_id for record in records}
        for record in records:
            self._lapsed.pop(record.instance, None)
        kept = [
            record for record in self._fleet.records.values() if record.worker_id not in named and self._lingers(record.instance)
        ]
        return Snapshot((*records, *kept))

    def _let_go(self, instance: Instance) -> None:
        self._lapsed.pop(instance, None)
        self._apply(Gone(instance))

    def _limits(self, record: Record) -> SlotLimits:
        settings = self._settings
        return SlotLimits(
            requests=int(settings.limit_running * record.max_num_seqs),
            prefill_tokens=int(settings.limit_prefill_batches * record.max_num_batched_tokens),
            blocks=int(settings.limit_kv_share * record.total_kv_blocks),
        )


def _report(load: RankLoad) -> Report:
    return Report(
        running=load.running,
        waiting=load.waiting,
        deferred=load.deferred,
        used_blocks=load.used_blocks,
        total_blocks=load.total_blocks,
        prefill_tokens=load.prefill_tokens,
        load_seq=load.load_seq,
    )
