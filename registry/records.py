"""What the registry knows of a worker: one record per instance, checked, and its proto form."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from rankway.errors import InvalidField
from rankway.ranks import DpRange, GlobalRank, Instance, check_name
from rankway.v1 import registry_pb2, types_pb2

MAX_RECORD_BYTES = 256 * 1024
"""Most bytes of a record in its proto form: LoRA adapters and labels fit by the thousand."""

MAX_TEXT_CHARS = 512
"""Most characters of a model name, an alias, an adapter's name, a label or an engine's version."""

_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


class State(enum.IntEnum):
    """What a worker does with requests. The numbers are the proto's."""

    STARTING = registry_pb2.WORKER_STATE_STARTING
    READY = registry_pb2.WORKER_STATE_READY
    DRAINING = registry_pb2.WORKER_STATE_DRAINING


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One instance of a worker. Fields are documented in registry.proto; `window` is its dp_range.

    Building one checks nothing but the window; `check` does the rest.
    """

    worker_id: str
    epoch: int
    endpoint: str
    model: str
    dp_group: str
    data_parallel_size: int
    window: DpRange
    block_size: int
    total_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    engine: str
    state: State
    model_aliases: tuple[str, ...] = ()
    engine_version: str = ""
    lora_adapters: tuple[str, ...] = ()
    """Names that requests give as their model."""
    labels: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str = ""
    draining_ranks: tuple[int, ...] = ()
    """Global ranks."""

    @property
    def instance(self) -> Instance:
        return Instance(self.worker_id, self.epoch)

    @property
    def ranks(self) -> list[GlobalRank]:
        """The global ranks of the window, in order."""
        return self.window.ranks()

    def check(self) -> Record:
        """Return self if every field has an allowed value.

        Raises:
            InvalidField: names the first field that hasn't, and its value.
        """
        check_name("worker_id", self.worker_id)
        check_name("dp_group", self.dp_group)
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise InvalidField(name, getattr(self, name), "must be given, at least 1")
        self.window.check_within(self.data_parallel_size)
        check_endpoint("endpoint", self.endpoint)
        for name in ("model", "engine"):
            _check_text(name, getattr(self, name))
        for name in ("model_aliases", "lora_adapters"):
            for text in getattr(self, name):
                _check_text(name, text)
        for key, value in self.labels.items():
            _check_text("labels", key)
            _check_text(f"labels[{key!r}]", value, empty=True)
        for name in ("engine_version", "tokenizer"):
            _check_text(name, getattr(self, name), empty=True)
        for dp_rank in self.draining_ranks:
            if dp_rank not in self.window:
                raise InvalidField("draining_ranks", dp_rank, f"worker {self.worker_id} owns {self.window}")
        return self

    def fixed_difference(self, other: Record) -> tuple[str, object, object] | None:
        """The first field that an instance may not change and in which `other` differs: (name, own value, other's)."""
        for name in _FIXED:
            own, theirs = getattr(self, name), getattr(other, name)
            if own != theirs:
                return name, own, theirs
        return None


def check_endpoint(name: str, value: str) -> str:
    """Return `value` if it is host:port with a port of 1 … 65535; an IPv6 host stands in brackets.

    Raises:
        InvalidField: otherwise.
    """
    match = _ENDPOINT.fullmatch(value)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise InvalidField(name, value, "must be host:port, the port 1 … 65535")
    return value


def from_proto(message: registry_pb2.WorkerRecord) -> Record:
    """The checked record of a message.

    Raises:
        InvalidField: a field is missing or has a value that isn't allowed.
    """
    if message.ByteSize() > MAX_RECORD_BYTES:
        raise InvalidField("record", message.ByteSize(), f"more than {MAX_RECORD_BYTES} bytes")
    if message.state not in _STATES:
        raise InvalidField("state", message.state, f"must be one of {', '.join(s.name for s in State)}")
    if not message.HasField("dp_range"):
        raise InvalidField("dp_range", None, "must be given")
    return Record(
        **{name: getattr(message, name) for name in _PLAIN},
        model_aliases=tuple(message.model_aliases),
        window=DpRange(message.dp_range.start_rank, message.dp_range.size),
        lora_adapters=tuple(adapter.name for adapter in message.lora_adapters),
        labels=dict(message.labels),
        state=State(message.state),
        draining_ranks=tuple(message.draining_ranks),
    ).check()


def to_proto(record: Record) -> registry_pb2.WorkerRecord:
    """The message of a record; what `from_proto` reads back is equal."""
    return registry_pb2.WorkerRecord(
        **{name: getattr(record, name) for name in _PLAIN},
        model_aliases=record.model_aliases,
        dp_range=types_pb2.DpRange(start_rank=record.window.start_rank, size=record.window.size),
        lora_adapters=[registry_pb2.LoraAdapter(name=name) for name in record.lora_adapters],
        labels=record.labels,
        state=record.state.value,
        draining_ranks=record.draining_ranks,
    )


def _check_text(name: str, value: str, *, empty: bool = False) -> None:
    if not value and not empty:
        raise InvalidField(name, value, "must not be empty")
    if len(value) > MAX_TEXT_CHARS:
        raise InvalidField(name, value, f"has {len(value)} characters, at most {MAX_TEXT_CHARS}")


_STATES = {state.value for state in State}
_POSITIVE = (
    "epoch",
    "data_parallel_size",
    "block_size",
    "total_kv_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "vocab_size",
)
_CHANGEABLE = ("state", "draining_ranks", "lora_adapters", "labels")
_FIXED = tuple(f.name for f in fields(Record) if f.name not in _CHANGEABLE)
_PLAIN = tuple(name for name in _FIXED if name not in ("window", "model_aliases"))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All live records: replaces all that a watcher knows."""

    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Put:
    """A new record, or one that changed."""

    record: Record


@dataclass(frozen=True, slots=True)
class Gone:
    """An instance whose lease ended, that deregistered, or that a newer epoch replaced."""

    instance: Instance


WatchEvent = Snapshot | Put | Gone
