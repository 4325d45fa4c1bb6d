"""After a storm over real processes everybody knows exactly what the engines hold, and no stream was harmed.

PROCESS_STORMS says how many (default 6), STORM_SEED where the scripts begin (default 1). A failure names the seed that repeats
it: `STORM_SEED=<seed> PROCESS_STORMS=<n> pytest tests/system/test_process_storms.py`. STORM_LOG_LEVEL=info shows more.
"""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path

import pytest
from harness.process_storm import ProcessWorld

from rankway import logs

log = logs.get("storm")

STORMS = int(os.environ.get("PROCESS_STORMS", "6"))
STORM_SEED = int(os.environ.get("STORM_SEED", "1"))
STORMS_PER_WORLD = 10


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(STORM_SEED, STORM_SEED + -(-STORMS // STORMS_PER_WORLD)))
async def test_killed_and_stopped_processes_end_up_with_the_truth(tmp_path: Path, seed: int) -> None:
    """Within 5 s of calm both indexers, both routers and the workers' Snapshots agree block by block, nothing is booked; streams
    that ended are whole."""
    scripts = random.Random(seed)
    async with ProcessWorld(tmp_path, seed) as world:
        for number in range(min(STORMS, STORMS_PER_WORLD)):
            try:
                report = await world.storm(scripts.randrange(2**32))
            except Exception as error:
                error.add_note(f"STORM_SEED={seed} PROCESS_STORMS={number + 1}: {dict(world.done)}")
                raise
            log.info("storm", **dataclasses.asdict(report))
