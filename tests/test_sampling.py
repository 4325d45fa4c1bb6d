"""Sampling parameters: every range, and the proto form."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankway import sampling
from rankway.errors import InvalidField
from rankway.sampling import Sampling
from rankway.v1 import types_pb2

uint32 = st.integers(0, 2**32 - 1)


def reals(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


@st.composite
def any_sampling(draw: st.DrawFn) -> Sampling:
    max_tokens = draw(st.none() | st.integers(1, 2**31))
    return Sampling(
        max_tokens=max_tokens,
        temperature=draw(reals(0, 2)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(st.integers(-1, 2**31 - 1)),
        min_p=draw(reals(0, 1)),
        presence_penalty=draw(reals(-2, 2)),
        frequency_penalty=draw(reals(-2, 2)),
        repetition_penalty=draw(st.floats(0, 2, exclude_min=True)),
        seed=draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
        stop=tuple(draw(st.lists(st.text(min_size=1, max_size=20), max_size=4))),
        stop_token_ids=tuple(draw(st.lists(uint32, max_size=3))),
        n=draw(st.integers(1, 128)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        logit_bias=draw(st.dictionaries(uint32, reals(-100, 100), max_size=3)),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, min(max_tokens or 2**31, 2**31))),
        guided_json=draw(st.text(max_size=10)),
    )


@given(any_sampling())
def test_round_trip(given_sampling: Sampling) -> None:
    """Parameters in range pass their check, and are equal after their proto form."""
    message = sampling.to_proto(given_sampling.check())
    assert sampling.from_proto(types_pb2.SamplingParams.FromString(message.SerializeToString())) == given_sampling


def test_absent_is_the_default() -> None:
    """An empty message is OpenAI's defaults; an explicit 0 isn't absent."""
    assert sampling.from_proto(types_pb2.SamplingParams()) == Sampling()
    assert sampling.from_proto(types_pb2.SamplingParams(temperature=0)).temperature == 0
    assert sampling.from_proto(types_pb2.SamplingParams(seed=0)).seed == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 2.1}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ("a",) * 5}, "stop"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x" * 1025,)}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias"),
        ({"logit_bias": {7: 101.0}}, "logit_bias[7]"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ],
)
def test_out_of_range(changes: dict[str, Any], field: str) -> None:
    """A value out of its range is refused by the field's name."""
    with pytest.raises(InvalidField) as caught:
        Sampling().changed(**changes).check()
    assert caught.value.field == field
