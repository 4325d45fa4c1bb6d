"""The choice of a target: who is eligible, what each costs, what is logged and explained. No I/O; time and seed are arguments."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
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
    weights: Weights = field(default_factory=Weights)
    hold_blocks_per_s: float = 100.0
    """What a second of waiting for a full target costs, in blocks. A request leaves its warm rank when moving is cheaper."""
    affinity_blocks: float = 64.0
    """How much dearer than the cheapest (blocks) the target of a session's last request may be to be kept."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the cost depends on."""

    tokens: bytes
    """Packed little-endian uint32."""
    cache_salt: str = ""
    preferred: int | None = None
    """Slot of the session's last request."""
    waited_s: float = 0.0
    """How long the request has waited already."""


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

    def decide(self, query: Query, prompt: Prompt, now: float, seed: int) -> Decision:
        """The target for a prompt. Nothing is booked.

        Args:
            seed: 64 random bits, for ties and sampling.

        Raises:
            Unavailable: nobody is eligible; the message says why.
            Overloaded: all who are eligible are above their limits.
        """
        decision, section = self._decide(query, prompt, now, seed)
        self.choices += 1
        self._last_slot = decision.slot
        if not decision.must_wait:
            self._log(decision, section)
        return decision

    def would_decide(self, query: Query, prompt: Prompt, now: float, seed: int) -> Decision:
        """What `decide` would return, and raises as it does; it is neither logged nor counted."""
        return self._decide(query, prompt, now, seed)[0]

    def _decide(self, query: Query, prompt: Prompt, now: float, seed: int) -> tuple[Decision, Section]:
        sections = self.eligibility.sections(query)
        if not sections:
            raise self._nobody(query)
        self.ledger.decay(now)
        best: tuple[Decision, Section] | None = None
        for section in sections:
            decision = self._decide_in(section, query, prompt, seed)
            # Costs are in blocks: in tokens they compare between block sizes.
            if decision is not None and (best is None or _in_tokens(decision) < _in_tokens(best[0])):
                best = decision, section
        if best is None:
            raise Overloaded(f"every target of model {query.lora or query.model!r} that may take the request is above its limits")
        return best

    def _decide_in(self, section: Section, query: Query, prompt: Prompt, seed: int) -> Decision | None:
        block_size, prompt_tokens = section.block_size, len(prompt.tokens) // 4
        hashes = self.hashes(query, prompt, block_size)
        mask = section.mask
        full = self.ledger.full_among(mask)
        if full:
            mask = bytearray(mask)
            for slot in full:
                mask[slot] = 0
        picked = self._pick(hashes, prompt_tokens, block_size, mask, seed) if not full or 1 in mask else None
        if picked is None:
            return None
        if self.settings.name == "kv":
            if full:
                warm = self._cheapest(hashes, prompt_tokens, block_size, section.mask, seed)
                if warm is not None and warm.slot in full and warm.cost + self._waiting(warm.slot, prompt) < picked.cost:
                    return self._decision(warm, section, prompt_tokens, hashes, must_wait=True)
            if prompt.preferred is not None and prompt.preferred != picked.slot:
                picked = self._preferred(prompt.preferred, picked, hashes, prompt_tokens, block_size, mask)
        return self._decision(picked, section, prompt_tokens, hashes)

    def _waiting(self, slot: int, prompt: Prompt) -> float:
        """What waiting for a full slot costs, in blocks: the time waited already, and those who wait for it too."""
        return self.settings.hold_blocks_per_s * prompt.waited_s + self.ledger.held(slot)

    def _preferred(
        self, slot: int, picked: choice.Choice, hashes: bytes, prompt_tokens: int, block_size: int, mask: bytearray
    ) -> choice.Choice:
        """The session's last target if it is eligible and not much dearer than the cheapest."""
        if slot >= len(mask) or not mask[slot]:
            return picked
        only = bytearray(len(mask))
        only[slot] = 1
        kept = self._cheapest(hashes, prompt_tokens, block_size, only, 0)
        return kept if kept is not None and kept.cost <= picked.cost + self.settings.affinity_blocks else picked

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

    def hashes(self, query: Query, prompt: Prompt, block_size: int) -> bytes:
        """The prompt's full blocks."""
        return native.hash_chain(prompt.tokens, block_size, _root(query.model, query.lora, prompt.cache_salt))

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
        if logs.enabled(logging.DEBUG):
            for term in self.terms(section, decision.hashes, decision.prompt_tokens):
                place = self.targets.place(term.slot)
                if place is not None:
                    self._log_formula(place, term)
        if logs.enabled(logging.INFO):
            self._log_selected(decision)

    def _log_selected(self, decision: Decision) -> None:
        target = decision.place.target
        tree_size = self.index.size(decision.slot)
        record = self.fleet.record(decision.place.instance)
        total_blocks = record.total_kv_blocks if record is not None else 0
        line = (
            f"Selected worker: worker_id={target.worker_id} dp_rank={target.dp_rank}, logit: {decision.cost:.3f}, "
            f"cached blocks: {decision.overlap_blocks}, tree size: {tree_size}, total blocks: {total_blocks}"
        )
        log.info(
            line,
            worker_id=target.worker_id,
            dp_rank=int(target.dp_rank),
            logit=decision.cost,
            cached_blocks=decision.overlap_blocks,
            tree_size=tree_size,
            total_blocks=total_blocks,
        )

    def _log_formula(self, place: Place, term: Term) -> None:
        weight = self.settings.weights.overlap_weight
        worker_id, dp_rank = place.target.worker_id, int(place.target.dp_rank)
        names, values = "", ""
        if term.recent:
            names, values = " + recent", f" + {term.recent:.3f}"
        line = (
            f"Formula for worker_id={worker_id} dp_rank={dp_rank} with {term.overlap_blocks} cached blocks: {term.cost:.3f} = "
            f"{weight:.1f} * prefill_blocks + decode_blocks{names} = "
            f"{weight:.1f} * {term.prefill_blocks:.3f} + {term.decode_blocks:.3f}{values}"
        )
        log.debug(
            line,
            worker_id=worker_id,
            dp_rank=dp_rank,
            cached_blocks=term.overlap_blocks,
            cost=term.cost,
            overlap_weight=weight,
            prefill_blocks=term.prefill_blocks,
            decode_blocks=term.decode_blocks,
            recent=term.recent,
        )


def _in_tokens(decision: Decision) -> float:
    return decision.cost * decision.block_size


def _in_group(query: Query) -> str:
    return f" in DP group {query.dp_group}" if query.dp_group else ""


def _by_reason(reasons: Iterable[tuple[str, str]]) -> str:
    """ "not connected (w1/0, w1/1, …); rank drains (w2/4)"."""
    who: dict[str, list[str]] = {}
    for reason, target in reasons:
        who.setdefault(reason, []).append(target)
    return "; ".join(f"{reason} ({', '.join(names[:4])}{', …' if len(names) > 4 else ''})" for reason, names in who.items())
