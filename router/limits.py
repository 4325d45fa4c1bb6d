"""Token buckets: how many requests a second each key may send. Pure, bounded; times are arguments, in seconds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rankway.errors import Overloaded


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float


class RateLimit:
    """One bucket per key: `rate_per_s` on average, `burst` at once.

    Args:
        rate_per_s: 0 turns the limit off.
        burst: most requests at once, at least 1.
        max_keys: the key unused for longest is forgotten first (its bucket is full again by then, or keys are being made up).
    """

    def __init__(self, rate_per_s: float, burst: float, max_keys: int = 100_000) -> None:
        self._rate = rate_per_s
        self._burst = max(burst, 1.0)
        self._max_keys = max_keys
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self.refused = 0

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, now: float) -> None:
        """Count one request of `key`.

        Raises:
            Overloaded: its bucket is empty; retry_after_s says when it won't be.
        """
        if self._rate <= 0:
            return
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(self._burst, now)
            if len(self._buckets) > self._max_keys:
                self._buckets.popitem(last=False)
        else:
            bucket.level = min(self._burst, bucket.level + (now - bucket.at) * self._rate)
            bucket.at = now
        self._buckets.move_to_end(key)
        if bucket.level < 1:
            self.refused += 1
            raise Overloaded(f"more than {self._rate:g} requests a second", (1 - bucket.level) / self._rate)
        bucket.level -= 1
