"""The text of one choice: whole characters, stop strings never shown, and a stream that goes on where another left off. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """`rankway.tokenizer.IncrementalDecoder`: characters as tokens complete them."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class OutputText:
    """Detokenises a choice's output, holds back what may be the start of a stop string, and cuts at the first one completed.

    Which one is first depends on the text alone, not on how the tokens were grouped: the one that is complete earliest, and
    of those that end together the longest. A stop string counts if it is completed by a token after the first `min_tokens`.

    Args:
        decoder: fresh.
        stop: stop strings, none empty.
        min_tokens: tokens before a stop is honoured, counted from the first output token.
        delivered: characters that the client already has of the text of the tokens pushed first (a resumed request).
    """

    __slots__ = ("_decoder", "_delivered", "_held", "_min_tokens", "_stop", "_tokens")

    def __init__(self, decoder: Decoder, stop: Sequence[str] = (), min_tokens: int = 0, delivered: int = 0) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._delivered = delivered
        self._held = ""
        self._tokens = 0

    def push(self, tokens: Sequence[int]) -> tuple[str, int, bool]:
        """The next output tokens: (text to show, how many of the tokens count, whether a stop string was completed).

        Tokens after the one that completes a stop string don't count, and nothing may be pushed any more.
        """
        if not self._stop:
            text = self._decoder.push(tokens)
            return (self._undelivered(text) if self._delivered else text), len(tokens), False
        shown = ""
        for position, token in enumerate(tokens):
            text, stopped = self._push_one(token)
            shown += text
            if stopped:
                return self._undelivered(shown), position + 1, True
        return self._undelivered(shown), len(tokens), False

    def finish(self) -> str:
        """The output ended without a stop string: the text that was held back."""
        text = self._held + self._decoder.flush()
        self._held = ""
        return self._undelivered(text)

    def _push_one(self, token: int) -> tuple[str, bool]:
        """(text to show, whether a stop string was completed)."""
        self._tokens += 1
        new = self._decoder.push((token,))
        if not new:
            return "", False
        text = self._held + new
        if self._tokens > self._min_tokens:
            start = self._find_stop(text, len(text) - len(new))
            if start is not None:
                self._held = ""
                return text[:start], True
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _find_stop(self, text: str, known: int) -> int | None:
        """Where the first stop string that ends after the first `known` characters begins."""
        best: tuple[int, int] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[1]

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string, but isn't one."""
        longest = 0
        for stop in self._stop:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            if at >= 0:
                longest = max(longest, len(text) - at)
        return longest

    def _undelivered(self, text: str) -> str:
        if not self._delivered:
            return text
        skip = min(self._delivered, len(text))
        self._delivered -= skip
        return text[skip:]
