"""Sampling parameters: one struct with OpenAI's names and ranges, checked in one place, and its proto form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rankway.errors import InvalidField
from rankway.v1 import types_pb2

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_CHOICES = 128
MAX_LOGPROBS = 20


class Sampling(msgspec.Struct, frozen=True):
    """How to sample. `check` has been passed by every instance that a service works with.

    A struct of msgspec rather than a dataclass: made and copied several times for each request, for a tenth of the time.

    Ranges are those of OpenAI's API reference and, for top_k, min_p and repetition_penalty, of vLLM's SamplingParams.
    """

    max_tokens: int | None = None
    """Most tokens to generate, at least 1; None: the caller's default (`limit_tokens`)."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: int | None = None
    """None: none; k: the sampled token's and k alternatives'."""
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    ignore_eos: bool = False
    min_tokens: int = 0
    guided_json: str = ""

    def changed(self, **fields: Any) -> Sampling:
        """A copy with other values, not checked."""
        return msgspec.structs.replace(self, **fields)

    def check(self) -> Sampling:
        """Return self if every value is in its range.

        Raises:
            InvalidField: names the first field that isn't, and its value.
        """
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidField("max_tokens", self.max_tokens, "must be at least 1")
        _within("temperature", self.temperature, 0, 2)
        _within("top_p", self.top_p, 0, 1, open_low=True)
        if not -1 <= self.top_k < 2**31:
            raise InvalidField("top_k", self.top_k, "must be 1 … 2147483647, or 0 or -1 for all tokens")
        _within("min_p", self.min_p, 0, 1)
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        _within("repetition_penalty", self.repetition_penalty, 0, 2, open_low=True)
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidField("seed", self.seed, "must fit a signed 64-bit integer")
        if len(self.stop) > MAX_STOPS:
            raise InvalidField("stop", len(self.stop), f"at most {MAX_STOPS} strings")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidField("stop", text, f"each string has 1 to {MAX_STOP_CHARS} characters")
        _within("n", self.n, 1, MAX_CHOICES)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for token_id, bias in self.logit_bias.items():
            if token_id < 0:
                raise InvalidField("logit_bias", token_id, "token ids are not negative")
            _within(f"logit_bias[{token_id}]", bias, -100, 100)
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise InvalidField("min_tokens", self.min_tokens, f"must be 0 … max_tokens={self.max_tokens}")
        return self


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    # NaN and infinities are in no range either.
    if not low <= value <= high or (open_low and value == low):
        raise InvalidField(name, value, f"must be in {'(' if open_low else '['}{low}, {high}]")


def from_proto(message: types_pb2.SamplingParams) -> Sampling:
    """The checked parameters of a request.

    Raises:
        InvalidField: a value is out of its range.
    """
    given = {
        name: getattr(message, name)
        for name in _OPTIONAL
        if message.HasField(name)  # type: ignore[arg-type]
    }
    return Sampling(
        **given,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        ignore_eos=message.ignore_eos,
        guided_json=message.guided_json,
    ).check()


def to_proto(sampling: Sampling) -> types_pb2.SamplingParams:
    """The proto form; what `from_proto` reads back is equal."""
    message = types_pb2.SamplingParams()
    for name, default in _DEFAULTS:
        value = getattr(sampling, name)
        if value != default:
            setattr(message, name, value)
    if sampling.stop:
        message.stop.extend(sampling.stop)
    if sampling.stop_token_ids:
        message.stop_token_ids.extend(sampling.stop_token_ids)
    for token_id, bias in sampling.logit_bias.items():
        message.logit_bias[token_id] = bias
    return message


_OPTIONAL = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "n",
    "logprobs",
    "min_tokens",
)
_DEFAULTS = tuple((name, getattr(Sampling(), name)) for name in (*_OPTIONAL, "ignore_eos", "guided_json"))
