"""What the worker itself costs: CPU time of its hot paths in one process, without engine, network or other processes.

    python bench/worker.py [--json FILE]

Least of several rounds. A token: from the engine's output to the serialized message of `Attach`, 64 streams a step. A start: from
the parsed message to the engine's request, 1,024 prompt tokens. A block: from the engine's event to the mirror and the
serialized batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankway.ranks import DpRange, GlobalRank, Instance
from rankway.sampling import Sampling
from rankway.tokenizer import Tokenizer
from rankway.worker.attach import Outbox
from rankway.worker.engine import BlockStored, EngineInfo, EngineOutput, EngineRequest
from rankway.worker.feed import RankFeed
from rankway.worker.intake import Limits
from rankway.worker.requests import Order, Requests
from rankway.worker.sim_tokens import WORDS, Vocabulary
from rankway.worker.simulator import SimConfig, SimRequest, Simulator

STREAMS = 64
ROUNDS = 5
INFO = EngineInfo("bench", "0", "m", DpRange(0, 4), 4, 16, 65_536, 1024, 8192, 1_000_000, 512)


class SilentEngine:
    """Takes requests and leaves their output to the benchmark."""

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []

    def submit(self, request: EngineRequest) -> None:
        self.requests.append(request)

    def abort(self, request_id: str) -> None:
        pass


def least(work: Callable[[], Any], units: int) -> float:
    """CPU µs a unit, of the fastest round."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times) / units * 1e6


def started(stop: tuple[str, ...] = ()) -> tuple[SilentEngine, Outbox, Callable[[], None]]:
    """An engine with nothing in it, an outbox, and what starts 64 requests of 1,024 tokens."""
    engine: Any = SilentEngine()
    tokenizer = Tokenizer.byte_level()
    requests = Requests(engine, Limits("w", INFO, ("m",)), tokenizer, 10**9)
    outbox = Outbox(tokenizer, lambda: None)
    prompt = array("I", [7]) * 1024

    def start() -> None:
        for stream in range(STREAMS):
            sampling = Sampling(max_tokens=100_000, stop=stop)
            requests.start(Order(stream, f"r{stream}", prompt, sampling, dp_rank=stream % 4), outbox)

    return engine, outbox, start


def token_cost(stop: tuple[str, ...], steps: int = 500) -> float:
    engine, outbox, start = started(stop)
    start()
    emits = [request.emit for request in engine.requests]

    def work() -> None:
        for step in range(steps):
            for emit in emits:
                emit(EngineOutput((97 + step % 26,)))
            outbox.take()

    return least(work, steps * STREAMS)


def block_cost(blocks: int, events: int) -> float:
    """Of events of so many blocks, each a prompt of its own."""
    rng = random.Random(1)
    stored = [
        BlockStored([rng.getrandbits(64) for _ in range(blocks)], None, array("I", rng.choices(range(50_000), k=16 * blocks)), 16)
        for _ in range(events)
    ]

    def work() -> None:
        feed = RankFeed(Instance("w", 1), GlobalRank(0), "m", 16)
        for event in stored:
            feed.batches(feed.mirror.apply([event]), 0)

    return least(work, blocks * events)


def simulator_cost(tokens: int = 200) -> float:
    vocabulary = Vocabulary([f"{word} ".encode() for word in WORDS], 512)

    def work() -> None:
        simulator = Simulator(SimConfig(), vocabulary)
        for stream in range(STREAMS):
            prompt = array("I", [stream]) * 1024
            simulator.submit(SimRequest(str(stream), prompt, 1024, Sampling(max_tokens=tokens)), 0.0)
        now: float | None = 0.0
        while now is not None:
            now = simulator.step(now).next_due

    return least(work, STREAMS * tokens)


async def measure() -> list[dict[str, Any]]:
    _, _, start = started()
    figures = [
        ("a token, engine output to serialized Attach message", token_cost(())),
        ("the same with two stop strings", token_cost(("###", "<|user|>"))),
        ("a start of 1,024 prompt tokens", least(start, STREAMS)),
        ("a block of an event of 1, to serialized batch", block_cost(1, 4096)),
        ("a block of an event of 64, to serialized batch", block_cost(64, 256)),
        ("a block of an event of 8,192, to serialized batch", block_cost(8192, 4)),
        ("a token of the simulator, 64 requests a rank", simulator_cost()),
    ]
    return [{"name": name, "value": round(value, 3), "unit": "CPU µs"} for name, value in figures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = asyncio.run(measure())
    for figure in figures:
        print(f"{figure['name']:<54} {figure['value']:8.2f} {figure['unit']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
