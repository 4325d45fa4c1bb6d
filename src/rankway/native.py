"""The compiled core where this machine has it, the pure-Python twins elsewhere: same names, same results.

Services import the hash chain, the index and the choice from here, never from the twins. The environment variable
RANKWAY_PURE=1 keeps the compiled core out, to compare or to exclude it as a cause.
"""

from __future__ import annotations

import importlib
import os

from rankway import blocks, choice, index

WANTED = os.environ.get("RANKWAY_PURE") != "1"
"""Whether compiled parts are to be used where they are. The one setting that is read outside of a `__main__`: what is imported
depends on it.
"""


def _obstacle() -> str | None:
    """Why the compiled core can't serve; None: it can."""
    if not WANTED:
        return "RANKWAY_PURE=1 is set."
    try:
        importlib.import_module("rankway._core")
    except ImportError as error:
        return f"the compiled core can't be imported ({error}); had installation a C compiler?"
    return None


_OBSTACLE = _obstacle()

COMPILED = _OBSTACLE is None
"""Whether the compiled core serves."""

REASON = (
    "compiled"
    if COMPILED
    else f"pure Python: {_OBSTACLE} The results are the same; hashing and choosing take tens of times longer, "
    "and the index about ten times the memory"
)
"""Which core serves and, if it is the pure one, why and what that costs: for the start-up log and `rankway doctor`."""

if COMPILED:
    from rankway import _core

hash_chain = _core.hash_chain if COMPILED else blocks.hash_chain
choose = _core.choose if COMPILED else choice.choose
choose_for_tokens = _core.choose_for_tokens if COMPILED else choice.choose_for_tokens


def open_index() -> index.Index:
    """An empty index."""
    return _core.Index() if COMPILED else index.PureIndex()


def open_active_blocks() -> index.ActiveBlocks:
    """An empty counted set."""
    return _core.ActiveBlocks() if COMPILED else index.PureActiveBlocks()
