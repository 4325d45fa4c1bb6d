"""A long random walk over both cores at sizes where segments split, merge and are swept. Also run under the sanitizers.

python tests/core/fuzz.py --rounds 20 --seed 1 [--core build/_core.so]
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

from rankway import blocks, choice, index


def load_core(path: Path | None) -> Any:
    """The compiled core from a file, or the installed one."""
    if path is not None:
        spec = importlib.util.spec_from_file_location("rankway._core", path)
        if spec is None or spec.loader is None:
            raise SystemExit(f"{path}: not an extension module")
        core = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(core)
        sys.modules["rankway._core"] = core
        return core
    import rankway._core as core

    return core


class Walk:
    """One round: a pool of hashes, a number of slots, and both cores."""

    def __init__(self, core: Any, rng: random.Random) -> None:
        self.core, self.rng = core, rng
        self.indexes = (index.PureIndex(), core.Index())
        self.actives = (index.PureActiveBlocks(), core.ActiveBlocks())
        size = rng.choice([10, 300, 5_000, 30_000])
        low = rng.choice([0, 0, 32])  # sometimes hashes whose low bits are all equal
        self.pool = [0, 1, 2**64 - 1, *((rng.getrandbits(64) >> low) << low for _ in range(size))]
        self.slots = [rng.randrange(2**20) for _ in range(rng.choice([2, 5, 90]))] + list(range(rng.choice([1, 8, 200])))

    def step(self) -> None:
        rng = self.rng
        slot = rng.choice(self.slots)
        start = rng.randrange(len(self.pool))
        hashes = self.pool[start : start + rng.choice([1, 3, 64, 64, 600, 4_000])]
        match rng.choices(
            ["store", "remove", "match", "clear", "query", "acquire", "release", "choose"], [6, 4, 3, 0.4, 2, 3, 2, 1]
        )[0]:
            case "store" | "remove" as method:
                self.same(self.indexes, method, slot, blocks.pack_hashes(hashes) if rng.random() < 0.5 else hashes)
            case "match":
                self.same(self.indexes, "match", hashes)
            case "clear":
                self.same(self.indexes if rng.random() < 0.6 else self.actives, "clear", slot)
            case "query":
                self.query(slot, hashes[0])
            case "acquire" | "release" as method:
                self.same(self.actives, method, slot, hashes)
                self.same(self.actives, "overlap", slot, hashes)
            case "choose":
                self.choose(hashes)

    def same(self, pair: tuple[Any, Any], method: str, *args: Any) -> None:
        expected, got = (getattr(twin, method)(*args) for twin in pair)
        if expected != got:
            raise AssertionError(f"{method}: the pure core says {expected!r}, the compiled one {got!r}")

    def query(self, slot: int, block_hash: int) -> None:
        for method in ("size", "digest"):
            self.same(self.indexes, method, slot)
        self.same(self.indexes, "contains", slot, block_hash)
        self.same(self.actives, "active", slot)
        held = [[sorted(blocks.unpack_hashes(each)) for each in twin.blocks_of([slot, slot + 1])] for twin in self.indexes]
        if held[0] != held[1] or (self.rng.random() < 0.2 and len(self.indexes[0]) != len(self.indexes[1])):
            raise AssertionError("the sets of blocks differ")

    def choose(self, hashes: list[int]) -> None:
        rng, loads = self.rng, choice.LoadTable()
        loads.grow(rng.choice([1, 8, 250]))
        for slot in range(len(loads)):
            loads.eligible[slot], loads.known[slot] = rng.random() < 0.8, rng.random() < 0.9
            loads.prefill_tokens[slot], loads.decode_blocks[slot] = rng.choice([0, 0, 5_000]), rng.choice([0, 0, 77])
            loads.recent[slot] = rng.choice([0.0, 0.0, 0.37])
        weights = choice.Weights(rng.choice([1.0, 0.3, 2.0]), rng.choice([0.0, 0.0, 0.1, 1.5]))
        prompt, seed = 16 * len(hashes) + rng.randrange(16), rng.getrandbits(64)
        expected = choice.choose(self.indexes[0], self.actives[0], hashes, prompt, 16, loads, weights, seed)
        got = self.core.choose(self.indexes[1], self.actives[1], hashes, prompt, 16, loads, weights, seed)
        if expected != got:
            raise AssertionError(f"choose: the pure core says {expected!r}, the compiled one {got!r}")
        tokens = [rng.randrange(2**32) for _ in range(rng.randrange(400))]
        chain, fast = blocks.hash_chain(tokens, 7, seed), self.core.hash_chain(tokens, 7, seed)
        if chain != fast:
            raise AssertionError("the chains differ")

    def finish(self) -> None:
        """Empty everything: nothing may be left."""
        for slot in self.slots:
            self.same(self.indexes, "clear", slot)
            self.same(self.actives, "clear", slot)
        for twin in self.indexes:
            if len(twin):
                raise AssertionError(f"{len(twin)} blocks are left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=Path, help="the compiled core's file (default: the installed one)")
    args = parser.parse_args()
    core = load_core(args.core)
    for round_number in range(args.rounds):
        walk = Walk(core, random.Random(f"{args.seed}/{round_number}"))
        for _ in range(args.steps):
            walk.step()
        walk.finish()
    sys.stdout.write(f"{args.rounds} rounds of {args.steps} steps agree, seed {args.seed}\n")


if __name__ == "__main__":
    main()
