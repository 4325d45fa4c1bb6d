"""Rules of the launcher's child processes, with small scripts as children."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import psutil
import pytest
from harness.waiting import eventually

from rankway.launcher import Child, Console, StartFailed
from rankway.loglines import LineFormat

READY = "import os; os.write(int(os.environ['RANKWAY_READY_FD']), b'{\"grpc\": \"127.0.0.1:1\"}\\n'); "


class Recorder(Console):
    """A console that keeps what it is given."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def write(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def console() -> Recorder:
    return Recorder()


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def start(console: Console, code: str) -> Child:
    lines = LineFormat(("child",), level="info", colour=False, as_json=False)
    return await Child.start("child", [sys.executable, "-c", code], console, lines)


async def test_ready_child_tells_its_addresses(console: Recorder) -> None:
    """A child is ready when it says so, and its addresses are what it said."""
    child = await start(console, READY + "import time; time.sleep(60)")
    await child.wait_ready(10)
    assert child.addresses == {"grpc": "127.0.0.1:1"}
    await child.stop(10)


async def test_child_that_ends_before_it_is_ready_fails_the_start(console: Recorder) -> None:
    """The message names the child, its exit code and its last log lines."""
    child = await start(console, "import sys; print('no engine here', file=sys.stderr); sys.exit(3)")
    with pytest.raises(StartFailed, match=r"child ended with exit code 3; its last log lines:\n    child \| no engine here"):
        await child.wait_ready(10)


async def test_child_that_is_never_ready_fails_the_start_in_time(console: Recorder) -> None:
    """Waiting has a bound."""
    child = await start(console, "import time; time.sleep(60)")
    with pytest.raises(StartFailed, match="not ready after"):
        await child.wait_ready(0.05)
    await child.stop(10)


async def test_program_that_is_not_there(console: Recorder) -> None:
    """What can't be executed is a failed start that names the program."""
    lines = LineFormat(("child",), level="info", colour=False, as_json=False)
    with pytest.raises(StartFailed, match="can't start /nowhere/at-all"):
        await Child.start("child", ["/nowhere/at-all"], console, lines)


async def test_only_the_last_lines_are_kept(console: Recorder) -> None:
    """A death is told with ten lines, the newest."""
    child = await start(console, "for i in range(100): print('line', i)")
    end = await child.wait()
    assert end.splitlines()[1:] == [f"    child | line {i}" for i in range(90, 100)]


async def test_killed_child_is_told_by_its_signal(console: Recorder) -> None:
    """A signal is named, not shown as a negative number."""
    child = await start(console, READY + "import time; time.sleep(60)")
    await child.wait_ready(10)
    child.kill()
    assert (await child.wait()).startswith("was killed by SIGKILL")


async def test_stubborn_child_is_killed_after_its_time(console: Recorder) -> None:
    """SIGTERM first, SIGKILL when that takes too long, and a line says so."""
    child = await start(
        console, "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY + "time.sleep(60)"
    )
    await child.wait_ready(10)
    await child.stop(0.1)
    assert any("did not end within" in text for text in console.texts)
    assert not psutil.pid_exists(child.pid)


async def test_what_a_child_started_ends_with_it(console: Recorder) -> None:
    """A child's own children don't survive it."""
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print('started', p.pid, flush=True); sys.exit(1)"
    child = await start(console, code)
    await child.wait()
    pid = int(next(text for text in console.texts if "started" in text).split()[-1])
    await eventually(lambda: ended(pid))


async def test_endless_line_comes_in_parts(console: Recorder) -> None:
    """A line without an end doesn't take memory without end."""
    child = await start(console, "import sys; sys.stdout.write('x' * 1_000_000)")
    await child.wait()
    shown = [text.removeprefix("child | ") for text in console.texts]
    assert sum(map(len, shown)) == 1_000_000
    assert len(shown) > 1


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
async def test_children_die_with_the_launcher() -> None:
    """kill -9 of the launcher ends its children."""
    code = """
import asyncio, sys
from rankway.launcher import Child, Console
from rankway.loglines import LineFormat
async def main():
    lines = LineFormat(("child",), level="info", colour=False, as_json=False)
    child = await Child.start("child", ["sleep", "60"], Console(), lines)
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""
    with await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", code], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        pid = int(await asyncio.to_thread(launcher.stdout.readline))
        launcher.kill()
    await eventually(lambda: ended(pid))


def test_console_drops_and_counts_when_nobody_reads() -> None:
    """A terminal that stands still costs log lines, never the services' time; the loss is told."""
    code = """
import os, time
from rankway.launcher import Console
console = Console()
for i in range(100_000):
    console.write("x" * 100)
os.write(2, b"written\\n")
time.sleep(0.3)
console.write("last")
console.close(10)
"""
    reader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert reader.stderr is not None
    assert reader.stdout is not None
    with reader:
        assert reader.stderr.readline() == "written\n"
        lines = reader.stdout.read().splitlines()
    dropped = sum(int(line.split()[0].lstrip("(")) for line in lines if "dropped" in line)
    assert dropped > 0
    assert dropped + sum(line.startswith("x") for line in lines) == 100_000
    assert lines[-1] == "last"


def test_start_takes_no_longer_than_it_must() -> None:
    """Importing the launcher imports no service."""
    code = "import sys, rankway.up; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    services = ("rankway.registry", "rankway.indexer", "rankway.router", "rankway.worker")
    assert [module for module in answer.stdout.split() if module.startswith(services)] == []
