"""Routing policies over a request trace in virtual time: the router's own choice and ledger, the worker's own simulator.

No process, socket or clock takes part, so an hour of a thousand ranks is minutes of one processor and the same arguments give the
same table. Each rank is a `worker.simulator.Simulator` whose events reach the index through the worker's own mirror, at once.

    python bench/policy_study.py TRACE [--ranks 16] [--speed 4] [--requests N] [--policies kv,load,round_robin]

A trace is a file of JSON lines {"timestamp": ms, "input_length", "output_length", "hash_ids": one a 512 tokens of the prompt}, as
the Mooncake project publishes them. `load` is `kv` that sees no cache: the same cost with every overlap 0.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rankway import native
from rankway.blocks import root_hash
from rankway.choice import Weights, next_random
from rankway.router.ledger import Booking, Ledger, RecentTerm
from rankway.sampling import Sampling
from rankway.worker.mirror import Mirror, Removed, Stored
from rankway.worker.sim_tokens import WORDS, Vocabulary
from rankway.worker.simulator import SimConfig, SimRequest, Simulator

UNIT_TOKENS = 512
"""Tokens that one id of a trace stands for."""

MODEL = "study"


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    tokens: array[int]
    output_tokens: int


@dataclass(slots=True)
class Outcome:
    """What a policy came to."""

    first_token_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    requests_of_rank: list[int] = field(default_factory=list)
    wall_s: float = 0.0

    def quantile(self, q: float) -> float:
        ordered = sorted(self.first_token_s)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def read_trace(path: Path, speed: float, most: int | None) -> Iterator[Arrival]:
    """The trace's requests with their times divided by `speed`."""
    with path.open() as lines:
        for line in itertools.islice(lines, most):
            entry = json.loads(line)
            tokens: array[int] = array("I")
            for unit in entry["hash_ids"]:
                tokens.extend(array("I", (unit,)) * UNIT_TOKENS)
            del tokens[entry["input_length"] :]
            yield Arrival(entry["timestamp"] / 1000 / speed, tokens, max(1, entry["output_length"]))


class Cluster:
    """Ranks, and the router's view of them."""

    def __init__(self, policy: str, ranks: int, config: SimConfig) -> None:
        vocabulary = Vocabulary([f"{word} ".encode() for word in WORDS], 2**32 - 1)
        self._policy = policy
        self._config = config
        self._ranks = [Simulator(config, vocabulary) for _ in range(ranks)]
        self._mirrors = [Mirror(MODEL, config.block_size) for _ in range(ranks)]
        self._index = native.open_index()
        self._ledger = Ledger(RecentTerm())
        for slot in range(ranks):
            self._ledger.open(slot)
            self._ledger.loads.eligible[slot] = 1
            self._ledger.loads.known[slot] = policy != "load"
        self._root = root_hash(MODEL)
        self._next = itertools.cycle(range(ranks))
        self._seed = 1
        self._due: list[tuple[float, int]] = []
        self._flying: dict[str, tuple[float, Booking]] = {}
        self.outcome = Outcome(requests_of_rank=[0] * ranks)

    def run(self, arrivals: Iterator[Arrival]) -> Outcome:
        """Serve them all to the end."""
        for number, arrival in enumerate(arrivals):
            self._advance(arrival.at)
            self._dispatch(str(number), arrival)
        self._advance(float("inf"))
        self.outcome.preemptions = sum(rank.load().preemptions for rank in self._ranks)
        return self.outcome

    def _advance(self, until: float) -> None:
        """Take every step that is due before `until`."""
        while self._due and self._due[0][0] <= until:
            at, slot = heapq.heappop(self._due)
            self._step(slot, at)

    def _dispatch(self, name: str, arrival: Arrival) -> None:
        block_size = self._config.block_size
        hashes = native.hash_chain(arrival.tokens, block_size, self._root)
        if self._policy == "round_robin":
            slot, overlap = next(self._next), 0
        else:
            self._seed, bits = next_random(self._seed)
            picked = native.choose(
                self._index, self._ledger.active, hashes, len(arrival.tokens), block_size, self._ledger.loads, Weights(), bits
            )
            assert picked is not None, "every rank is eligible"
            slot, overlap = picked.slot, picked.overlap_blocks
        prefill = max(1, len(arrival.tokens) - overlap * block_size)
        self._flying[name] = arrival.at, self._ledger.book(name, slot, len(arrival.tokens), prefill, hashes, arrival.at)
        self.outcome.requests_of_rank[slot] += 1
        self.outcome.prompt_tokens += len(arrival.tokens)
        rank = self._ranks[slot]
        sleeping = rank.idle and rank.due is None
        sampling = Sampling(max_tokens=arrival.output_tokens)
        rank.submit(SimRequest(name, arrival.tokens, len(arrival.tokens), sampling), arrival.at)
        if sleeping:
            self._step(slot, arrival.at)

    def _step(self, slot: int, at: float) -> None:
        result = self._ranks[slot].step(at)
        for name, output in result.outputs:
            if output.cached_tokens is not None:
                arrived, booking = self._flying[name]
                self._ledger.prefilled(booking)
                self.outcome.first_token_s.append(at - arrived)
                self.outcome.cached_tokens += output.cached_tokens
            if output.finish is not None:
                self._ledger.end(self._flying.pop(name)[1])
                self.outcome.end_s = at
        for change in self._mirrors[slot].apply(result.events):
            if isinstance(change, Stored):
                self._index.store(slot, change.blocks)
            elif isinstance(change, Removed):
                self._index.remove(slot, change.blocks)
            else:
                self._index.clear(slot)
        if result.next_due is not None:
            heapq.heappush(self._due, (result.next_due, slot))


def study(policy: str, arguments: argparse.Namespace) -> Outcome:
    """One policy over the whole trace."""
    config = SimConfig(
        total_blocks=arguments.blocks,
        max_model_len=arguments.blocks * 16,
        max_num_batched_tokens=2_048,
        prefill_tokens_per_s=arguments.prefill_tokens_per_s,
        decode_ms=arguments.decode_ms,
    )
    began = time.perf_counter()
    outcome = Cluster(policy, arguments.ranks, config).run(read_trace(arguments.trace, arguments.speed, arguments.requests))
    outcome.wall_s = time.perf_counter() - began
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=32_768, help="KV blocks of a rank, 16 tokens each")
    parser.add_argument("--speed", type=float, default=4.0, help="divides the trace's times")
    parser.add_argument("--requests", type=int, help="the first so many of the trace")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=40_000.0)
    parser.add_argument("--decode-ms", type=float, default=20.0)
    parser.add_argument("--policies", default="kv,load,round_robin")
    arguments = parser.parse_args()
    print("policy       TTFT mean    p50      p95      p99    cached  busiest/mean  preempted  virtual   real")
    for policy in arguments.policies.split(","):
        outcome = study(policy, arguments)
        ranks = outcome.requests_of_rank
        ttft = outcome.first_token_s
        print(
            f"{policy:<12} {sum(ttft) / len(ttft):7.3f} s {outcome.quantile(0.5):6.3f} s {outcome.quantile(0.95):6.3f} s"
            f" {outcome.quantile(0.99):6.3f} s  {100 * outcome.cached_tokens / outcome.prompt_tokens:5.1f} %"
            f"  {max(ranks) * len(ranks) / sum(ranks):12.2f}  {outcome.preemptions:9d}"
            f"  {outcome.end_s:5.0f} s {outcome.wall_s:5.1f} s"
        )


if __name__ == "__main__":
    main()
