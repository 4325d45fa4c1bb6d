"""The choice of a target: who is eligible, what each costs, what is logged and explained. No I/O; time and seed are arguments."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from rankway import choice, logs, native
from rankway.blocks import root_hash
from rankway.choice import LoadTable, Term, Weights
from rankway.errors import Overloaded, RankwayError, Unavailable
from rankway.index import Index
from rankway.router.eligibility import Eligibility, Query, Section
from rankway.router.fleet import Fleet
from rankway.router.ledger import Ledger
from rankway.router.targets import Place, Targets

log = logs.get("policy")

_root = functools.lru_cache(maxsize=4096)(root_hash)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a prompt goes, and what that was decided from."""

    slot: int
    place: Place
    endpoint: str
    cost: float
    overlap_blocks: int
    block_size: int
    prompt_tokens: int
    hashes: bytes
    """Full blocks of the prompt."""
    must_wait: bool = False
    """The target is full, and waiting for it is cheaper than going elsewhere."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens to prefill there: at least one, the engine recomputes the last."""
        return max(1, self.prompt_tokens - self.overlap_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """How targets are chosen."""

    name: str = "kv"
    """"kv" (cheapest by DESIGN's formula) or "round_robin"."""
    weights: Weights = Weights()
    hold_blocks_per_s: float = 100.0
    """What a second of waiting for a full target costs, in blocks: a request leaves its warm rank for a cold one when that is cheaper."""


class Picker(Protocol):
    """Picks one slot of an eligible mask."""

    def __call__(
        self, hashes: bytes, prompt_tokens: int, block_size: int, mask: bytearray, seed: int
    ) -> choice.Choice | None: ...


class Policy:
    """Chooses targets over an index, a ledger and the fleet's state, all shared with their owners.

    Args:
        index: the router's replica of who holds which block.
    """

    def __init__(
        self, settings: PolicySettings, fleet: Fleet, targets: Targets, eligibility: Eligibility, ledger: Ledger, index: Index
    ) -> None:
        self.settings = settings
        self.fleet = fleet
        self.targets = targets
        self.eligibility = eligibility
        self.ledger = ledger
        self.index = index
        self._pick: Picker = self._cheapest if settings.name == "kv" else self._next
        self._last_slot = -1
        self.choices = 0

    def decide(self, query: Query, prompt: bytes, cache_salt: str, now: float, seed: int, waited_s: float = 0.0) -> Decision:
        """The target for a prompt (packed token ids). Nothing is booked.

        Args:
            seed: 64 random bits, for ties and sampling.
            waited_s: how long the request has waited already, when a full rank may keep it (`Decision.must_wait`).

        Raises:
            Unavailable: nobody is eligible; the message says why.
            Overloaded: all who are eligible are above their limits.
        """
        sections = self.eligibility.sections(query)
        if not sections:
            raise self._nobody(query)
        self.choices += 1
        self.ledger.decay(now)
        best: Decision | None = None
        for section in sections:
            decision = self._decide_in(section, query, prompt, cache_salt, seed, waited_s)
            # Costs are in blocks: in tokens they compare between block sizes.
            if decision is not None and (best is None or decision.cost * decision.block_size < best.cost * best.block_size):
                best = decision
        if best is None:
            raise Overloaded(f"every target of model {query.lora or query.model!r} that may take the request is above its limits")
        return best

    def _decide_in(
        self, section: Section, query: Query, prompt: bytes, cache_salt: str, seed: int, waited_s: float
    ) -> Decision | None:
        block_size, prompt_tokens = section.block_size, len(prompt) // 4
        hashes = native.hash_chain(prompt, block_size, _root(query.model, query.lora, cache_salt))
        full = self.ledger.full_among(section.mask)
        if not full:
            picked = self._pick(hashes, prompt_tokens, block_size, section.mask, seed)
        else:
            open_mask = bytearray(section.mask)
            for slot in full:
                open_mask[slot] = 0
            picked = self._pick(hashes, prompt_tokens, block_size, open_mask, seed) if 1 in open_mask else None
        if picked is None:
            return None
        if full and self.settings.name == "kv":
            warm = self._cheapest(hashes, prompt_tokens, block_size, section.mask, seed)
            if warm is not None and warm.slot in full:
                waiting = self.settings.hold_blocks_per_s * waited_s + self.ledger.held(warm.slot)
                if warm.cost + waiting < picked.cost:
                    return self._decision(warm, section, prompt_tokens, hashes, must_wait=True)
        decision = self._decision(picked, section, prompt_tokens, hashes)
        self._log(decision, section)
        return decision

    def terms(self, section: Section, hashes: bytes, prompt_tokens: int) -> list[Term]:
        """The terms of every eligible slot of a section."""
        return choice.terms(
            self.index,
            self.ledger.active,
            hashes,
            prompt_tokens,
            section.block_size,
            self._table(section.mask),
            self.settings.weights,
        )

    def hashes(self, query: Query, prompt: bytes, cache_salt: str, block_size: int) -> bytes:
        """The prompt's full blocks."""
        return native.hash_chain(prompt, block_size, _root(query.model, query.lora, cache_salt))

    def _cheapest(self, hashes: bytes, prompt_tokens: int, block_size: int, mask: bytearray, seed: int) -> choice.Choice | None:
        return native.choose(
            self.index,
            self.ledger.active,
            hashes,
            prompt_tokens,
            block_size,
            self._table(mask),
            self.settings.weights,
            seed,
        )

    def _next(self, hashes: bytes, prompt_tokens: int, block_size: int, mask: bytearray, seed: int) -> choice.Choice | None:
        slot = mask.find(1, self._last_slot + 1)
        if slot < 0:
            slot = mask.find(1)
        if slot < 0:
            return None
        self._last_slot = slot
        overlap = self.index.match(hashes).get(slot, 0) if self.ledger.loads.known[slot] else 0
        return choice.Choice(slot, 0.0, min(overlap, max(prompt_tokens - 1, 0) // block_size))

    def _table(self, mask: bytearray) -> LoadTable:
        loads = self.ledger.loads
        if len(mask) < len(loads):
            mask.extend(bytes(len(loads) - len(mask)))
        return LoadTable(mask, loads.known, loads.prefill_tokens, loads.decode_blocks, loads.recent)

    def _decision(
        self, picked: choice.Choice, section: Section, prompt_tokens: int, hashes: bytes, *, must_wait: bool = False
    ) -> Decision:
        place = self.targets.place(picked.slot)
        record = self.fleet.record(place.instance) if place is not None else None
        if place is None or record is None:
            raise RankwayError(f"slot {picked.slot} is eligible but nobody's")
        return Decision(
            picked.slot,
            place,
            record.endpoint,
            picked.cost,
            picked.overlap_blocks,
            section.block_size,
            prompt_tokens,
            hashes,
            must_wait,
        )

    def _nobody(self, query: Query) -> RankwayError:
        members = self.eligibility.members(query)
        if not members:
            return Unavailable(f"no worker serves model {query.lora or query.model!r}{_in_group(query)} now")
        reasons = (
            (self.eligibility.reason(record, rank, query) or "unknown", f"{record.worker_id}/{rank}")
            for record, rank, _ in members
        )
        return Unavailable(f"no target for model {query.lora or query.model!r}{_in_group(query)}: {_by_reason(reasons)}")

    def _log(self, decision: Decision, section: Section) -> None:
        if log.is_enabled_for(logging.DEBUG):
            for term in self.terms(section, decision.hashes, decision.prompt_tokens):
                log.debug(self._formula(term), **self._term_keys(term))
        if log.is_enabled_for(logging.INFO):
            self._log_selected(decision)

    def _log_selected(self, decision: Decision) -> None:
        target = decision.place.target
        tree_size = self.index.size(decision.slot)
        record = self.fleet.record(decision.place.instance)
        total_blocks = record.total_kv_blocks if record is not None else 0
        log.info(
            f"Selected worker: worker_id={target.worker_id} dp_rank={target.dp_rank}, logit: {decision.cost:.3f}, "
            f"cached blocks: {decision.overlap_blocks}, tree size: {tree_size}, total blocks: {total_blocks}",
            worker_id=target.worker_id,
            dp_rank=int(target.dp_rank),
            logit=decision.cost,
            cached_blocks=decision.overlap_blocks,
            tree_size=tree_size,
            total_blocks=total_blocks,
        )

    def _formula(self, term: Term) -> str:
        place = self.targets.place(term.slot)
        assert place is not None
        weight = self.settings.weights.overlap_weight
        recent = f" + {term.recent:.3f}" if term.recent else ""
        return (
            f"Formula for worker_id={place.target.worker_id} dp_rank={place.target.dp_rank} with {term.overlap_blocks} cached blocks: "
            f"{term.cost:.3f} = {weight:.1f} * prefill_blocks + decode_blocks{' + recent' if term.recent else ''} = "
            f"{weight:.1f} * {term.prefill_blocks:.3f} + {term.decode_blocks:.3f}{recent}"
        )

    def _term_keys(self, term: Term) -> dict[str, object]:
        place = self.targets.place(term.slot)
        assert place is not None
        return {
            "worker_id": place.target.worker_id,
            "dp_rank": int(place.target.dp_rank),
            "cached_blocks": term.overlap_blocks,
            "cost": term.cost,
            "overlap_weight": self.settings.weights.overlap_weight,
            "prefill_blocks": term.prefill_blocks,
            "decode_blocks": term.decode_blocks,
            "recent": term.recent,
        }


def _in_group(query: Query) -> str:
    return f" in DP group {query.dp_group}" if query.dp_group else ""


def _by_reason(reasons: Iterable[tuple[str, str]]) -> str:
    """ "not connected (w1/0, w1/1, …); rank drains (w2/4)"."""
    who: dict[str, list[str]] = {}
    for reason, target in reasons:
        who.setdefault(reason, []).append(target)
    return "; ".join(f"{reason} ({', '.join(names[:4])}{', …' if len(names) > 4 else ''})" for reason, names in who.items())
