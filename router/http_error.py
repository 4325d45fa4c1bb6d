"""Errors as OpenAI's error objects: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from rankway.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidField,
    Mismatch,
    Outdated,
    Overloaded,
    RankOutOfRange,
    RankwayError,
    Unavailable,
    UnknownModel,
    Unsupported,
)

_CODES: tuple[tuple[type[RankwayError], str], ...] = (
    (InvalidField, "invalid_value"),
    (RankOutOfRange, "rank_out_of_range"),
    (UnknownModel, "model_not_found"),
    (Unsupported, "unsupported_parameter"),
    (Overloaded, "rate_limit_exceeded"),
    (Unavailable, "service_unavailable"),
    (DeadlineExceeded, "timeout"),
    (Conflict, "conflict"),
    (Mismatch, "conflict"),
    (Outdated, "conflict"),
)
_BY_STATUS = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "request_too_large",
    431: "request_too_large",
    500: "internal_error",
    503: "service_unavailable",
}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error object of a status."""
    if status == 429:
        kind = "rate_limit_error"
    elif status < 500:
        kind = "invalid_request_error"
    else:
        kind = "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code or _BY_STATUS.get(status)}}


def error_of(error: RankwayError) -> dict[str, Any]:
    """The error object of an error that a caller may see."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    return error_body(error.http_status, error.message, param=getattr(error, "field", None), code=code)


def error_answer(error: RankwayError) -> tuple[int, bytes, bytes]:
    """Status, body and further header lines of an error's answer."""
    headers = b""
    if isinstance(error, Overloaded):
        headers = b"retry-after: %d\r\n" % max(1, math.ceil(error.retry_after_s))
    elif isinstance(error, Unavailable):
        headers = b"retry-after: 1\r\n"
    return error.http_status, msgspec.json.encode(error_of(error)), headers
