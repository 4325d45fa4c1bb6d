"""Installation: a wheel with the compiled core where a compiler is, and one without it where none is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["src", "registry", "indexer", "router", "worker", "pyproject.toml", "setup.py", "README.md", "LICENSE"]

pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools: pip install --group dev")


def run(*command: str | Path, path: str | None = None, cwd: Path | None = None) -> str:
    """A command's output; its PATH is `path` if that is given."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "RANKWAY_PURE")}
    environment |= {"PATH": os.environ["PATH"] if path is None else path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # A new Python borrows the dependencies of this one. Its .pth files, and with them an editable Rankway, don't work there.
    environment["PYTHONPATH"] = "" if command[0] == sys.executable else sysconfig.get_paths()["purelib"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=cwd, env=environment, timeout=110
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of a copy of this tree, without what was built here."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    run(sys.executable, "setup.py", "-q", "sdist", cwd=copy)
    (archive,) = (copy / "dist").glob("*.tar.gz")
    return archive


def installed(source: Path, home: Path, path: str | None) -> Path:
    """A Python whose only package is Rankway, built from `source` with that PATH and installed without any compiler on it."""
    nowhere = home / "no-compiler-here"
    nowhere.mkdir()
    pip = [sys.executable, "-m", "pip", "-q"]
    run(*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", home, source, path=path)
    (wheel,) = home.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", home / "venv")
    python = home / "venv" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, path=str(nowhere))
    return python


def test_a_wheel_brings_the_compiled_core(source: Path, tmp_path: Path) -> None:
    """Built with a compiler from the source distribution, the wheel's core works on a machine that has none."""
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("no C compiler: a wheel with the compiled core can't be built here")
    python = installed(source, tmp_path, None)
    script = "from rankway import native; i = native.open_index(); i.store(3, [1, 2]); print(native.REASON, i.match([1, 2, 3]))"
    assert run(python, "-c", script, path=str(tmp_path)) == "compiled {3: 2}\n"


def test_installation_goes_on_without_a_compiler(source: Path, tmp_path: Path) -> None:
    """Built where no compiler is, Rankway installs all the same, serves with the pure core and says so in words."""
    nowhere = tmp_path / "empty"
    nowhere.mkdir()
    python = installed(source, tmp_path, str(nowhere))
    script = "from rankway import native; i = native.open_index(); i.store(3, [1, 2]); print(native.REASON); print(i.match([1]))"
    reason, match = run(python, "-c", script, path=str(nowhere)).splitlines()
    assert reason.startswith("pure Python: the compiled core can't be imported")
    assert "tens of times longer" in reason
    assert match == "{3: 1}"
