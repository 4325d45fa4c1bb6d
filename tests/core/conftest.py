"""The two implementations of the core: every contract test runs against both."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from rankway import blocks, choice, index

PURE = SimpleNamespace(
    name="pure",
    hash_chain=blocks.hash_chain,
    choose=choice.choose,
    choose_for_tokens=choice.choose_for_tokens,
    Index=index.PureIndex,
    ActiveBlocks=index.PureActiveBlocks,
)


def compiled() -> Any:
    """The compiled core, or a skip that says what is missing."""
    try:
        return importlib.import_module("rankway._core")
    except ImportError:
        pytest.skip("the compiled core isn't built: pip install -e . with a C compiler")


@pytest.fixture(params=["pure", "compiled"])
def core(request: pytest.FixtureRequest) -> Any:
    """One implementation of the core."""
    return PURE if request.param == "pure" else compiled()
