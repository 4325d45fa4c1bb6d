"""Draws docs/performance.svg from the figures of bench/core_scale.py. Needs matplotlib, which only this drawing does.

python bench/core_plot.py FIGURES.json docs/performance.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt


def lines(axes: Any, points: list[dict[str, float]], x: str, names: dict[str, str], *, log_y: bool = True) -> None:
    """One line a column, against `x`."""
    for column, label in names.items():
        axes.plot([p[x] for p in points], [p[column] for p in points], marker="o", markersize=3, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log" if log_y else "linear")
    if not log_y:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def main() -> None:
    figures = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    plt.rcParams |= {"svg.hashsalt": "rankway", "svg.fonttype": "none"}  # the same figures give the same small file
    figure, ((a, b), (c, d)) = plt.subplots(2, 2, figsize=(9, 6.5))
    times = {"match_ns": "match", "store_ns": "store", "remove_ns": "remove"}
    lines(a, figures["by_blocks"], "blocks", times, log_y=False)
    a.set(title="an event's block, 64 ranks", xlabel="blocks in the index", ylabel="ns a block")
    lines(b, figures["by_blocks"], "blocks", {"bytes": "index"}, log_y=False)
    b.set(title="memory, 64 ranks, one block in ten widely held", xlabel="blocks in the index", ylabel="bytes a block")
    lines(c, figures["by_ranks"], "ranks", {"choice_us": "whole choice"}, log_y=False)
    c.set(title="a choice of 16,384 tokens", xlabel="ranks", ylabel="µs")
    lines(d, figures["by_tokens"], "tokens", {"choice_us": "whole choice", "hash_us": "hash chain", "match_us": "match"})
    d.set(title="a choice among 64 ranks", xlabel="tokens in the prompt", ylabel="µs")
    figure.tight_layout()
    figure.savefig(sys.argv[2], metadata={"Date": None})


if __name__ == "__main__":
    main()
