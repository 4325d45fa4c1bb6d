"""Free ports, and waiting for what a test expects without blind sleeps."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

_given: set[int] = set()
_second = os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0"


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on and nobody else will take: it stays free while a test's server
    is down. Never the same twice; below the kernel's range for outgoing connections; even or odd, by the test run's process.
    """
    while True:
        port = 2 * random.SystemRandom().randrange(5_000, 16_000) + _second
        if port not in _given and can_listen(port):
            _given.add(port)
            return port


def can_listen(port: int) -> bool:
    """Whether a server could have a loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: connections that have ended don't count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def wait_for_port(port: int, timeout_s: float) -> None:
    """Block until something accepts connections on the port.

    Raises:
        TimeoutError: nothing did within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens on port {port} after {timeout_s} s")
        time.sleep(0.005)


async def eventually(condition: Callable[[], Any] | Callable[[], Awaitable[Any]], timeout_s: float = 10.0) -> Any:
    """Poll a condition (plain or async) until it is true and return its value.

    AssertionError of the condition counts as "not yet", and is what fails the test in the end: so a condition may be a
    block of asserts that returns True.

    Raises:
        AssertionError: not true within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        failure: AssertionError | None = None
        value: Any = None
        try:
            answer = condition()
            value = await answer if inspect.isawaitable(answer) else answer
        except AssertionError as error:
            failure = error
        if value:
            return value
        if time.monotonic() > deadline:
            raise failure or AssertionError(
                f"not within {timeout_s} s: {inspect.getsource(condition).strip()}; last value {value!r}"
            )
        await asyncio.sleep(0.01)
