"""Structured logs: readable lines on a terminal, one JSON object a line elsewhere.

Prompts, tokens and generated text are never logged at info level or above.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO

import structlog

LEVELS = ("debug", "info", "warning", "error")

# No local variables: they hold prompts and API keys.
_tracebacks = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


class _Unbroken:
    """A stream whose reader may be gone: a line that nobody can read must not end what it tells of."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


_threshold = logging.NOTSET


def enabled(level: int) -> bool:
    """Whether lines of a level are written: for what is dear to put together. (A logger's own `is_enabled_for` costs as much as a
    cheap line.)"""
    return level >= _threshold


def configure(level: str, *, service: str, json: bool | None = None) -> None:
    """Set up structlog for this process, on standard error. `json` None: JSON unless stderr is a terminal."""
    global _threshold
    _threshold = getattr(logging, level.upper())
    as_json = not sys.stderr.isatty() if json is None else json
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            _tracebacks if as_json else structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_threshold),
        logger_factory=structlog.PrintLoggerFactory(_Unbroken(sys.stderr)),  # type: ignore[arg-type]  # all it needs of a file
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    # Libraries that use the standard logger (nats, grpc) report only what went wrong.
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose lines carry `component=name`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=name)
    return logger
