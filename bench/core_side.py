"""One side of `make bench`: a process that answers measures on its standard input, one JSON line each."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Timed = Callable[[], float]
"""Runs once and returns the seconds of the part that counts."""

Measure = Callable[..., Timed]
"""Prepares its inputs and returns what is timed."""


def stopwatch(work: Callable[[], object], repeats: int = 1) -> Timed:
    """Times `repeats` runs in a row: seconds of processor time a run, all threads together.

    Processor time, since both sides are pinned to one processor that others may use too.
    """

    def run() -> float:
        start = time.process_time()
        for _ in range(repeats):
            work()
        return (time.process_time() - start) / repeats

    return run


def resident_bytes() -> int:
    """This process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(measures: Mapping[str, Measure]) -> None:
    """Answer {"measure", "params", "runs"} with {"value"}, the least of the runs. What was prepared is kept for the next."""
    current: tuple[str, Timed] | None = None
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        key = json.dumps([request["measure"], request["params"]], sort_keys=True)
        if current is None or current[0] != key:
            current = None
            current = (key, measures[request["measure"]](**request["params"]))
        value = min(current[1]() for _ in range(request["runs"]))
        sys.stdout.write(json.dumps({"value": value}) + "\n")
        sys.stdout.flush()
