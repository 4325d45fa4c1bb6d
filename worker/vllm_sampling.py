"""A request in the terms of vLLM's SamplingParams. Pure: no vLLM in here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rankway.worker.engine import EngineRequest, Logprob


class VllmLogprob(Protocol):
    """What is read of vLLM's Logprob."""

    logprob: float
    rank: int | None


def sampling_arguments(request: EngineRequest) -> dict[str, Any]:
    """Keyword arguments of SamplingParams, without output_kind and structured outputs.

    Text and stop strings are the worker's business, so vLLM doesn't detokenise. Where tokens come along that another instance
    generated, they count as prompt for vLLM: limits shrink by them, and the penalties for them become biases (exact for the
    frequency penalty without a repetition penalty, which vLLM applies after biases; the presence penalty of such a token counts
    once more if it is generated again).
    """
    sampling = request.sampling
    resumed = request.tokens[request.prompt_len :]
    if sampling.max_tokens is None:
        raise ValueError("max_tokens isn't set")
    bias = dict(sampling.logit_bias)
    if resumed and (sampling.presence_penalty or sampling.frequency_penalty):
        for token, count in Counter(resumed).items():
            bias[token] = bias.get(token, 0.0) - sampling.presence_penalty - sampling.frequency_penalty * count
    return {
        "max_tokens": sampling.max_tokens - len(resumed),
        "min_tokens": max(sampling.min_tokens - len(resumed), 0),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        # A generator that started anew would draw the same numbers again after the resumed tokens.
        "seed": None if sampling.seed is None else sampling.seed + len(resumed),
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": sampling.logprobs,
        "logit_bias": bias or None,
        "ignore_eos": sampling.ignore_eos,
        "detokenize": False,
    }


def to_logprobs(
    tokens: Sequence[int], positions: Sequence[Mapping[int, VllmLogprob] | None] | None, alternatives: int | None
) -> list[Logprob]:
    """vLLM's logprobs of new tokens in the worker's terms; empty where none were asked for.

    vLLM gives a dict a position: the sampled token and the `alternatives` likeliest, which may contain it.
    """
    if alternatives is None or positions is None:
        return []
    result = []
    for token, entries in zip(tokens, positions, strict=False):
        if entries is None:
            continue
        best = sorted(((entry.rank or 0, token_id, entry.logprob) for token_id, entry in entries.items()))
        top = tuple((token_id, logprob) for rank, token_id, logprob in best if rank <= alternatives)
        result.append(Logprob(token, entries[token].logprob, top))
    return result
