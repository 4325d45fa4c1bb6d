"""Prometheus metrics of the indexer, read from its state at scrape time: the series of a rank are there as long as it is."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rankway.indexer.repair import Repairer
from rankway.indexer.servicer import State

SCRAPE_TIMEOUT_S = 5.0

_RANK = ("worker_id", "dp_rank")


class StateCollector(Collector):
    """Collects on the event loop, where the state is consistent; scrapes come on a thread of their own."""

    def __init__(self, state: State, repairer: Repairer, loop: asyncio.AbstractEventLoop) -> None:
        self._state = state
        self._repairer = repairer
        self._loop = loop

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        result: concurrent.futures.Future[list[Metric]] = concurrent.futures.Future()

        def on_loop() -> None:
            if result.set_running_or_notify_cancel():
                result.set_result([*self._ranks(), *self._totals()])

        self._loop.call_soon_threadsafe(on_loop)
        yield from result.result(SCRAPE_TIMEOUT_S)

    def _ranks(self) -> Iterator[Metric]:
        known = GaugeMetricFamily("rankway_indexer_rank_known", "1: the rank's index is known.", labels=_RANK)
        seq = GaugeMetricFamily("rankway_indexer_last_seq", "Seq of the last batch applied.", labels=_RANK)
        blocks = GaugeMetricFamily("rankway_indexer_blocks", "Blocks that the rank holds.", labels=_RANK)
        lag = GaugeMetricFamily(
            "rankway_indexer_lag_seconds", "Publish to apply of the last batch, clock skew included.", labels=_RANK
        )
        batch_age = GaugeMetricFamily("rankway_indexer_batch_age_seconds", "Since the last batch.", labels=_RANK)
        load_age = GaugeMetricFamily("rankway_indexer_load_age_seconds", "Since the last load.", labels=_RANK)
        duplicates = CounterMetricFamily("rankway_indexer_duplicates", "Repeated or late messages dropped.", labels=_RANK)
        dropped = CounterMetricFamily("rankway_indexer_dropped_batches", "Batches that found no room in a repair.", labels=_RANK)
        repairs = CounterMetricFamily("rankway_indexer_repairs", "Repairs by cause.", labels=(*_RANK, "cause"))
        now = self._loop.time()
        for rank in self._state.tracker.ranks.values():
            labels = (rank.key.worker_id, str(rank.key.dp_rank))
            known.add_metric(labels, rank.known)
            seq.add_metric(labels, rank.last_seq)
            blocks.add_metric(labels, rank.index.size(rank.slot))
            duplicates.add_metric(labels, rank.duplicates)
            dropped.add_metric(labels, rank.dropped_batches)
            if rank.batch_at is not None:
                lag.add_metric(labels, rank.lag_ms / 1000)
                batch_age.add_metric(labels, now - rank.batch_at)
            if rank.load_at is not None:
                load_age.add_metric(labels, now - rank.load_at)
            for cause, count in rank.repairs.items():
                repairs.add_metric((*labels, cause.value), count)
        yield from (known, seq, blocks, lag, batch_age, load_age, duplicates, dropped, repairs)

    def _totals(self) -> Iterator[Metric]:
        state = self._state
        feed = state.feed
        gauges = (
            ("ready", "1: the first resync is over.", state.ready),
            ("ranks", "Ranks of live workers.", len(state.tracker.ranks)),
            ("distinct_blocks", "Distinct blocks over all ranks.", len(state.tracker.index)),
            ("index_bytes", "Memory of the index.", state.tracker.index.memory_bytes()),
            ("repairs_running", "Ranks under repair.", self._repairer.running),
            ("followers", "Follow streams.", len(feed.followers)),
            ("follower_queue_messages", "Messages that wait for followers, all together.", sum(f.queued for f in feed.followers)),
        )
        counters = (
            ("messages", "Messages from NATS.", state.intake.messages),
            ("malformed_messages", "Messages that were skipped.", state.intake.malformed),
            ("unknown_worker_messages", "Messages of workers that no lease names.", state.tracker.unknown_worker_messages),
            (
                "slow_consumer_drops",
                "Messages that the NATS client dropped since too many waited.",
                state.bus.slow_consumer_drops,
            ),
            ("nats_disconnects", "Lost NATS connections.", state.bus.disconnects),
            ("followers_cut_off", "Followers that were too slow.", feed.cut_off),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"rankway_indexer_{name}", text, value=value)
        for name, text, value in counters:
            yield CounterMetricFamily(f"rankway_indexer_{name}", text, value=value)
