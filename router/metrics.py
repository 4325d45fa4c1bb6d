"""Prometheus metrics of the router, read from its state at scrape time: the series of a rank are there as long as the rank is."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rankway.indexer.slots import RankKey
from rankway.router.attach import Links
from rankway.router.dispatcher import SAMPLE, RouterDispatcher
from rankway.router.eligibility import Eligibility
from rankway.router.fleet import Fleet
from rankway.router.grpc_generation import GenerationServicer
from rankway.router.ledger import Ledger
from rankway.router.replica import Replica
from rankway.router.sharing import Sharing
from rankway.router.targets import Targets

SCRAPE_TIMEOUT_S = 5.0

_RANK = ("worker_id", "dp_rank")


@dataclass(frozen=True, slots=True)
class Observed:
    """What the metrics are read from."""

    fleet: Fleet
    targets: Targets
    ledger: Ledger
    eligibility: Eligibility
    links: Links
    replica: Replica
    dispatcher: RouterDispatcher
    generation: GenerationServicer
    sharing: Sharing | None


class RouterCollector(Collector):
    """Collects on the event loop, where the state is consistent; scrapes may come on any thread."""

    def __init__(self, observed: Observed, loop: asyncio.AbstractEventLoop) -> None:
        self._observed = observed
        self._loop = loop
        self._loop_thread = threading.get_ident()

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        if threading.get_ident() == self._loop_thread:
            yield from self._all()
            return
        result: concurrent.futures.Future[list[Metric]] = concurrent.futures.Future()

        def on_loop() -> None:
            if result.set_running_or_notify_cancel():
                result.set_result(self._all())

        self._loop.call_soon_threadsafe(on_loop)
        yield from result.result(SCRAPE_TIMEOUT_S)

    def _all(self) -> list[Metric]:
        return [
            *self._ranks(),
            *self._links(),
            *self._requests(),
            *self._queue(),
            *self._predictions(),
            *self._sharing(),
            self._choice_seconds(),
        ]

    def _ranks(self) -> Iterator[Metric]:
        gauges = {
            name: GaugeMetricFamily(f"rankway_router_{name}", text, labels=_RANK)
            for name, text in (
                ("rank_eligible", "1: the rank may be chosen."),
                ("rank_full", "1: the rank is at one of its limits."),
                ("rank_index_known", "1: the rank's index is known; 0: it scores by load alone."),
                ("rank_requests", "Requests in flight on the rank, those of others included."),
                ("rank_prefill_tokens", "Tokens still to prefill on the rank."),
                ("rank_decode_blocks", "Distinct blocks active on the rank."),
                ("rank_tree_blocks", "Blocks of the rank in the replica of the index."),
                ("rank_load_age_seconds", "Since the rank's last published load came; no sample if none has."),
            )
        }
        observed = self._observed
        ledger, loads = observed.ledger, observed.ledger.loads
        eligible = observed.eligibility.all_eligible()
        now = self._loop.time()
        for record in observed.fleet.records.values():
            for rank, slot in sorted(observed.targets.slots(record.instance).items()):
                if slot >= len(loads):
                    continue
                labels = (record.worker_id, str(rank))
                gauges["rank_eligible"].add_metric(labels, slot in eligible)
                gauges["rank_full"].add_metric(labels, slot in ledger.full)
                gauges["rank_index_known"].add_metric(labels, loads.known[slot])
                gauges["rank_requests"].add_metric(labels, ledger.requests(slot))
                gauges["rank_prefill_tokens"].add_metric(labels, loads.prefill_tokens[slot])
                gauges["rank_decode_blocks"].add_metric(labels, loads.decode_blocks[slot])
                gauges["rank_tree_blocks"].add_metric(labels, observed.replica.index.size(slot))
                replicated = observed.replica.ranks.get(RankKey(record.worker_id, record.epoch, rank))
                if replicated is not None and replicated.load_at is not None:
                    gauges["rank_load_age_seconds"].add_metric(labels, now - replicated.load_at)
        yield from gauges.values()

    def _links(self) -> Iterator[Metric]:
        reconnects = CounterMetricFamily("rankway_router_reconnects", "Attaches made again.", labels=("worker_id",))
        outbox = GaugeMetricFamily("rankway_router_outbox", "Starts and Aborts not written yet.", labels=("worker_id",))
        again: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for link in self._observed.links:  # an old epoch that ends its requests and the new one may both be there
            again[link.instance.worker_id] += link.reconnects
            waiting[link.instance.worker_id] += link.outbox_size
        for worker_id in again:
            reconnects.add_metric((worker_id,), again[worker_id])
            outbox.add_metric((worker_id,), waiting[worker_id])
        yield reconnects
        yield outbox

    def _sharing(self) -> Iterator[Metric]:
        sharing = self._observed.sharing
        if sharing is None:
            return
        yield GaugeMetricFamily("rankway_router_other_routers", "Other routers heard of.", sharing.routers)
        messages = CounterMetricFamily(
            "rankway_router_sharing", "Messages about bookings, by what became of them.", labels=("what",)
        )
        for what, count in sharing.counts.items():
            messages.add_metric((what,), count)
        yield messages

    def _requests(self) -> Iterator[Metric]:
        observed = self._observed
        counts = observed.dispatcher.counts
        yield GaugeMetricFamily("rankway_router_workers", "Workers that are members.", len(observed.fleet.records))
        yield GaugeMetricFamily(
            "rankway_router_links", "Workers that answer on their Attach.", sum(link.connected for link in observed.links)
        )
        yield GaugeMetricFamily(
            "rankway_router_index_age_seconds",
            "Since the index was last followed: 0 while an indexer is, +Inf if none ever was.",
            observed.replica.age_s(self._loop.time()),
        )
        yield GaugeMetricFamily("rankway_router_in_flight", "Requests under way.", len(observed.dispatcher.flights))
        yield GaugeMetricFamily("rankway_router_tasks", "asyncio tasks of the router.", len(asyncio.all_tasks(self._loop)))
        yield GaugeMetricFamily("rankway_router_grpc_streams", "Generate streams.", observed.generation.active)
        yield GaugeMetricFamily(
            "rankway_router_reservations", "Living reservations made here.", observed.dispatcher.reservations.own
        )
        for name, text, value in (
            ("requests", "Requests taken.", counts.requests),
            ("finished", "Requests that ended well.", counts.finished),
            ("cancelled", "Requests whose client left.", counts.cancelled),
            ("retries", "Further attempts before the first token.", counts.retries),
            ("migrations", "Further attempts in mid-stream.", counts.migrations),
            ("reservations_made", "Reservations made by Route.", counts.reservations),
            ("prompt_tokens", "Prompt tokens of finished requests.", counts.prompt_tokens),
            ("completion_tokens", "Output tokens of finished requests.", counts.completion_tokens),
        ):
            yield CounterMetricFamily(f"rankway_router_{name}", text, value)
        failed = CounterMetricFamily("rankway_router_failed", "Requests that failed, by status code.", labels=("code",))
        for code, count in counts.failed.items():
            failed.add_metric((code,), count)
        yield failed

    def _queue(self) -> Iterator[Metric]:
        queue = self._observed.dispatcher.queue
        yield GaugeMetricFamily("rankway_router_queue_requests", "Requests that wait for a target with room.", len(queue))
        yield GaugeMetricFamily("rankway_router_queue_tokens", "Prompt tokens of those.", queue.tokens)
        yield GaugeMetricFamily(
            "rankway_router_queue_oldest_seconds", "How long the oldest of those waits.", queue.oldest_age_s(self._loop.time())
        )
        outcomes = CounterMetricFamily("rankway_router_queue", "What became of requests that had to wait.", labels=("outcome",))
        for outcome in ("waited", "let_in", "rejected", "expired"):
            outcomes.add_metric((outcome,), getattr(queue.counts, outcome))
        yield outcomes

    def _predictions(self) -> Iterator[Metric]:
        counts = self._observed.dispatcher.counts
        for name, text, value in (
            ("predicted_cached_tokens", "Prompt tokens that the choice expected in the target's cache.", counts.predicted_tokens),
            ("actual_cached_tokens", "Prompt tokens that engines took from their cache.", counts.cached_tokens),
            ("predictions", "Requests whose prediction was compared.", counts.compared),
            ("predictions_exact", "… and was right.", counts.exact),
        ):
            yield CounterMetricFamily(f"rankway_router_{name}", text, value)

    def _choice_seconds(self) -> Metric:
        timing = self._observed.dispatcher.choice_seconds
        return HistogramMetricFamily(
            "rankway_router_choice_seconds",
            f"Time of a choice, of one in {SAMPLE}.",
            buckets=[(str(bound), count) for bound, count in timing.cumulative()],
            sum_value=timing.total_s,
        )
