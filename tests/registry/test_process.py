"""The registry as a process: start, signals, exit codes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator

import pytest
from harness.nats import NatsServer
from harness.registry import Watcher, record
from harness.waiting import eventually, free_port

from rankway.errors import Unavailable
from rankway.registry.client import RegistryClient

Process = subprocess.Popen[bytes]
Launch = Callable[..., Process]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts `python -m rankway.registry` with options."""
    processes: list[Process] = []

    def start(*options: str) -> Process:
        process = subprocess.Popen([sys.executable, "-m", "rankway.registry", *options], stderr=subprocess.PIPE)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


async def test_it_stops_cleanly_under_a_watch(nats_server: NatsServer, launch: Launch) -> None:
    """SIGTERM ends it with 0 although somebody watches, and a killed one that starts again has all records still."""
    address = f"127.0.0.1:{free_port()}"
    options = ("--grpc-listen", address, "--nats-url", nats_server.url)
    client = RegistryClient([address])
    watcher = Watcher(client)
    try:
        first = launch(*options)
        await eventually(lambda: watcher.events, timeout_s=20)
        await client.register(record())
        first.kill()
        first.wait()
        second = launch(*options)

        async def listed() -> bool:
            return await client.list() == [record()]

        await eventually(lambda: _answers(listed), timeout_s=20)
        await eventually(lambda: watcher.known == {"w1": record()})
        second.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(second.wait, 10) == 0
    finally:
        await watcher.stop()
        await client.close()


async def test_an_address_in_use(nats_server: NatsServer, launch: Launch) -> None:
    """A port that somebody has is exit code 1 and a line that names the address."""
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    address = f"127.0.0.1:{taken.sockets[0].getsockname()[1]}"
    process = launch("--grpc-listen", address, "--nats-url", nats_server.url)
    _, stderr = await asyncio.to_thread(process.communicate, timeout=20)
    taken.close()
    assert process.returncode == 1
    assert f"can't listen on {address}" in stderr.decode()


async def test_sigterm_while_nats_is_away(launch: Launch) -> None:
    """A registry that still waits for NATS stops at once and with 0."""
    address = f"127.0.0.1:{free_port()}"
    process = launch("--grpc-listen", address, "--nats-url", f"nats://127.0.0.1:{free_port()}")
    assert process.stderr is not None
    while b"NATS can't be reached" not in (line := await asyncio.wait_for(asyncio.to_thread(process.stderr.readline), 20)):
        assert line, "it ended"
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 10) == 0


async def _answers(question: Callable[[], Awaitable[bool]]) -> bool:
    try:
        return await question()
    except Unavailable:
        return False
