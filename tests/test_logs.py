"""Rules of the services' logs."""

from __future__ import annotations

import subprocess
import sys


def test_a_reader_that_is_gone_ends_nothing() -> None:
    """Logging into a closed pipe is no error: the service that logs goes on."""
    code = """
import sys
from rankway import logs
logs.configure("info", service="test")
sys.stdin.readline()
for _ in range(3):
    logs.get("test").info("nobody reads this")
print("still here")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stderr.close()
        process.stdin.write(b"go\n")
        process.stdin.flush()
        assert process.stdout.read() == b"still here\n"


def test_lines_are_json_where_nobody_watches() -> None:
    """Not on a terminal each line is one JSON object with level, time, service and component."""
    code = "from rankway import logs; logs.configure('info', service='s'); logs.get('c').info('happened', dp_rank=3)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert '"event": "happened"' in answer.stderr
    assert '"dp_rank": 3' in answer.stderr
    assert '"service": "s"' in answer.stderr
    assert '"component": "c"' in answer.stderr
