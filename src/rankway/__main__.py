"""The `rankway` command: one word chooses what runs, its options follow.

rankway up                                    a whole cluster on this machine, in the foreground
rankway registry | indexer | worker | router  one service
rankway doctor                                what this machine has and lacks, in words
"""

from __future__ import annotations

import difflib
import runpy
import sys
from collections.abc import Sequence

import rankway

COMMANDS = {
    "up": "a whole cluster on this machine: NATS, registry, indexer, workers and router, in the foreground",
    "registry": "membership: which workers are there and which global ranks each owns",
    "indexer": "the truth about which rank holds which KV block",
    "worker": "one engine and the window of global ranks that it owns",
    "router": "the front door: chooses a rank for every request, gRPC and OpenAI's HTTP API",
    "doctor": "what this machine has and lacks, in words",
}
_MODULES = {"up": "rankway.up", "doctor": "rankway.doctor"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Only the chosen command's modules are imported."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help", "help"):
        sys.stdout.write(_usage() + "\n")
        return 0 if arguments else 2
    if first in ("-V", "--version", "version"):
        sys.stdout.write(f"rankway {rankway.__version__}\n")
        return 0
    if first not in COMMANDS:
        near = difflib.get_close_matches(first, COMMANDS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        sys.stderr.write(f"rankway: unknown command {first!r}: {hint}there is {', '.join(COMMANDS)}\n")
        return 2
    return _run(_MODULES.get(first, f"rankway.{first}.__main__"), [f"rankway {first}", *arguments[1:]])


def _run(module: str, argv: list[str]) -> int:
    """Run a module as the program, as `python -m` would: every service has one entry point, whichever way it is started."""
    sys.argv = argv
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        raise
    return 0


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: rankway COMMAND [options]; rankway COMMAND --help explains them", "", *lines, "", "  --version"])


if __name__ == "__main__":
    sys.exit(main())
