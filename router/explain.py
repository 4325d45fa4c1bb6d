"""Explain: every candidate with the terms of its cost, and in words why things are as they are. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rankway import choice
from rankway.choice import LoadTable, Term
from rankway.errors import Overloaded, Unavailable
from rankway.registry.records import Record
from rankway.router.eligibility import Query
from rankway.router.ledger import Report
from rankway.router.policy import Decision, Policy, Prompt
from rankway.router.targets import Place


@dataclass(frozen=True, slots=True)
class Past:
    """A decision and the loads that it was made from."""

    query: Query
    decision: Decision
    loads: LoadTable


class Recent:
    """The last decisions by request id. Recording one copies a few small arrays.

    Args:
        size: how many are kept; 0: none.
    """

    def __init__(self, size: int, loads: LoadTable) -> None:
        self._size = size
        self._loads = loads
        self._past: OrderedDict[str, Past] = OrderedDict()

    def __len__(self) -> int:
        return len(self._past)

    def record(self, request_id: str, query: Query, decision: Decision) -> None:
        """Keep a decision, before it is booked."""
        if self._size <= 0:
            return
        loads = self._loads
        copy = LoadTable(
            bytearray(loads.eligible), bytearray(loads.known), loads.prefill_tokens[:], loads.decode_blocks[:], loads.recent[:]
        )
        self._past[request_id] = Past(query, decision, copy)
        if len(self._past) > self._size:
            self._past.popitem(last=False)

    def find(self, request_id: str) -> Past | None:
        return self._past.get(request_id)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One target that serves the model."""

    record: Record
    dp_rank: int
    reason: str
    """Why it isn't eligible; "" if it is."""
    term: Term
    known: bool
    report: Report | None
    report_age_s: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a choice is or was made of."""

    chosen: Place | None
    prompt_tokens: int
    block_size: int
    candidates: Sequence[Candidate]
    remarks: Sequence[str]


def explain(policy: Policy, query: Query, prompt: Prompt, now: float, seed: int, index_age_s: float = 0.0) -> Explanation:
    """What would be chosen for a prompt now. Nothing is booked.

    Args:
        index_age_s: `Replica.age_s`.
    """
    policy.ledger.decay(now)
    members = policy.eligibility.members(query)
    block_size = members[0][0].block_size if members else 0
    hashes = {size: policy.hashes(query, prompt, size) for size in {record.block_size for record, _, _ in members}}
    candidates = _candidates(policy, query, hashes, len(prompt.tokens) // 4, policy.ledger.loads, now)
    remarks = _remarks(candidates, len(hashes.get(block_size, b"")) // 8, block_size, index_age_s)
    chosen = None
    try:
        decision = policy.would_decide(query, prompt, now, seed)
    except (Unavailable, Overloaded) as error:
        remarks.append(f"nobody is chosen now: {error.message}")
    else:
        chosen = decision.place
        if decision.must_wait:
            place = decision.place.target
            remarks.append(f"the request would wait for {place.worker_id}/{place.dp_rank}, which is full: its cache is worth it")
    if policy.settings.name != "kv":
        remarks.append(f"the policy is {policy.settings.name}: costs are shown, and don't count")
    return Explanation(chosen, len(prompt.tokens) // 4, block_size, _ordered(candidates), remarks)


def explain_past(policy: Policy, past: Past, now: float, index_age_s: float = 0.0) -> Explanation:
    """What was chosen for a recent request, from the loads as they were then."""
    decision = past.decision
    hashes = {decision.block_size: decision.hashes}
    candidates = _candidates(policy, past.query, hashes, decision.prompt_tokens, past.loads, now)
    candidates = [_as_decided(candidate, decision) for candidate in candidates]
    remarks = [
        "loads are as they were when the request was placed; overlaps of targets that weren't chosen are as the index is now",
        *_remarks(candidates, len(decision.hashes) // 8, decision.block_size, index_age_s),
    ]
    return Explanation(decision.place, decision.prompt_tokens, decision.block_size, _ordered(candidates), remarks)


def _candidates(
    policy: Policy, query: Query, hashes: dict[int, bytes], prompt_tokens: int, loads: LoadTable, now: float
) -> list[Candidate]:
    members = [member for member in policy.eligibility.members(query) if member[0].block_size in hashes]
    terms: dict[int, Term] = {}
    for block_size, blocks in hashes.items():
        slots = [slot for record, _, slot in members if record.block_size == block_size and slot < len(loads)]
        mask = bytearray(len(loads))
        for slot in slots:
            mask[slot] = 1
        table = LoadTable(mask, loads.known, loads.prefill_tokens, loads.decode_blocks, loads.recent)
        found = choice.terms(
            policy.index, policy.ledger.active, blocks, prompt_tokens, block_size, table, policy.settings.weights
        )
        terms.update((term.slot, term) for term in found)
    candidates = []
    for record, dp_rank, slot in members:
        if slot not in terms:
            continue
        reason = policy.eligibility.reason(record, dp_rank, query)
        if not reason and slot in policy.ledger.full:
            reason = "above its limits"
        last = policy.ledger.last_report(slot)
        report, age_s = (last[0], now - last[1]) if last is not None else (None, None)
        candidates.append(Candidate(record, dp_rank, reason, terms[slot], bool(loads.known[slot]), report, age_s))
    return candidates


def _as_decided(candidate: Candidate, decision: Decision) -> Candidate:
    term = candidate.term
    if term.slot != decision.slot:
        return candidate
    size = decision.block_size
    prefill = (term.queued_prefill_tokens + decision.prompt_tokens - decision.overlap_blocks * size) / size
    term = Term(
        term.slot,
        decision.cost,
        decision.overlap_blocks,
        prefill,
        term.decode_blocks,
        term.queued_prefill_tokens,
        term.recent,
        term.tree_size,
    )
    return Candidate(
        candidate.record, candidate.dp_rank, candidate.reason, term, candidate.known, candidate.report, candidate.report_age_s
    )


def _ordered(candidates: list[Candidate]) -> list[Candidate]:
    """Cheapest first, then the ineligible."""
    return sorted(candidates, key=lambda c: (bool(c.reason), c.term.cost * c.record.block_size, c.record.worker_id, c.dp_rank))


def _remarks(candidates: Sequence[Candidate], prompt_blocks: int, block_size: int, index_age_s: float) -> list[str]:
    remarks = []
    if not candidates:
        return ["nobody serves the model"]
    if len({candidate.record.block_size for candidate in candidates}) > 1:
        remarks.append("targets with different block sizes: their costs compare in tokens (cost × block size)")
    remarks += [f"{c.record.worker_id}/{c.dp_rank} is not eligible: {c.reason}" for c in candidates if c.reason]
    unknown = [candidate for candidate in candidates if not candidate.known]
    if unknown:
        names = ", ".join(f"{c.record.worker_id}/{c.dp_rank}" for c in unknown[:8])
        remarks.append(
            f"the index of {len(unknown)} of {len(candidates)} ranks is unknown ({names}): they score "
            "by load alone; is the indexer reachable, and do these workers publish KV events?"
        )
    silent = [candidate for candidate in candidates if candidate.report is None]
    doubt = ""
    if index_age_s == math.inf:
        doubt = "no indexer has been reached so far"
    elif index_age_s > 0:
        doubt = f"no indexer has been reached for {index_age_s:.0f} s: the index is as it was then"
    elif len(silent) == len(candidates):
        doubt = "no rank's load has come lately: is NATS reachable from the workers and the indexer? If not, the index is as old"
    if doubt:
        remarks.append(doubt)
    if all(candidate.term.overlap_blocks == 0 for candidate in candidates):
        remarks.append(_why_no_overlap(candidates, prompt_blocks, block_size, is_current=not doubt))
    if silent:
        remarks.append(f"{len(silent)} of {len(candidates)} ranks have published no load lately: only what routers booked counts")
    return remarks


def _why_no_overlap(candidates: Sequence[Candidate], prompt_blocks: int, block_size: int, *, is_current: bool) -> str:
    if prompt_blocks == 0:
        return f"all overlaps are 0: the prompt fills no block of {block_size} tokens"
    if not is_current:
        return "all overlaps are 0 in what the index knew last"
    if all(candidate.term.tree_size == 0 for candidate in candidates):
        return (
            "all overlaps are 0: no rank holds any block; either nothing was cached yet, or the workers' KV events never arrive "
            "(prefix caching off, events not wired, another NATS)"
        )
    if not any(candidate.known for candidate in candidates):
        return "all overlaps are 0: no rank's index is known"
    return (
        "all overlaps are 0 although ranks hold blocks: no rank holds the first block of this prompt; one that was sent before "
        "differs in its first tokens (chat template, BOS, salt, adapter) or was evicted"
    )
