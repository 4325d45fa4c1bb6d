"""The checks of a request at a worker, before its engine sees anything."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass

from rankway.errors import InvalidField, UnknownModel, Unsupported
from rankway.ranks import LocalRank
from rankway.sampling import Sampling
from rankway.worker.engine import EngineInfo


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is checked against."""

    worker_id: str
    info: EngineInfo
    model_names: Collection[str]
    """The model's canonical name and its aliases."""

    def check_prompt(self, prompt: array[int]) -> None:
        """Raises InvalidField: no tokens, an id outside the vocabulary, or no room for a single output token."""
        if not prompt:
            raise InvalidField("prompt", "", "has no tokens")
        largest = max(prompt)
        if largest >= self.info.vocab_size:
            raise InvalidField("prompt", largest, f"token ids are 0 … {self.info.vocab_size - 1}")
        if len(prompt) >= self.info.max_model_len:
            raise InvalidField(
                "prompt", f"{len(prompt)} tokens", f"leaves no room for output in max_model_len={self.info.max_model_len}"
            )

    def check_sampling(self, sampling: Sampling, prompt_tokens: int, default_max_tokens: int | None) -> Sampling:
        """The parameters with max_tokens set.

        Args:
            default_max_tokens: where the client gave none; None: all that fits.

        Raises:
            InvalidField: prompt and max_tokens together pass max_model_len, or a token id outside the vocabulary.
            Unsupported: a parameter that the engine doesn't have, by name.
        """
        for name in self.info.unsupported:
            if getattr(sampling, name) != getattr(_DEFAULTS, name):
                raise Unsupported(name, f"the {self.info.name} engine doesn't support it")
        for field, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
            for token_id in ids:
                if token_id >= self.info.vocab_size:
                    raise InvalidField(field, token_id, f"token ids are 0 … {self.info.vocab_size - 1}")
        room = self.info.max_model_len - prompt_tokens
        if sampling.max_tokens is None:
            fitting = room if default_max_tokens is None else min(room, default_max_tokens)
            return sampling.changed(max_tokens=fitting).check()
        if sampling.max_tokens > room:
            raise InvalidField(
                "max_tokens",
                sampling.max_tokens,
                f"{prompt_tokens} prompt tokens leave {room} of max_model_len={self.info.max_model_len}",
            )
        return sampling

    def local_rank(self, dp_rank: int) -> LocalRank:
        """The engine's number for a global rank. Raises RankOutOfRange naming this worker and its window."""
        return self.info.window.to_local(dp_rank, f"worker {self.worker_id}")

    def check_lora(self, name: str) -> None:
        if name and name not in self.info.lora_adapters:
            raise UnknownModel(name, [*self.model_names, *self.info.lora_adapters])

    def resolve_model(self, name: str) -> str:
        """The LoRA adapter that a request's `model` means; "" for the model itself. Raises UnknownModel."""
        if not name or name in self.model_names:
            return ""
        self.check_lora(name)
        return name


_DEFAULTS = Sampling()
