"""The errors that cross service boundaries, and what they are in gRPC and in HTTP.

RankwayError
├── InvalidField       a field of the request has a value that is not allowed   INVALID_ARGUMENT     400
├── RankOutOfRange     a global rank outside a window or a DP group             OUT_OF_RANGE         400
├── UnknownModel       no worker serves the model                               NOT_FOUND            404
├── NotFound           a worker, rank or request that isn't there               NOT_FOUND            404
├── Conflict           somebody else holds it                                   ALREADY_EXISTS       409
├── Mismatch           the state of the other side doesn't allow it             FAILED_PRECONDITION  409
├── Outdated           a newer instance exists                                  ABORTED              409
├── Overloaded         every target is full; try again after `retry_after_s`    RESOURCE_EXHAUSTED   429
├── Unavailable        nobody to serve it now                                   UNAVAILABLE          503
├── DeadlineExceeded   the client's deadline passed                             DEADLINE_EXCEEDED    504
├── Unsupported        asked for something this engine can't do                 UNIMPLEMENTED        400
└── EngineFailed       the engine broke while it worked on the request          INTERNAL             500
"""

from __future__ import annotations

import reprlib

import grpc

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


class RankwayError(Exception):
    """Base of every error that a caller may see. `message` is safe to show: it never contains prompt text."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    http_status: int = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidField(RankwayError):
    """`field` has `value`, which is not allowed because of `reason`."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}={_repr.repr(value)}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason


class RankOutOfRange(RankwayError):
    """A global rank that `owner` (a worker or a DP group) doesn't have; `ranks` says which it has, e.g. "[4, 8)"."""

    code = grpc.StatusCode.OUT_OF_RANGE
    http_status = 400

    def __init__(self, dp_rank: object, owner: str, ranks: str) -> None:
        super().__init__(f"dp_rank={dp_rank}: {owner} owns the global ranks {ranks}")
        self.field = "dp_rank"
        self.value = dp_rank
        self.owner = owner
        self.ranks = ranks


class NotFound(RankwayError):
    code = grpc.StatusCode.NOT_FOUND
    http_status = 404


class UnknownModel(NotFound):
    def __init__(self, model: str, known: list[str]) -> None:
        super().__init__(f"model={model!r}: no such model; there is: {', '.join(sorted(known)) or 'none'}")
        self.field = "model"
        self.value = model


class Conflict(RankwayError):
    code = grpc.StatusCode.ALREADY_EXISTS
    http_status = 409


class Mismatch(RankwayError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 409


class Outdated(RankwayError):
    code = grpc.StatusCode.ABORTED
    http_status = 409


class Overloaded(RankwayError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(RankwayError):
    code = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class DeadlineExceeded(RankwayError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class Unsupported(RankwayError):
    """`field` asks for something that isn't supported here."""

    code = grpc.StatusCode.UNIMPLEMENTED
    http_status = 400

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


class EngineFailed(RankwayError):
    code = grpc.StatusCode.INTERNAL
    http_status = 500


def from_status(code: grpc.StatusCode, message: str) -> RankwayError:
    """The error that another service's status stands for. Its class tells the code; `message` is the other side's."""
    for kind in (NotFound, Conflict, Mismatch, Outdated, Unavailable, DeadlineExceeded, EngineFailed):
        if kind.code is code:
            return kind(message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(message)
    error = RankwayError(message)
    error.code = code
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.UNIMPLEMENTED):
        error.http_status = 400
    return error
