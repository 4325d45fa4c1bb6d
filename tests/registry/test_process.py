"""The registry as a process: start, signals, exit codes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from harness.nats import NatsServer
from harness.registry import Watcher, record
from harness.waiting import eventually, free_port

from rankway.errors import Unavailable
from rankway.registry.client import RegistryClient

Process = asyncio.subprocess.Process
Launch = Callable[..., Awaitable[Process]]


@pytest.fixture
async def launch() -> AsyncIterator[Launch]:
    """Starts `python -m rankway.registry` with options."""
    processes: list[Process] = []

    async def start(*options: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rankway.registry", *options, stderr=asyncio.subprocess.PIPE
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_it_stops_cleanly_under_a_watch(nats_server: NatsServer, launch: Launch) -> None:
    """SIGTERM ends it with 0 although somebody watches, and a killed one that starts again has all records still."""
    address = f"127.0.0.1:{free_port()}"
    options = ("--grpc-listen", address, "--nats-url", nats_server.url)
    client = RegistryClient([address])
    watcher = Watcher(client)
    try:
        first = await launch(*options)
        await eventually(lambda: watcher.events, timeout_s=20)
        await client.register(record())
        first.kill()
        await first.wait()
        second = await launch(*options)

        async def listed() -> bool:
            return await client.list() == [record()]

        await eventually(lambda: _answers(listed), timeout_s=20)
        await eventually(lambda: watcher.known == {"w1": record()})
        second.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(second.wait(), 10) == 0
    finally:
        await watcher.stop()
        await client.close()


async def test_an_address_in_use(nats_server: NatsServer, launch: Launch) -> None:
    """A port that somebody has is exit code 1 and a line that names the address."""
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    address = f"127.0.0.1:{taken.sockets[0].getsockname()[1]}"
    process = await launch("--grpc-listen", address, "--nats-url", nats_server.url)
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    taken.close()
    assert process.returncode == 1
    assert f"can't listen on {address}" in stderr.decode()


async def test_sigterm_while_nats_is_away(launch: Launch) -> None:
    """A registry that still waits for NATS stops at once and with 0."""
    address = f"127.0.0.1:{free_port()}"
    process = await launch("--grpc-listen", address, "--nats-url", f"nats://127.0.0.1:{free_port()}")
    assert process.stderr is not None
    while b"NATS can't be reached" not in (line := await asyncio.wait_for(process.stderr.readline(), 20)):
        assert line, "it ended"
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 10) == 0


async def _answers(question: Callable[[], Awaitable[bool]]) -> bool:
    try:
        return await question()
    except Unavailable:
        return False
