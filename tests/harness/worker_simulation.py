"""Drives a `Simulator` in virtual time."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from rankway.sampling import Sampling
from rankway.worker.engine import EngineEvent, EngineOutput
from rankway.worker.sim_tokens import NO_EOS, WORDS, Vocabulary
from rankway.worker.simulator import SimConfig, SimRequest, Simulator

VOCABULARY = Vocabulary([f"{word} ".encode() for word in WORDS], 512)


def simulator(eos: float = 0.0, **config: Any) -> Simulator:
    """A small, fast rank."""
    values = {"block_size": 4, "total_blocks": 32, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 100}
    vocabulary = VOCABULARY
    if eos:
        vocabulary = Vocabulary([f"{word} ".encode() for word in WORDS], 512, 257 if eos else NO_EOS, eos)
    return Simulator(SimConfig(**(values | config)), vocabulary)


def sim_request(name: str, tokens: Iterable[int], max_tokens: int = 4, **fields: Any) -> SimRequest:
    ids = array("I", tokens)
    sampling = Sampling(max_tokens=max_tokens, **fields.pop("sampling", {}))
    return SimRequest(name, ids, fields.pop("prompt_len", len(ids)), sampling, **fields)


class Drive:
    """A simulator, the time, and all that came out of it."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.now = 0.0
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.events: list[EngineEvent] = []

    def step(self) -> bool:
        """One step at its time; False: there is nothing to do."""
        due = self.simulator.due
        if due is None and self.simulator.idle:
            return False
        self.now = self.now if due is None else due
        result = self.simulator.step(self.now)
        self.events += result.events
        for request_id, output in result.outputs:
            self.outputs.setdefault(request_id, []).append(output)
        return True

    def finish(self, most_steps: int = 100_000) -> Drive:
        """Step until nothing is left to do."""
        for _ in range(most_steps):
            if not self.step():
                return self
        raise AssertionError(f"still busy after {most_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.tokens]

    def cached_tokens(self, request_id: str) -> int | None:
        return self.outputs[request_id][0].cached_tokens


def serve(simulator: Simulator, *requests: SimRequest) -> Drive:
    """Submit all at time 0 and run to the end."""
    drive = Drive(simulator)
    for request in requests:
        simulator.submit(request, 0.0)
    return drive.finish()


def texts(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()
