"""The front door on a real socket; see `harness.front_door`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from harness.front_door import House, echo, open_house


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """Requests wait for the test in `house.dispatcher.next()`."""
    async with open_house() as opened:
        yield opened


@pytest.fixture
async def echo_house() -> AsyncIterator[House]:
    """Every request is answered with `Hello`."""
    async with open_house(script=echo) as opened:
        yield opened
