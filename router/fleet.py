"""The fleet: every live worker as the registry tells it, and what names, groups and ranks mean in it. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rankway.errors import NotFound, RankOutOfRange, Unavailable, UnknownModel
from rankway.ranks import DpRange, Instance
from rankway.registry.records import Gone, Put, Record, Snapshot, WatchEvent
from rankway.router.intake import ModelCard, ServedModel


@dataclass(frozen=True, slots=True)
class Change:
    """What an event did. A worker that came back with a new epoch is in `left` with the old one and in `joined` with the new."""

    joined: tuple[Record, ...] = ()
    left: tuple[Record, ...] = ()
    updated: tuple[Record, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.joined or self.left or self.updated)


class Fleet:
    """Live records by worker. Also the `Catalog` that requests are checked against."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._cards: dict[tuple[str, str], ModelCard] = {}

    def apply(self, event: WatchEvent) -> Change:
        """Take in what the registry says; returns what changed."""
        match event:
            case Snapshot(records):
                change = self._replace({record.worker_id: record for record in records})
            case Put(record):
                change = self._put(record)
            case Gone(instance):
                change = self._gone(instance)
        if change:
            self._cards.clear()
        return change

    @property
    def records(self) -> Mapping[str, Record]:
        """By worker_id."""
        return self._records

    def record(self, instance: Instance) -> Record | None:
        """The record of an instance that lives."""
        record = self._records.get(instance.worker_id)
        return record if record is not None and record.epoch == instance.epoch else None

    def serving(self, model: str, lora: str, dp_group: str = "") -> list[Record]:
        """The workers that serve a model (its canonical name) with an adapter ("": none), in a group or in any ("")."""
        return [
            record
            for record in self._records.values()
            if record.model == model
            and (not dp_group or record.dp_group == dp_group)
            and (not lora or lora in record.lora_adapters)
        ]

    def resolve(self, model: str, dp_group: str) -> ModelCard:
        """`Catalog.resolve`."""
        card = self._cards.get((model, dp_group))
        if card is None:
            card = self._resolve(model, dp_group)
            self._cards[model, dp_group] = card
        return card

    def check_pin(self, card: ModelCard, dp_group: str, worker_id: str, dp_rank: int | None) -> None:
        """`Catalog.check_pin`."""
        if worker_id:
            record = self._records.get(worker_id)
            if record is None:
                raise NotFound(f"worker_id={worker_id!r}: no such worker; there is: {_listed(self._records)}")
            if record not in self.serving(card.model, card.lora, dp_group):
                group = f" in DP group {dp_group}" if dp_group else ""
                raise NotFound(f"worker_id={worker_id!r}: doesn't serve model {card.lora or card.model!r}{group}")
            if dp_rank is not None:
                record.window.to_local(dp_rank, f"worker {worker_id}")
        elif dp_rank is not None:
            self._check_group_rank(self.serving(card.model, card.lora, dp_group), dp_rank)

    def served_models(self) -> Sequence[ServedModel]:
        """`Catalog.served_models`."""
        names: dict[tuple[int, str], ServedModel] = {}
        for record in self._records.values():
            for order, given in enumerate(((record.model,), record.model_aliases, record.lora_adapters)):
                for name in given:
                    card = self.resolve(name, "")
                    served = ServedModel(name, card.model, card.max_model_len, is_lora=bool(card.lora))
                    names.setdefault((order, name), served)
        seen: dict[str, ServedModel] = {}
        for key in sorted(names):
            seen.setdefault(key[1], names[key])
        return list(seen.values())

    def ranks(self, dp_group: str) -> str:
        """The global ranks of a DP group, as text: [0, 8)."""
        sizes = [record.data_parallel_size for record in self._records.values() if record.dp_group == dp_group]
        return str(DpRange(0, sizes[0])) if sizes else "none"

    def _check_group_rank(self, records: Iterable[Record], dp_rank: int) -> None:
        windows: dict[str, list[DpRange]] = defaultdict(list)
        sizes: dict[str, int] = {}
        for record in records:
            if dp_rank in record.window:
                return
            windows[record.dp_group].append(record.window)
            sizes[record.dp_group] = record.data_parallel_size
        groups = sorted(windows)
        if any(dp_rank < sizes[group] for group in groups):
            live = ", ".join(str(window) for group in groups for window in sorted(windows[group]))
            raise Unavailable(f"dp_rank={dp_rank}: no live worker owns it now; live windows: {live}")
        owner = f"DP group{'s' if len(groups) > 1 else ''} {', '.join(groups)}"
        raise RankOutOfRange(dp_rank, owner, ", ".join(self.ranks(group) for group in groups))

    def _resolve(self, model: str, dp_group: str) -> ModelCard:
        if not self._records:
            raise Unavailable("there are no workers")
        records = [record for record in self._records.values() if not dp_group or record.dp_group == dp_group]
        if not records:
            groups = {record.dp_group for record in self._records.values()}
            raise NotFound(f"dp_group={dp_group!r}: no such DP group; there is: {_listed(groups)}")
        canonical, lora = _meaning(model, records)
        serving = self.serving(canonical, lora, dp_group)
        tokenizers = Counter(record.tokenizer for record in serving)
        return ModelCard(
            model=canonical,
            lora=lora,
            max_model_len=min(record.max_model_len for record in serving),
            vocab_size=min(record.vocab_size for record in serving),
            tokenizer=max(sorted(tokenizers), key=tokenizers.__getitem__),
        )

    def _replace(self, records: dict[str, Record]) -> Change:
        joined, left, updated = [], [], []
        for worker_id, record in records.items():
            known = self._records.get(worker_id)
            if known is None or known.epoch != record.epoch:
                joined.append(record)
            elif known != record:
                updated.append(record)
        for worker_id, known in self._records.items():
            if worker_id not in records or records[worker_id].epoch != known.epoch:
                left.append(known)
        self._records = records
        return Change(tuple(joined), tuple(left), tuple(updated))

    def _put(self, record: Record) -> Change:
        known = self._records.get(record.worker_id)
        if known is not None and known.epoch > record.epoch:
            return Change()
        self._records[record.worker_id] = record
        if known is None:
            return Change(joined=(record,))
        if known.epoch != record.epoch:
            return Change(joined=(record,), left=(known,))
        return Change(updated=(record,)) if known != record else Change()

    def _gone(self, instance: Instance) -> Change:
        record = self.record(instance)
        if record is None:
            return Change()
        del self._records[instance.worker_id]
        return Change(left=(record,))


def _meaning(model: str, records: Sequence[Record]) -> tuple[str, str]:
    """(canonical name, adapter) of a name. A canonical name goes before an alias, an alias before an adapter."""
    models = {record.model for record in records}
    if not model:
        if len(models) > 1:
            raise UnknownModel(model, list(models))
        return models.pop(), ""
    if model in models:
        return model, ""
    for record in records:
        if model in record.model_aliases:
            return record.model, ""
    for record in records:
        if model in record.lora_adapters:
            return record.model, model
    names = {name for record in records for name in (record.model, *record.model_aliases, *record.lora_adapters)}
    raise UnknownModel(model, list(names))


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    shown = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
    return shown or "none"
