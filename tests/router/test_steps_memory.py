"""The compiled part of `steps` under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "rankway" / "_steps.c"
RULES = Path(__file__).with_name("test_steps.py")
RUN = """
import importlib.util, sys
import pytest, rankway
spec = importlib.util.spec_from_file_location("rankway._steps", sys.argv[1])
rankway._steps = sys.modules["rankway._steps"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rankway._steps)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:randomly", sys.argv[2]]))
"""


def sanitizer_library(compiler: str, name: str) -> str:
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{compiler} has no {name}")
    return found


@pytest.mark.slow
def test_no_memory_error_under_the_sanitizers(tmp_path: Path) -> None:
    """Whatever deltas and garbage the other rules send, no byte is touched that isn't the module's."""
    compiler = shutil.which("gcc")
    include = sysconfig.get_paths()["include"]
    if compiler is None or not (Path(include) / "Python.h").exists():
        pytest.skip("the sanitizers need gcc and Python's headers")
    preload = f"{sanitizer_library(compiler, 'libasan.so')} {sanitizer_library(compiler, 'libubsan.so')}"
    built = tmp_path / f"_steps{sysconfig.get_config_var('EXT_SUFFIX')}"
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    subprocess.run([compiler, *flags, "-shared", "-fPIC", f"-I{include}", str(SOURCE), "-o", str(built)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(built), str(RULES)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=RULES.parents[2],
        env={
            **os.environ,
            "STEPS_EXAMPLES": "25",
            "LD_PRELOAD": preload,
            "ASAN_OPTIONS": "detect_leaks=0",  # CPython itself leaves much behind at exit
            "PYTHONMALLOC": "malloc",  # so that the edges of Python's own buffers are seen
        },
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "passed" in done.stdout
