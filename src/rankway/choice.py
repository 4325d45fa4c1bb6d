"""The choice: which slot costs least for a prompt. Pure arithmetic over arrays that are indexed by slot.

    prefill_blocks = (queued prefill tokens + prompt_tokens - overlap * block_size) / block_size
    decode_blocks  = distinct full blocks active on the slot, the request's own included
    cost           = overlap_weight * prefill_blocks + decode_blocks + recent

An engine recomputes at least the last token of a prompt, so the overlap counts at most (prompt_tokens - 1) // block_size
blocks. This module is the readable form and the oracle of the compiled one.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from operator import index as whole_number
from typing import NamedTuple

from rankway.blocks import MASK64, Hashes, Tokens, hash_chain, pack_tokens
from rankway.index import ActiveBlocks, Index, as_numbers


@dataclass(slots=True)
class LoadTable:
    """What the choice reads, one entry per slot. The ledger keeps it; `grow` before using a new slot."""

    eligible: bytearray = field(default_factory=bytearray)
    """1: may be chosen."""
    known: bytearray = field(default_factory=bytearray)
    """1: the slot's index is known; 0: its overlap counts as 0."""
    prefill_tokens: array[int] = field(default_factory=lambda: array("q"))
    """Tokens still to prefill."""
    decode_blocks: array[int] = field(default_factory=lambda: array("q"))
    """Distinct full blocks active, without the request's own."""
    recent: array[float] = field(default_factory=lambda: array("d"))
    """Term for recent dispatches, already decayed and weighted (blocks)."""

    def grow(self, slots: int) -> None:
        """Make room for slots 0 … slots-1; new ones are ineligible and idle."""
        more = slots - len(self.eligible)
        if more > 0:
            self.eligible.extend(bytes(more))
            self.known.extend(bytes(more))
            self.prefill_tokens.frombytes(bytes(8 * more))
            self.decode_blocks.frombytes(bytes(8 * more))
            self.recent.frombytes(bytes(8 * more))

    def __len__(self) -> int:
        return len(self.eligible)


@dataclass(frozen=True, slots=True)
class Weights:
    """Settings of the choice."""

    overlap_weight: float = 1.0
    """Blocks of decode load that one block of prefill is worth; at least 0."""
    temperature: float = 0.0
    """0: the lowest cost wins; above 0: softmax(-cost / temperature) over costs normalised to their range."""


@dataclass(frozen=True, slots=True)
class Term:
    """One slot's cost and what it is made of (see the module's formula)."""

    slot: int
    cost: float
    overlap_blocks: int
    prefill_blocks: float
    decode_blocks: float
    queued_prefill_tokens: int
    recent: float
    tree_size: int


class Choice(NamedTuple):
    """The picked slot. A tuple, since it is made once a request by the compiled core."""

    slot: int
    cost: float
    overlap_blocks: int


def terms(
    index: Index,
    active: ActiveBlocks,
    hashes: Hashes,
    prompt_tokens: int,
    block_size: int,
    loads: LoadTable,
    weights: Weights,
) -> list[Term]:
    """The terms of every eligible slot, in slot order.

    Raises:
        ValueError: a block_size below 1, malformed hashes, or columns of `loads` that are shorter than `eligible`.
    """
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: must be at least 1")
    if min(len(loads.known), len(loads.prefill_tokens), len(loads.decode_blocks), len(loads.recent)) < len(loads):
        raise ValueError(f"loads: every column must have an item for each of the {len(loads)} slots")
    own_blocks = len(as_numbers(hashes))
    most = max(prompt_tokens - 1, 0) // block_size
    matches = index.match(hashes)
    result = []
    for slot in range(len(loads)):
        if not loads.eligible[slot]:
            continue
        overlap = min(matches.get(slot, 0), most) if loads.known[slot] else 0
        queued = loads.prefill_tokens[slot]
        prefill = (queued + prompt_tokens - overlap * block_size) / block_size
        decode = float(loads.decode_blocks[slot] + own_blocks - active.overlap(slot, hashes))
        cost = weights.overlap_weight * prefill + decode + loads.recent[slot]
        result.append(Term(slot, cost, overlap, prefill, decode, queued, loads.recent[slot], index.size(slot)))
    return result


def choose(
    index: Index,
    active: ActiveBlocks,
    hashes: Hashes,
    prompt_tokens: int,
    block_size: int,
    loads: LoadTable,
    weights: Weights,
    seed: int,
) -> Choice | None:
    """The slot for a prompt, or None if no slot is eligible.

    Args:
        hashes: the prompt's full blocks.
        prompt_tokens: at least 1.
        seed: 64 random bits; the same seed and state give the same choice.

    Raises:
        ValueError: as `terms`.
    """
    seed = whole_number(seed)
    candidates = terms(index, active, hashes, prompt_tokens, block_size, loads, weights)
    if not candidates:
        return None
    picked = _sample(candidates, weights.temperature, seed) if weights.temperature > 0 else _cheapest(candidates, seed)
    return Choice(picked.slot, picked.cost, picked.overlap_blocks)


def choose_for_tokens(
    index: Index,
    active: ActiveBlocks,
    tokens: Tokens,
    block_size: int,
    root: int,
    loads: LoadTable,
    weights: Weights,
    seed: int,
) -> tuple[Choice | None, bytes]:
    """`hash_chain` and `choose` in one call: the choice for a whole prompt, and its hashes (packed) for the booking.

    Raises:
        ValueError: as `hash_chain` and `terms`.
    """
    packed = pack_tokens(tokens)
    hashes = hash_chain(packed, block_size, root)
    return choose(index, active, hashes, len(packed) // 4, block_size, loads, weights, seed), hashes


def next_random(state: int) -> tuple[int, int]:
    """splitmix64: (new state, 64 random bits). Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014."""
    state = (state + 0x9E3779B97F4A7C15) & MASK64
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return state, z ^ (z >> 31)


def _cheapest(candidates: list[Term], seed: int) -> Term:
    """Lowest cost, then smallest tree, then reservoir sampling: the k-th equal replaces the pick with probability 1/k."""
    best = candidates[0]
    ties = 1
    state = seed & MASK64
    for term in candidates[1:]:
        if (term.cost, term.tree_size) < (best.cost, best.tree_size):
            best, ties = term, 1
        elif term.cost == best.cost and term.tree_size == best.tree_size:
            ties += 1
            state, bits = next_random(state)
            if bits % ties == 0:
                best = term
    return best


def _sample(candidates: list[Term], temperature: float, seed: int) -> Term:
    low = min(term.cost for term in candidates)
    spread = max(term.cost for term in candidates) - low
    if spread == 0:
        return _cheapest(candidates, seed)
    # Costs are normalised to 0 … 1, so exp never overflows and the cheapest has weight 1.
    shares = [math.exp(-(term.cost - low) / spread / temperature) for term in candidates]
    _, bits = next_random(seed & MASK64)
    total = 0.0
    for share in shares:  # not sum(): its rounding differs between Python versions, and the compiled twin adds in this order
        total += share
    point = (bits >> 11) * 2.0**-53 * total
    for term, share in zip(candidates, shares, strict=True):
        point -= share
        if point < 0:
            return term
    return candidates[-1]
