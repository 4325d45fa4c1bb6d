"""The front door's metrics, read from its counters when somebody scrapes: nothing is paid per request or per token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rankway.router.http_exchange import ServerState
from rankway.router.tokenizers import EncodingStats


class Stats(Protocol):
    """`openai_api.FrontDoorStats`."""

    active: int

    @property
    def answers(self) -> Mapping[str, int]: ...


class FrontDoorCollector(Collector):
    """Series rankway_router_http_* and rankway_router_tokenize_*. Read from the scraping thread."""

    def __init__(self, server: ServerState, stats: Stats, encoding: EncodingStats) -> None:
        self._server = server
        self._stats = stats
        self._encoding = encoding

    def collect(self) -> Iterator[Metric]:
        server, encoding = self._server, self._encoding
        answers = CounterMetricFamily("rankway_router_http_answers", "Answers by HTTP status or early end", labels=["status"])
        for status, count in dict(self._stats.answers).items():
            answers.add_metric([status], count)
        yield answers
        for name, help_text, value in (
            ("http_active_requests", "Generating requests under way", self._stats.active),
            ("http_connections", "Open connections", len(server.connections)),
            ("tokenize_waiting", "Texts waiting for a tokenising thread or in one", encoding.waiting),
        ):
            yield GaugeMetricFamily(f"rankway_router_{name}", help_text, value=value)
        for name, help_text, value in (
            ("http_accepted_connections", "Connections accepted", server.accepted),
            ("http_refused_connections", "Connections beyond the limit", server.refused_connections),
            ("http_malformed_requests", "Requests that are no HTTP", server.malformed),
            ("http_slow_readers", "Streams cancelled because the client didn't read", server.slow_readers),
            ("http_clients_gone", "Requests whose client left before the end", server.client_gone),
            ("tokenize_done", "Texts tokenised in a thread", encoding.encoded),
            ("tokenize_refused", "Texts refused because too many waited", encoding.refused),
        ):
            yield CounterMetricFamily(f"rankway_router_{name}", help_text, value=value)
