"""After any storm everybody knows exactly what the engines hold.

STORMS says how many (default 50), STORM_SEED where the scripts begin (default 1). A failure names the seed that repeats it:
`STORM_SEED=<seed> STORMS=1 pytest tests/system/test_storms.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from harness.storm import World

STORMS = int(os.environ.get("STORMS", "50"))
STORM_SEED = int(os.environ.get("STORM_SEED", "1"))
STORMS_PER_WORLD = 5
WORLDS_AT_ONCE = 2
"""Storms mostly wait: worlds run side by side."""

WORLDS = range(STORM_SEED, STORM_SEED + -(-STORMS // STORMS_PER_WORLD))


# Services that are killed where they stand leave sockets to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seeds", [WORLDS[i : i + WORLDS_AT_ONCE] for i in range(0, len(WORLDS), WORLDS_AT_ONCE)], ids=str)
async def test_after_a_storm_all_indexers_and_routers_hold_what_the_engines_hold(tmp_path: Path, seeds: range) -> None:
    """Within 5 s of calm both indexers, both routers' replicas, workers' Snapshots and engine caches agree block by block."""
    async with asyncio.TaskGroup() as tasks:
        for seed in seeds:
            tasks.create_task(weather(tmp_path / str(seed), seed))


async def weather(directory: Path, seed: int) -> None:
    """The storms of one world."""
    scripts = random.Random(seed)
    async with World(directory, seed) as world:
        for number in range(min(STORMS, STORMS_PER_WORLD)):
            try:
                await world.storm(scripts.randrange(2**32))
            except Exception as error:
                error.add_note(f"STORM_SEED={seed} STORMS={number + 1}: {dict(world.done)}")
                raise
