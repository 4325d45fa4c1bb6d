"""Child processes of `rankway up` and `rankway router --processes`: each leads a process group and ends with its parent.

asyncio's subprocesses are not used: uvloop runs Python code between fork and exec, as any `preexec_fn` does, and a process that
has other threads (gRPC's) may crash there. A `Popen` without `preexec_fn` goes from vfork straight to exec. What has to happen in
the child before the program starts is therefore done by a few lines that replace themselves by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

_BOUND = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""PR_SET_PDEATHSIG, SIGTERM; it outlives exec. The parent may have died before the call, so it is looked for after it."""


def bound(argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` in its place, and on Linux gets SIGTERM when the thread that starts it ends."""
    return [*([sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid())] if sys.platform == "linux" else []), *argv]


class Process:
    """A running child. Start it on the thread that lives as long as the parent: Linux binds it to that thread.

    Attributes:
        ended: done when it has ended: its exit code, or minus the signal that killed it.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        output: int | None = None,
        pass_fds: Sequence[int] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; `output` (a file descriptor) takes its standard output and error, `environ` is added to ours.

        Raises:
            OSError: there is no such program.
        """
        if shutil.which(argv[0]) is None:
            raise FileNotFoundError(f"no such program: {argv[0]}")
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        self._process = subprocess.Popen(  # noqa: S603  # what our callers run
            bound(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=pass_fds,
            env={**os.environ, **(environ or {})},
            process_group=0,
        )
        # A thread each: an event loop's own watcher may miss children that end at the same time.
        threading.Thread(target=self._wait, args=(loop,), name=f"waits for {self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """SIGTERM. Harmless after its end."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the process and to all that it started in its group. Harmless when there is none."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._set_ended, code)

    def _set_ended(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)
