"""The loads of one vLLM engine's ranks, from what it reports and from what we sent it. Pure.

vLLM reports only when it steps. An engine whose last request was aborted takes no further step, and its last report would stand
for ever: what we know to be over caps what was reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankway.ranks import LocalRank
from rankway.worker.engine import EngineLoad


@dataclass(slots=True)
class _Rank:
    """The last report, and what is under way by our own count."""

    running: int = 0
    waiting: int = 0
    deferred: int = 0
    usage: float = 0.0
    preemptions: int = 0
    queue_s: float = 0.0
    queued_requests: int = 0
    sent: int = 0
    prefill_tokens: int = 0


class RankLoads:
    """One engine's loads by local rank.

    Args:
        size: ranks of the engine.
    """

    def __init__(self, size: int) -> None:
        self.blocks_per_rank = 0
        self._ranks = [_Rank() for _ in range(size)]
        self._unplaced = 0
        """Requests under way whose rank vLLM chose: it doesn't tell us which."""

    def began(self, local_rank: LocalRank | None, prompt_tokens: int) -> None:
        """A request was sent."""
        if local_rank is None:
            self._unplaced += 1
        else:
            self._ranks[local_rank].sent += 1
            self._ranks[local_rank].prefill_tokens += prompt_tokens

    def prefilled(self, local_rank: LocalRank | None, prompt_tokens: int) -> None:
        """Its first token came, or it ended without one."""
        if local_rank is not None:
            self._ranks[local_rank].prefill_tokens -= prompt_tokens

    def ended(self, local_rank: LocalRank | None) -> None:
        if local_rank is None:
            self._unplaced -= 1
        else:
            self._ranks[local_rank].sent -= 1

    def reported(self, local_rank: LocalRank, running: int, waiting: int, deferred: int, usage: float) -> None:
        """vLLM's SchedulerStats of a step. `usage`: share of the KV blocks that requests use, 0 … 1."""
        rank = self._ranks[local_rank]
        rank.running, rank.waiting, rank.deferred, rank.usage = running, waiting, deferred, usage

    def iterated(self, local_rank: LocalRank, preempted: int, queue_times_s: list[float]) -> None:
        """vLLM's IterationStats of a step: preemptions in it, and queue times of the requests that finished in it."""
        rank = self._ranks[local_rank]
        rank.preemptions += preempted
        rank.queue_s += sum(queue_times_s)
        rank.queued_requests += len(queue_times_s)

    def now(self) -> list[EngineLoad]:
        """One load a rank. The mean queue time is that of the requests that finished since the last call."""
        return [self._load(rank) for rank in self._ranks]

    def _load(self, rank: _Rank) -> EngineLoad:
        most = rank.sent + self._unplaced
        running = min(rank.running, most)
        waiting = min(rank.waiting, most - running)
        queue_time_ms = 1000 * rank.queue_s / rank.queued_requests if rank.queued_requests else 0.0
        rank.queue_s, rank.queued_requests = 0.0, 0
        return EngineLoad(
            running=running,
            waiting=waiting,
            deferred=min(rank.deferred, most - running - waiting),
            used_blocks=round(rank.usage * self.blocks_per_rank) if most else 0,
            preemptions=rank.preemptions,
            prefill_tokens=rank.prefill_tokens,
            queue_time_ms=queue_time_ms,
        )
