"""The fuzz of tests/core/fuzz.py: once as it is installed, once under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz.py")
SOURCE = Path(__file__).parents[2] / "src" / "rankway" / "_core.c"


def fuzz(*arguments: str, environment: dict[str, str] | None = None) -> None:
    """Run the fuzz in a process of its own; its output is the failure's text."""
    done = subprocess.run(
        [sys.executable, str(FUZZ), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, **(environment or {})},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def sanitizer_library(compiler: str, name: str) -> str:
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{compiler} has no {name}")
    return found


def test_the_cores_agree_at_size() -> None:
    """Random walks over thousands of blocks and hundreds of slots end alike in both cores, and leave nothing behind."""
    pytest.importorskip("rankway._core", reason="the compiled core isn't built: pip install -e . with a C compiler")
    fuzz("--rounds", "12", "--seed", os.environ.get("FUZZ_SEED", "1"))


def test_no_memory_error_under_the_sanitizers(tmp_path: Path) -> None:
    """The same walks touch no byte that isn't theirs and rely on nothing undefined."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc: the sanitizers need a compiler")
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        pytest.skip(f"no Python.h in {include}: the sanitizers need Python's headers")
    preload = f"{sanitizer_library(compiler, 'libasan.so')} {sanitizer_library(compiler, 'libubsan.so')}"
    built = tmp_path / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    flags = [
        "-O1",
        "-g",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-fno-omit-frame-pointer",
        "-ffp-contract=off",
    ]
    subprocess.run([compiler, *flags, "-shared", "-fPIC", f"-I{include}", str(SOURCE), "-o", str(built), "-lm"], check=True)
    fuzz(
        "--rounds",
        os.environ.get("FUZZ_ROUNDS", "4"),
        "--steps",
        "150",
        "--seed",
        os.environ.get("FUZZ_SEED", "2"),
        "--core",
        str(built),
        environment={
            "LD_PRELOAD": preload,
            "ASAN_OPTIONS": "detect_leaks=0",  # CPython itself leaves much behind at exit
            "PYTHONMALLOC": "malloc",  # so that the edges of Python's own buffers are seen
        },
    )
