"""Who may join a DP group: the group's window map and every reason to refuse a worker. Pure.

A DP group's map names, for each worker that was admitted, its instance and its window. It is what registries change by
compare-and-set, so it alone decides. An entry counts as long as its instance lives (holds its lease); entries of the dead stay
until somebody needs their place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from rankway.errors import Conflict, Mismatch, Outdated
from rankway.ranks import DpRange, Instance
from rankway.registry.records import Record


@dataclass(frozen=True, slots=True)
class Claim:
    """One worker's entry in its group's map."""

    epoch: int
    window: DpRange


@dataclass(frozen=True, slots=True)
class Group:
    """The map of one DP group, and what its workers have in common."""

    dp_group: str
    model: str
    block_size: int
    data_parallel_size: int
    claims: Mapping[str, Claim] = field(default_factory=dict)
    """By worker_id."""


def rivals(group: Group, record: Record) -> list[Instance]:
    """The other workers in the map whose being alive would have `record` refused: overlapping windows, other common facts."""
    differs = _difference(group, record) is not None
    return [
        Instance(worker_id, claim.epoch)
        for worker_id, claim in group.claims.items()
        if worker_id != record.worker_id and (differs or claim.window.overlaps(record.window))
    ]


def admit(group: Group | None, record: Record, dead: Collection[Instance]) -> Group:
    """The group's map with `record` in it and without the `dead`.

    Args:
        group: None for a group that nobody has registered in.
        dead: those of `rivals(group, record)` that hold no lease.
    Raises:
        Mismatch: block_size, data_parallel_size or model differ from those of a live worker.
        Conflict: the window overlaps a live worker's.
    """
    if group is None:
        return _with(Group(record.dp_group, record.model, record.block_size, record.data_parallel_size), record)
    alive = [rival for rival in rivals(group, record) if rival not in dead]
    difference = _difference(group, record)
    if difference is not None and alive:
        name, theirs, given = difference
        raise Mismatch(
            f"{name}={given!r} of worker {record.worker_id} differs from {name}={theirs!r} of DP group {group.dp_group} "
            f"(worker {alive[0].worker_id})"
        )
    for rival in alive:
        raise Conflict(
            f"window {record.window} of worker {record.worker_id} overlaps window {group.claims[rival.worker_id].window} of "
            f"worker {rival.worker_id} in DP group {group.dp_group}"
        )
    kept = {worker_id: claim for worker_id, claim in group.claims.items() if Instance(worker_id, claim.epoch) not in dead}
    return _with(
        Group(record.dp_group, record.model, record.block_size, record.data_parallel_size, kept),
        record,
    )


def check_succession(held: Record, record: Record) -> None:
    """Raise unless `record` may follow `held`, the live record of the same worker_id: renew it, or be its next life.

    Raises:
        Conflict: worker_id lives in another DP group, or one epoch is claimed by two different workers.
        Outdated: the epoch is older than the one on record.
    """
    if held.dp_group != record.dp_group:
        raise Conflict(
            f"worker {record.worker_id} (epoch {record.epoch}) of DP group {record.dp_group}: a worker of that id lives in DP "
            f"group {held.dp_group} (epoch {held.epoch}, {held.endpoint})"
        )
    check_epoch(held, record.instance)
    difference = record.fixed_difference(held) if held.epoch == record.epoch else None
    if difference is not None:
        name, given, theirs = difference
        raise Conflict(
            f"worker {record.worker_id} epoch {record.epoch} is registered with {name}={_show(theirs)}, this one has "
            f"{name}={_show(given)}: an instance can't change it"
        )


def check_epoch(held: Record, instance: Instance) -> None:
    """Raise Outdated if `instance` is an earlier life of the worker than the one on record."""
    if instance.epoch < held.epoch:
        raise Outdated(
            f"epoch {instance.epoch} of worker {instance.worker_id} is older than epoch {held.epoch} on record ({held.endpoint})"
        )


def check_renewal(held: Record, record: Record) -> None:
    """Raise unless a KeepAlive with `record` may replace `held`, the live record of the same instance.

    Raises:
        Mismatch: a field differs that an instance can't change.
    """
    difference = record.fixed_difference(held)
    if difference is not None:
        name, given, theirs = difference
        raise Mismatch(
            f"KeepAlive of worker {record.worker_id} epoch {record.epoch} has {name}={_show(given)}, its record has "
            f"{name}={_show(theirs)}: register as a new epoch to change it"
        )


def encode(group: Group) -> bytes:
    """The map as it stands in the store (JSON)."""
    return msgspec.json.encode(group)


def decode(data: bytes) -> Group:
    """The map that `encode` wrote.

    Raises:
        msgspec.DecodeError: somebody else wrote it.
    """
    return msgspec.json.decode(data, type=Group)


def _with(group: Group, record: Record) -> Group:
    return replace(group, claims={**group.claims, record.worker_id: Claim(record.epoch, record.window)})


def _difference(group: Group, record: Record) -> tuple[str, object, object] | None:
    """The first common fact in which `record` differs: (name, the group's value, the record's)."""
    for name in ("block_size", "data_parallel_size", "model"):
        theirs, given = getattr(group, name), getattr(record, name)
        if theirs != given:
            return name, theirs, given
    return None


def _show(value: object) -> str:
    return str(value) if isinstance(value, DpRange) else repr(value)
