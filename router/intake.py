"""Intake: from what a client asked to a checked request. Nothing is booked or sent for bad input.

Both front doors make a `Draft`; `Intake` resolves the model, checks every field, and turns the prompt into token ids:
at once when that is quick, else in a thread.
"""

from __future__ import annotations

import os
import reprlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

from rankway.blocks import pack_tokens, unpack_tokens
from rankway.errors import InvalidField, RankOutOfRange
from rankway.ranks import UINT32_MAX, check_name
from rankway.router.requests import RouterRequest
from rankway.router.tokenizers import EncodingThreads, Tokenizers
from rankway.sampling import Sampling
from rankway.tokenizer import Tokenizer

MAX_REQUEST_ID_CHARS = 128
MAX_NAME_CHARS = 256
"""Longest model name, cache salt, session id, tenant and role."""

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions; a chat may use all that fits."""


@dataclass(slots=True)
class Draft:
    """What a client asked for. Exactly one of `tokens`, `text` and `messages` is set."""

    sampling: Sampling
    """Checked; max_tokens None means the default."""
    tokens: Sequence[int] | bytes | None = None
    """Numbers, or packed little-endian uint32."""
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    """`role`, `content` and what else the chat template knows."""
    prompt_field: str = "prompt"
    """The client's name of the prompt, for error messages."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    request_id: str = ""
    cache_salt: str = ""
    worker_id: str = ""
    dp_rank: object = None
    """Global rank as the client gave it; None: any. What is no rank is refused with the ranks there are."""
    dp_group: str = ""
    priority: int = 0
    session_id: str = ""
    tenant: str = ""
    deadline: float | None = None
    """Event loop time."""
    reservation_id: str = ""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a model name stands for now."""

    model: str
    """Canonical name: the one that enters the block hashes."""
    lora: str
    """Adapter, when the name is one; else empty."""
    max_model_len: int
    """Most tokens of prompt and output together, the least of the model's workers."""
    vocab_size: int
    tokenizer: str
    """Fingerprint; empty: served by token ids only."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One name that requests may give as their model."""

    name: str
    model: str
    """Canonical name; the same as `name` unless that is an alias or an adapter."""
    max_model_len: int
    is_lora: bool = False


class Catalog(Protocol):
    """Who is there: the router's view of its workers, as far as checking a request needs it."""

    def resolve(self, model: str, dp_group: str) -> ModelCard:
        """What a model name, alias or LoRA adapter name stands for; "" is the only model there is.

        Raises:
            UnknownModel: nobody serves it; or it is "" and there are several.
            NotFound: no such DP group.
            Unavailable: there are no workers at all.
        """

    def check_pin(self, card: ModelCard, dp_group: str, worker_id: str, dp_rank: int | None) -> None:
        """That a pin names a worker and a rank that serve the model ("" and None: not pinned).

        Raises:
            NotFound: no such worker.
            RankOutOfRange: not one of the worker's or the DP group's ranks; the message names those there are.
        """

    def served_models(self) -> Sequence[ServedModel]:
        """Every name, canonical ones first."""


class Intake:
    """Makes checked requests.

    Args:
        catalog: the fleet.
        tokenizers: by fingerprint.
        threads: for texts that are too long to tokenise between two events.
    """

    def __init__(self, catalog: Catalog, tokenizers: Tokenizers, threads: EncodingThreads) -> None:
        self.catalog = catalog
        self.threads = threads
        self._tokenizers = tokenizers

    def prepare_now(self, draft: Draft) -> RouterRequest | None:
        """The request, if that takes no more than a moment; None: use `prepare`.

        Raises:
            RankwayError: the field that is wrong, and its value.
        """
        card = self._check(draft)
        if draft.tokens is not None:
            return _finish(draft, card, _checked_ids(draft, card.vocab_size))
        tokenizer = self._tokenizers.ready(card.tokenizer)
        if tokenizer is None or _chars(draft) > tokenizer.quick_chars:
            return None
        return _finish(draft, card, _encoded(draft, tokenizer))

    async def prepare(self, draft: Draft) -> RouterRequest:
        """The request; a long text is tokenised in a thread.

        Raises:
            RankwayError: the field that is wrong, and its value; Overloaded when too many texts wait to be tokenised;
                Unavailable when the tokenizer can't be had.
        """
        request = self.prepare_now(draft)
        if request is not None:
            return request
        card = self._check(draft)
        tokenizer = await self._tokenizers.get(card.tokenizer)
        tokens = await self._run(_chars(draft), tokenizer, partial(_encoded, draft, tokenizer))
        return _finish(draft, card, tokens)

    async def tokenize(self, draft: Draft, *, add_special_tokens: bool = True) -> tuple[array[int], ModelCard]:
        """Token ids of the draft's text or messages, and its model. Errors as `prepare`, but any length is allowed."""
        card = self.catalog.resolve(draft.model, draft.dp_group)
        tokenizer = await self._tokenizers.get(card.tokenizer)
        encode = partial(_encoded, draft, tokenizer, add_special_tokens=add_special_tokens, allow_empty=True)
        return unpack_tokens(await self._run(_chars(draft), tokenizer, encode)), card

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """The text of token ids. Errors as `prepare`."""
        card = self.catalog.resolve(model, "")
        tokenizer = await self._tokenizers.get(card.tokenizer)
        packed = _checked_ids(Draft(Sampling(), tokens=token_ids, prompt_field="tokens"), card.vocab_size, allow_empty=True)
        text: str = await self._run(len(packed), tokenizer, partial(tokenizer.decode, unpack_tokens(packed)))
        return text

    async def close(self) -> None:
        """Give up what is being fetched or waits to be tokenised."""
        self.threads.close()
        await self._tokenizers.close()

    async def _run(self, chars: int, tokenizer: Tokenizer, work: Callable[[], Any]) -> Any:
        if chars <= tokenizer.quick_chars:
            return work()
        return await self.threads.run(chars, work)

    def _check(self, draft: Draft) -> ModelCard:
        """Everything that can be checked without the prompt's tokens."""
        if len(draft.request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidField("request_id", draft.request_id, f"at most {MAX_REQUEST_ID_CHARS} characters")
        for name in ("model", "cache_salt", "session_id", "tenant", "reservation_id"):
            if len(getattr(draft, name)) > MAX_NAME_CHARS:
                raise InvalidField(name, getattr(draft, name), f"at most {MAX_NAME_CHARS} characters")
        if not -(2**31) <= draft.priority < 2**31:
            raise InvalidField("priority", draft.priority, "must fit a signed 32-bit integer")
        for name in ("worker_id", "dp_group"):
            if getattr(draft, name):
                check_name(name, getattr(draft, name))
        _check_prompt_form(draft)
        card = self.catalog.resolve(draft.model, draft.dp_group)
        if draft.worker_id or draft.dp_rank is not None:
            self._check_pin(draft, card)
        _check_sampled_ids(draft.sampling, card.vocab_size)
        return card

    def _check_pin(self, draft: Draft, card: ModelCard) -> None:
        dp_rank = draft.dp_rank
        if dp_rank is None or (type(dp_rank) is int and 0 <= dp_rank <= UINT32_MAX):
            self.catalog.check_pin(card, draft.dp_group, draft.worker_id, dp_rank)
            return
        try:
            self.catalog.check_pin(card, draft.dp_group, draft.worker_id, UINT32_MAX + 1)
        except RankOutOfRange as error:
            raise RankOutOfRange(reprlib.repr(dp_rank), error.owner, error.ranks) from None
        raise InvalidField("dp_rank", dp_rank, "is no rank")


def _check_prompt_form(draft: Draft) -> None:
    given = [form for form in (draft.tokens, draft.text, draft.messages) if form is not None]
    if len(given) != 1:
        raise InvalidField(draft.prompt_field, None, "exactly one prompt must be given: token ids, text or messages")
    if not given[0]:
        raise InvalidField(draft.prompt_field, given[0], "must not be empty")
    for i, message in enumerate(draft.messages or ()):
        if not 1 <= len(message.get("role") or "") <= MAX_NAME_CHARS:
            raise InvalidField(f"{draft.prompt_field}[{i}].role", message.get("role"), f"1 to {MAX_NAME_CHARS} characters")


def _check_sampled_ids(sampling: Sampling, vocab_size: int) -> None:
    for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidField(name, token_id, f"token ids are 0 … {vocab_size - 1}")


def _chars(draft: Draft) -> int:
    if draft.text is not None:
        return len(draft.text)
    return sum(len(message.get("content") or "") for message in draft.messages or ())


def _encoded(draft: Draft, tokenizer: Tokenizer, *, add_special_tokens: bool = True, allow_empty: bool = False) -> bytes:
    try:
        if draft.messages is not None:
            tokens = tokenizer.encode_chat(draft.messages, draft.template_kwargs)
        else:
            tokens = tokenizer.encode(draft.text or "", add_special_tokens)
    except UnicodeEncodeError:
        raise InvalidField(draft.prompt_field, f"{_chars(draft)} characters", "holds surrogates: it is no UTF-8") from None
    except ValueError as error:
        raise InvalidField(draft.prompt_field, f"{len(draft.messages or ())} messages", str(error)) from None
    if not tokens and not allow_empty:
        raise InvalidField(draft.prompt_field, draft.text, "has no tokens")
    return pack_tokens(tokens)


def _checked_ids(draft: Draft, vocab_size: int, *, allow_empty: bool = False) -> bytes:
    """The draft's token ids, packed, all of them in the vocabulary."""
    tokens = draft.tokens
    if not tokens and not allow_empty:
        raise InvalidField(draft.prompt_field, tokens, "must not be empty")
    try:
        packed = pack_tokens(tokens if tokens is not None else b"")
        outside = not all_below(packed, vocab_size)
    except ValueError as error:
        if isinstance(tokens, (bytes, bytearray, memoryview)):
            raise InvalidField(draft.prompt_field, f"{len(tokens)} bytes", str(error)) from None
        outside = True
        packed = b""
    if outside:
        ids = unpack_tokens(packed) if packed else tokens
        where, token_id = next((i, t) for i, t in enumerate(ids or ()) if not (isinstance(t, int) and 0 <= t < vocab_size))
        raise InvalidField(f"{draft.prompt_field}[{where}]", token_id, f"token ids are 0 … {vocab_size - 1}")
    return packed


def all_below(packed: bytes, limit: int) -> bool:
    """Whether every little-endian uint32 is below `limit`: mostly 3 ns a token, where `max` over numbers takes 20."""
    if packed[3::4].count(0) != len(packed) // 4 and limit <= 1 << 24:
        return False
    if limit <= 1 << 24 and not packed[2::4].translate(None, bytes(range(limit >> 16))):
        return True
    return max(unpack_tokens(packed), default=0) < limit


def _finish(draft: Draft, card: ModelCard, prompt: bytes) -> RouterRequest:
    sampling = _with_max_tokens(draft, len(prompt) // 4, card.max_model_len)
    return RouterRequest(
        request_id=draft.request_id or os.urandom(16).hex(),
        model=card.model,
        prompt=prompt,
        sampling=sampling,
        lora=card.lora,
        cache_salt=draft.cache_salt,
        worker_id=draft.worker_id,
        dp_rank=cast("int | None", draft.dp_rank),
        dp_group=draft.dp_group,
        priority=draft.priority,
        session_id=draft.session_id,
        tenant=draft.tenant,
        deadline=draft.deadline,
        reservation_id=draft.reservation_id,
    )


def _with_max_tokens(draft: Draft, prompt_tokens: int, max_model_len: int) -> Sampling:
    """The sampling parameters with max_tokens set, checked against what the model can hold."""
    room = max_model_len - prompt_tokens
    if room < 1:
        reason = f"max_model_len={max_model_len} must hold the prompt and one more token"
        raise InvalidField(draft.prompt_field, f"{prompt_tokens} tokens", reason)
    sampling = draft.sampling
    if sampling.max_tokens is None:
        sampling = sampling.changed(max_tokens=room if draft.messages is not None else min(DEFAULT_MAX_TOKENS, room))
    elif sampling.max_tokens > room:
        reason = f"with a prompt of {prompt_tokens} tokens it passes max_model_len={max_model_len}"
        raise InvalidField("max_tokens", sampling.max_tokens, reason)
    if sampling.min_tokens > (sampling.max_tokens or 0):
        raise InvalidField("min_tokens", sampling.min_tokens, f"must be 0 … max_tokens={sampling.max_tokens}")
    return sampling
