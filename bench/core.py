"""`make bench`: Rankway's core against Dynamo's own core (`ai-dynamo-runtime`), in one run, pinned to one processor.

Each side is a process of its own; they take turns, measure by measure, and the least of several runs counts. The table shows
the ratio that matters (times: theirs / ours; memory: ours / theirs) beside what it has to reach. JSON=<file> writes it as a list
of {"name", "ours", "theirs", "unit", "ratio", "reach", "holds"}. `reach` is what a ratio has to be at least, or, for memory and
the import, at most.

    python bench/core.py [--peer-python .venv-peers/dynamo/bin/python] [--traces DIR] [--quick] [--only match]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEER_REQUIREMENT = "ai-dynamo-runtime==1.6.1"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table to be measured."""

    name: str
    measure: str
    reach: float
    params: dict[str, Any]
    form: str | None = None
    """How our side is given its numbers; Dynamo's API takes lists and JSON only."""
    unit: str = "µs"
    scale: float = 1e6
    runs: int = 3
    rounds: int = 4
    at_most: bool = False
    """The ratio is ours / theirs and `reach` its upper bound."""
    fresh: bool = False
    """Measured in new processes: resident memory tells only there."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    name: str
    ours: float
    theirs: float | None
    unit: str
    ratio: float
    reach: float
    holds: bool


def rows(traces: Path, requests: int) -> list[Row]:
    """The whole table."""
    table = []
    for trace in ("conversation", "synthetic"):
        path = traces / f"{trace}_trace.jsonl"
        if not path.exists():
            print(f"skipped: {path} is not there (Mooncake's FAST'25 traces; --traces DIR)", file=sys.stderr)
            continue
        for form, reach in (("buffers", 4), ("lists", 2)):
            params = {"path": str(path), "requests": requests}
            table.append(Row(f"{trace} trace, an op, {form}", "trace", reach, params, form, runs=1, rounds=2))
    for blocks, form, reach in ((64, "buffers", 20), (64, "lists", 4), (512, "buffers", 12), (4096, "buffers", 8)):
        table.append(Row(f"match, 64 ranks, {blocks} blocks, {form}", "match", reach, {"ranks": 64, "blocks": blocks}, form))
    for form, reach in (("buffers", 5), ("lists", 3)):
        params = {"ranks": 64, "events": 2_000}
        table.append(Row(f"store and remove, a block, {form}", "store_remove", reach, params, form, "ns", 1e9))
    for tokens in (1_024, 16_384, 131_072):
        for form, reach in (("buffers", 10), ("lists", 2.5)):
            table.append(Row(f"hash chain, {tokens:,} tokens, {form}", "hash_chain", reach, {"tokens": tokens}, form))
    for tokens in (1_024, 16_384, 131_072):
        for form, reach in (("buffers", 40), ("lists", 12)):
            params = {"ranks": 64, "tokens": tokens}
            table.append(Row(f"whole choice, 64 ranks, {tokens:,} tokens, {form}", "choice", reach, params, form))
    for holders, blocks, reach in ((1, 1_000_000, 0.5), (8, 400_000, 0.2)):
        params = {"ranks": 64, "holders": holders, "blocks": blocks}
        name = f"memory a block, {holders} of 64 ranks"
        table.append(Row(name, "memory", reach, params, None, "bytes", 1, 1, 1, at_most=True, fresh=True))
    table.append(Row("import of the core", "import", 5, {}, None, "ms", 1e3, 1, 7, at_most=True))
    return table


@dataclass
class Side:
    """A process that measures one side."""

    python: str
    script: str
    process: subprocess.Popen[str] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def measure(self, row: Row, *, with_form: bool) -> float:
        """One round of a row: the least of its runs."""
        if row.fresh or self.process is None:
            self.close()
            self.process = subprocess.Popen(
                [self.python, str(HERE / self.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **self.environment},
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        params = {**row.params, "form": row.form} if with_form and row.form else row.params
        self.process.stdin.write(json.dumps({"measure": row.measure, "params": params, "runs": row.runs}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"value"'):
                return float(json.loads(line)["value"])
        raise SystemExit(f"{self.script} ended in {row.name!r}")

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def measured(group: list[Row], ours: Side, theirs: Side) -> list[Result]:
    """Rows that differ in form only: our forms and theirs in turns."""
    mine, other = [float("inf")] * len(group), float("inf")
    for _ in range(group[0].rounds):
        for i, row in enumerate(group):
            mine[i] = min(mine[i], ours.measure(row, with_form=True))
        other = min(other, theirs.measure(group[0], with_form=False))
    return [result(row, value * row.scale, other * row.scale) for row, value in zip(group, mine, strict=True)]


def result(row: Row, ours: float, theirs: float) -> Result:
    if row.measure == "import":  # bounded on its own, in ms
        return Result(row.name, ours, theirs, row.unit, ours / theirs, row.reach, ours <= row.reach)
    ratio = ours / theirs if row.at_most else theirs / ours
    holds = ratio <= row.reach if row.at_most else ratio >= row.reach
    return Result(row.name, ours, theirs, row.unit, ratio, row.reach, holds)


def line(result: Result, *, at_most: bool) -> str:
    reach = f"{'<=' if at_most else '>='} {result.reach:g}{' ms' if result.unit == 'ms' else ''}"
    figures = f"{result.ours:>10.2f} {result.theirs:>10.2f} {result.unit:<6} {result.ratio:>7.2f}"
    return f"{result.name:<46} {figures}  {reach:<9}{'' if result.holds else '  MISSED'}"


def peer_python(path: Path) -> str:
    """The interpreter of Dynamo's virtual environment, which is made if it isn't there."""
    if not path.exists():
        home = path.parent.parent
        print(f"making {home} with {PEER_REQUIREMENT}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(path), "-m", "pip", "install", "--quiet", PEER_REQUIREMENT, "uvloop"], check=True)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, default=HERE.parent / ".venv-peers" / "dynamo" / "bin" / "python")
    parser.add_argument("--traces", type=Path, default=HERE.parent.parent / "shared" / "traces")
    parser.add_argument("--requests", type=int, default=4_000, help="requests of each trace")
    parser.add_argument("--cpu", type=int, default=0, help="the processor to pin everything to")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    args = parser.parse_args()
    python = peer_python(args.peer_python)
    os.sched_setaffinity(0, {args.cpu})
    ours, theirs = Side(sys.executable, "core_ours.py"), Side(python, "core_dynamo.py", environment={"DYN_LOG": "off"})
    results = []
    print(f"{'':<46} {'ours':>10} {'theirs':>10} {'':<6} {'ratio':>7}  reach")
    wanted = [row for row in rows(args.traces, args.requests) if args.only in row.name]
    for _, group in itertools.groupby(wanted, key=lambda row: (row.measure, row.params)):
        same = list(group)
        for row, measure in zip(same, measured(same, ours, theirs), strict=True):
            results.append(measure)
            print(line(measure, at_most=row.at_most), flush=True)
    ours.close()
    theirs.close()
    if target := os.environ.get("JSON"):
        Path(target).write_text(json.dumps([asdict(result) for result in results], indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
