"""Ends vLLM's processes when the worker that started them is gone and could not do it itself (kill -9, out of memory).

vLLM's engine processes don't notice the death of their parent: they would keep their memory, GPUs and ports. The guard is a small
process beside the worker. It is told over a pipe which processes there are, and acts when the pipe closes.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

import psutil


class Guard:
    """The worker's end. `tell` as processes come; `close` once they have been ended. Blocks for milliseconds.

    Processes that exist already are none of vLLM's: they are left alone.
    """

    def __init__(self) -> None:
        self._others = set(psutil.Process().children(recursive=True))
        # A session of its own: what is done to the worker's process group must not take the guard first.
        self._process = subprocess.Popen(  # noqa: S603  # our own module
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        self._told: dict[int, float] = {}

    def tell(self) -> None:
        """Tell which processes there are below this one now, if there are others than at the last time."""
        family = {}
        for process in psutil.Process().children(recursive=True):
            if process.pid != self._process.pid and process not in self._others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    family[process.pid] = process.create_time()
        if family != self._told and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # the guard was killed: go on without
                self._process.stdin.write(json.dumps(family) + "\n")
                self._process.stdin.flush()
            self._told = family

    def close(self) -> None:
        """The guard ends with what is left of vLLM's processes."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """The guard itself: read until the worker's end of the pipe closes, then kill what was told last."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    family: dict[str, float] = {}
    for line in sys.stdin:
        family = json.loads(line)
    for pid, created in family.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            # The number may belong to another process by now.
            if process.create_time() == created:
                process.kill()


if __name__ == "__main__":
    main()
