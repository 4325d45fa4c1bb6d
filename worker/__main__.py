"""One window of a DP group's ranks: an engine (vLLM or the simulator) served over gRPC, its cache and loads announced over NATS.

Everything after -- goes to the engine as it is, e.g. `rankway worker --engine vllm --model DIR -- --data-parallel-size 4`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from rankway import service
from rankway.worker.service import run
from rankway.worker.settings import WorkerSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker in this process; returns the exit code."""
    own, engine_argv = split_argv(sys.argv[1:] if argv is None else argv)

    async def run_with_engine(settings: WorkerSettings, *, ready: service.Ready, stop: asyncio.Event) -> None:
        await run(settings, ready=ready, stop=stop, engine_argv=engine_argv)

    return service.main("worker", WorkerSettings, run_with_engine, own)


def split_argv(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the worker's options, the engine's: what stands after the first --)."""
    if "--" not in argv:
        return list(argv), []
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


if __name__ == "__main__":
    sys.exit(main())
