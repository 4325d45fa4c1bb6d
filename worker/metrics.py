"""Prometheus metrics of a worker, read at scrape time from the counts that the parts keep: the request path calls no metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rankway.worker.feed import RankFeed
from rankway.worker.publisher import Publisher
from rankway.worker.requests import Requests

_PREFIX = "rankway_worker"

_GAUGES: Sequence[tuple[str, str, Callable[[RankFeed], float]]] = (
    ("running_requests", "Requests running in the engine", lambda feed: feed.load.running),
    ("waiting_requests", "Requests waiting for a place in the engine's batch", lambda feed: feed.load.waiting),
    ("used_kv_blocks", "KV blocks in use by requests", lambda feed: feed.load.used_blocks),
    ("queued_prefill_tokens", "Prompt tokens not computed yet", lambda feed: feed.load.prefill_tokens),
    ("cached_blocks", "Distinct blocks in the prefix cache", lambda feed: len(feed.mirror)),
    ("kv_seq", "Seq of the last KvEventBatch", lambda feed: feed.seq),
)

_COUNTERS: Sequence[tuple[str, str, Callable[[RankFeed], float]]] = (
    ("preemptions", "Requests that the engine preempted", lambda feed: feed.load.preemptions),
    ("kv_batches", "KvEventBatches made", lambda feed: feed.counts.batches),
    ("kv_batches_dropped", "KvEventBatches that NATS could not take", lambda feed: feed.counts.dropped_batches),
    ("kv_stored_blocks", "Blocks announced as stored", lambda feed: feed.counts.stored_blocks),
    ("kv_removed_blocks", "Blocks announced as removed", lambda feed: feed.counts.removed_blocks),
    ("loads", "RankLoads sent", lambda feed: feed.counts.loads),
    ("loads_dropped", "RankLoads that NATS could not take", lambda feed: feed.counts.dropped_loads),
    ("kv_events_lost", "Times that the engine's events were lost for good", lambda feed: feed.counts.lost_events),
    ("mirror_orphans", "Blocks stored under an unknown parent", lambda feed: feed.mirror.counts.orphans),
    ("mirror_unknown_removals", "Removals of unknown blocks", lambda feed: feed.mirror.counts.unknown_removals),
    ("mirror_size_mismatches", "Blocks of another block size", lambda feed: feed.mirror.counts.block_size_mismatches),
    ("mirror_malformed", "Blocks of malformed events", lambda feed: feed.mirror.counts.malformed),
)

_REQUEST_COUNTERS = (
    ("requests", "Requests started"),
    ("prompt_tokens", "Prompt tokens of started requests"),
    ("cached_tokens", "Prompt tokens taken from the prefix cache"),
    ("output_tokens", "Tokens generated"),
    ("aborted", "Requests that nobody waited for any more"),
    ("failed", "Requests that ended with an error"),
    ("refused", "Requests beyond max_requests"),
)

UNPINNED = "unpinned"
"""dp_rank label of requests that were given none: the engine balanced them."""


class WorkerCollector:
    """All series of one worker; they vanish with the registry that it is registered in."""

    def __init__(self, worker_id: str, publisher: Publisher, requests: Requests) -> None:
        self._worker_id = worker_id
        self._publisher = publisher
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        for name, documentation, read in _GAUGES:
            gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", documentation, labels=("worker_id", "dp_rank"))
            yield self._per_rank(gauge, read)
        for name, documentation, read in _COUNTERS:
            counter = CounterMetricFamily(f"{_PREFIX}_{name}", documentation, labels=("worker_id", "dp_rank"))
            yield self._per_rank(counter, read)
        for name, documentation in _REQUEST_COUNTERS:
            counter = CounterMetricFamily(f"{_PREFIX}_{name}", documentation, labels=("worker_id", "dp_rank"))
            for dp_rank, counts in self._requests.counts.items():
                label = UNPINNED if dp_rank is None else str(dp_rank)
                counter.add_metric((self._worker_id, label), getattr(counts, name))
            yield counter

    def _per_rank(self, family: Any, read: Callable[[RankFeed], float]) -> Metric:
        for feed in self._publisher.feeds:
            family.add_metric((self._worker_id, str(feed.dp_rank)), read(feed))
        metric: Metric = family
        return metric
