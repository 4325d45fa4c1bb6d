"""Records: what is refused, and the proto form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from harness.registry import record
from hypothesis import given
from hypothesis import strategies as st

from rankway.errors import InvalidField
from rankway.ranks import DpRange
from rankway.registry import records
from rankway.registry.records import MAX_RECORD_BYTES, State
from rankway.v1 import registry_pb2

names = st.text("abcXYZ019_-", min_size=1, max_size=64)
texts = st.text(min_size=1, max_size=20)


@st.composite
def any_records(draw: st.DrawFn) -> records.Record:
    size = draw(st.integers(1, 16))
    start = draw(st.integers(0, 1000))
    positive = st.integers(1, 2**32 - 1)
    return record(
        worker_id=draw(names),
        dp_group=draw(names),
        epoch=draw(st.integers(1, 2**64 - 1)),
        model=draw(texts),
        model_aliases=tuple(draw(st.lists(texts, max_size=3))),
        window=DpRange(start, size),
        data_parallel_size=draw(st.integers(start + size, 2**32 - 1)),
        block_size=draw(positive),
        total_kv_blocks=draw(st.integers(1, 2**64 - 1)),
        max_num_seqs=draw(positive),
        lora_adapters=tuple(draw(st.lists(texts, max_size=3))),
        labels=draw(st.dictionaries(texts, st.text(max_size=20), max_size=3)),
        state=draw(st.sampled_from(State)),
        draining_ranks=tuple(draw(st.lists(st.integers(start, start + size - 1), max_size=3))),
    )


@given(any_records())
def test_round_trip(given_record: records.Record) -> None:
    """A record that went through its proto form is equal to itself."""
    message = records.to_proto(given_record)
    assert records.from_proto(registry_pb2.WorkerRecord.FromString(message.SerializeToString())) == given_record


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"worker_id": ""}, "worker_id"),
        ({"worker_id": "a.b"}, "worker_id"),
        ({"worker_id": "a*"}, "worker_id"),
        ({"worker_id": "a b"}, "worker_id"),
        ({"worker_id": "x" * 65}, "worker_id"),
        ({"dp_group": ">"}, "dp_group"),
        ({"epoch": 0}, "epoch"),
        ({"endpoint": ""}, "endpoint"),
        ({"endpoint": "host"}, "endpoint"),
        ({"endpoint": "host:0"}, "endpoint"),
        ({"endpoint": "host:65536"}, "endpoint"),
        ({"endpoint": "http://host:1"}, "endpoint"),
        ({"model": ""}, "model"),
        ({"model": "m" * 513}, "model"),
        ({"model_aliases": ("ok", "")}, "model_aliases"),
        ({"engine": ""}, "engine"),
        ({"data_parallel_size": 0}, "data_parallel_size"),
        ({"data_parallel_size": 3}, "dp_range"),
        ({"block_size": 0}, "block_size"),
        ({"total_kv_blocks": 0}, "total_kv_blocks"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"draining_ranks": (4,)}, "draining_ranks"),
        ({"lora_adapters": ("",)}, "lora_adapters"),
        ({"labels": {"": "x"}}, "labels"),
    ],
)
def test_refused(changes: dict[str, Any], field: str) -> None:
    """A record with a bad field is refused by the field's name."""
    with pytest.raises(InvalidField) as caught:
        replace(record(), **changes).check()
    assert caught.value.field == field


def test_missing_parts_of_a_message() -> None:
    """A message without a window or a state is refused: absent isn't 0."""
    message = records.to_proto(record())
    message.ClearField("dp_range")
    with pytest.raises(InvalidField, match="dp_range"):
        records.from_proto(message)
    message = records.to_proto(record())
    message.state = registry_pb2.WORKER_STATE_UNSPECIFIED
    with pytest.raises(InvalidField, match="state=0: must be one of STARTING, READY, DRAINING"):
        records.from_proto(message)


def test_too_large() -> None:
    """A record that wouldn't fit in a NATS message is refused."""
    labels = {f"label{i}": "x" * 500 for i in range(MAX_RECORD_BYTES // 500)}
    with pytest.raises(InvalidField, match="more than"):
        records.from_proto(records.to_proto(record(labels=labels)))
