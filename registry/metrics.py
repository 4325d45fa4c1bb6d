"""The registry's Prometheus metrics. What describes workers is read from the view at each scrape: nothing outlives a worker."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rankway.registry.admission import Admission
from rankway.registry.mirror import Mirror


class Metrics:
    """Counters that the servicer increments, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "rankway_registry_calls", "Calls by method and status code", ["method", "code"], registry=self.registry
        )
        self.watch_resyncs = Counter(
            "rankway_registry_watch_resyncs",
            "Snapshots sent to watchers that fell behind the log of changes",
            registry=self.registry,
        )
        self.watchers = 0

    def observe(self, mirror: Mirror, admission: Admission) -> None:
        """Also export what these two know."""
        self.registry.register(_State(self, mirror, admission))


class _State(Collector):
    def __init__(self, metrics: Metrics, mirror: Mirror, admission: Admission) -> None:
        self._metrics = metrics
        self._mirror = mirror
        self._admission = admission

    def collect(self) -> Iterable[Metric]:
        mirror = self._mirror
        records = mirror.view.records()
        workers = GaugeMetricFamily("rankway_registry_workers", "Live workers", labels=["dp_group", "state"])
        for (dp_group, state), number in Tally((r.dp_group, r.state.name) for r in records).items():
            workers.add_metric([dp_group, state], number)
        ranks = GaugeMetricFamily("rankway_registry_ranks", "Global ranks owned by live workers", labels=["dp_group"])
        for dp_group, number in sum((Tally({r.dp_group: r.window.size}) for r in records), Tally()).items():
            ranks.add_metric([dp_group], number)
        yield workers
        yield ranks
        yield GaugeMetricFamily(
            "rankway_registry_following", "1: the view of the bucket is up to date", value=float(mirror.following)
        )
        yield GaugeMetricFamily("rankway_registry_watchers", "Watch streams now", value=self._metrics.watchers)
        yield CounterMetricFamily("rankway_registry_reloads", "Times the bucket was loaded anew", value=mirror.reloads)
        yield CounterMetricFamily(
            "rankway_registry_contended", "Attempts lost to another writer", value=self._admission.stats.contended
        )
