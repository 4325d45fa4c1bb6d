"""The compiled core where this machine has it, the pure-Python twins elsewhere: same names, same results.

Services import the hash chain, the index and the choice from here, never from the twins.
"""

from __future__ import annotations

from rankway import blocks, choice, index

COMPILED = False
"""Whether the compiled core serves."""

hash_chain = blocks.hash_chain
choose = choice.choose


def open_index() -> index.Index:
    """An empty index."""
    return index.PureIndex()


def open_active_blocks() -> index.ActiveBlocks:
    """An empty counted set."""
    return index.PureActiveBlocks()
