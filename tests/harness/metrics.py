"""What a service's /metrics say."""

from __future__ import annotations

import re

_BACK_TO_ZERO = re.compile(
    r"rankway_router_(rank_requests|rank_prefill_tokens|rank_decode_blocks|in_flight|grpc_streams|reservations|queue_requests|"
    r"queue_tokens|http_active_requests)\b(?!_)|rankway_worker_(running_requests|waiting_requests|queued_prefill_tokens|used_kv_blocks)\b"
)


def leftovers(metrics: str) -> list[str]:
    """Series of a router or worker that are 0 when nothing is under way, and aren't."""
    return [line for line in metrics.splitlines() if _BACK_TO_ZERO.match(line) and float(line.rpartition(" ")[2]) != 0]
