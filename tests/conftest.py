"""Fixtures of all tests.

Classes that tests construct themselves are in `tests/harness/` (on the path by pytest's `pythonpath` setting): `from harness.nats
import NatsServer`, `from harness.waiting import eventually, free_port`. Fixtures of one service stand in its own conftest.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import uvloop
from harness.nats import NatsServer

from rankway import logs


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, object]:
    """Tests run on the event loop that the services run on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def _logs() -> None:
    logs.configure("debug", service="test", json=True)


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A nats-server of this test alone: it may be stopped, killed and restarted."""
    server = NatsServer(tmp_path / "jetstream")
    server.start()
    yield server
    server.kill(lose_store=True)


@pytest.fixture(scope="session")
def shared_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A nats-server for the whole session: don't disturb it, and use bucket and group names of your own."""
    server = NatsServer(tmp_path_factory.mktemp("shared-nats") / "jetstream")
    server.start()
    yield server
    server.kill(lose_store=True)
