"""The tokenizers that a router needs: one per fingerprint, from its own disk or from a worker, and the threads that use them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from rankway import logs
from rankway.errors import Overloaded, RankwayError, Unavailable, Unsupported
from rankway.tokenizer import BYTE_LEVEL, Tokenizer

log = logs.get("tokenizers")

Fetch = Callable[[str], Awaitable[Mapping[str, bytes]]]
"""From a fingerprint to the tokenizer's files, as some worker serves them. Raises RankwayError."""

T = TypeVar("T")

MAX_KEPT = 16
"""Tokenizers in memory; the one fetched longest ago goes first."""


class Tokenizers:
    """Fingerprint -> tokenizer. A missing one is fetched once, however many requests wait for it."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        built_in = Tokenizer.byte_level()
        self._kept: dict[str, Tokenizer] = {built_in.fingerprint: built_in}
        self._fetching: dict[str, asyncio.Task[Tokenizer]] = {}

    def add(self, tokenizer: Tokenizer) -> None:
        self._kept[tokenizer.fingerprint] = tokenizer
        for fingerprint in [known for known in self._kept if known != BYTE_LEVEL][:-MAX_KEPT]:
            del self._kept[fingerprint]

    def ready(self, fingerprint: str) -> Tokenizer | None:
        """The tokenizer if it is here already."""
        return self._kept.get(fingerprint)

    async def get(self, fingerprint: str) -> Tokenizer:
        """The tokenizer, fetched if need be.

        Raises:
            Unsupported: the model is served by token ids only.
            Unavailable: no worker gave it.
        """
        if not fingerprint:
            raise Unsupported("prompt", "this model has no tokenizer here: send token ids")
        if fingerprint in self._kept:
            return self._kept[fingerprint]
        task = self._fetching.get(fingerprint)
        if task is None:
            task = asyncio.create_task(self._load(fingerprint), name=f"tokenizer {fingerprint}")
            self._fetching[fingerprint] = task
            task.add_done_callback(functools.partial(self._fetched, fingerprint))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel fetches under way."""
        tasks = list(self._fetching.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, fingerprint: str) -> Tokenizer:
        try:
            files = await self._fetch(fingerprint)
            tokenizer = await asyncio.to_thread(Tokenizer.from_files, files)
        except RankwayError as error:
            raise Unavailable(f"no worker gave the tokenizer {fingerprint}: {error.message}") from error
        except ValueError as error:
            raise Unavailable(f"the tokenizer {fingerprint} of the workers can't be used: {error}") from error
        if tokenizer.fingerprint != fingerprint:
            raise Unavailable(f"the workers gave the tokenizer {tokenizer.fingerprint} for {fingerprint}")
        log.info("tokenizer fetched", fingerprint=fingerprint, vocab_size=tokenizer.vocab_size)
        self.add(tokenizer)
        return tokenizer

    def _fetched(self, fingerprint: str, task: asyncio.Task[Tokenizer]) -> None:
        self._fetching.pop(fingerprint, None)
        if not task.cancelled() and task.exception() is not None:
            log.warning("tokenizer not fetched", fingerprint=fingerprint, error=str(task.exception()))


@dataclass(slots=True)
class EncodingStats:
    """What the encoding threads are doing."""

    waiting: int = 0
    """Texts given to the threads and not done."""
    waiting_chars: int = 0
    encoded: int = 0
    refused: int = 0


LONG_CHARS = 200_000
"""Longer texts have a thread of their own: a second's worth of tokenising doesn't hold up the ordinary long ones."""


class EncodingThreads:
    """Runs encodings off the event loop. Bounded in number and in characters; beyond, Overloaded.

    Args:
        threads: for texts of up to LONG_CHARS.
        max_waiting, max_waiting_chars: texts given to all threads and not done.
    """

    def __init__(self, threads: int, max_waiting: int, max_waiting_chars: int) -> None:
        self.stats = EncodingStats()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._long_pool = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._max_waiting = max_waiting
        self._max_waiting_chars = max_waiting_chars

    async def run(self, chars: int, encode: Callable[[], T]) -> T:
        """`encode()` of a text of `chars` characters in a thread. A single text is taken whatever its length.

        Raises:
            Overloaded: too much is waiting.
            ValueError: as `encode` does.
        """
        stats = self.stats
        if stats.waiting and (stats.waiting >= self._max_waiting or stats.waiting_chars + chars > self._max_waiting_chars):
            stats.refused += 1
            raise Overloaded(f"{stats.waiting} texts of {stats.waiting_chars} characters are waiting to be tokenised")
        stats.waiting += 1
        stats.waiting_chars += chars
        try:
            pool = self._long_pool if chars > LONG_CHARS else self._pool
            return await asyncio.get_running_loop().run_in_executor(pool, encode)
        finally:
            stats.waiting -= 1
            stats.waiting_chars -= chars
            stats.encoded += 1

    def close(self) -> None:
        """Drop what waits; returns without waiting for a running encoding."""
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=False, cancel_futures=True)
