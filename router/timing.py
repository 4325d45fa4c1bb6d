"""A histogram of durations that costs one comparison chain per observation. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

BOUNDS_S = (10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3)


class Timing:
    """Counts durations by size."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        self.total_s += seconds
        self._counts[bisect.bisect_left(BOUNDS_S, seconds)] += 1

    def cumulative(self) -> Iterator[tuple[float | str, int]]:
        """(upper bound, durations up to it), the last bound "+Inf"."""
        below = 0
        bounds: tuple[float | str, ...] = (*BOUNDS_S, "+Inf")
        for bound, count in zip(bounds, self._counts, strict=True):
            below += count
            yield bound, below
