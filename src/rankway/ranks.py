"""Global ranks, local ranks, and the windows that map one to the other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType

from rankway.errors import InvalidField, RankOutOfRange

GlobalRank = NewType("GlobalRank", int)
"""A rank of the DP group, 0 … data_parallel_size-1. This is what `dp_rank` means everywhere."""

LocalRank = NewType("LocalRank", int)
"""A rank of one worker's engine, 0 … size-1. Only the code that calls the engine knows one."""

UINT32_MAX = 2**32 - 1
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_name(field: str, value: str) -> str:
    """Return `value` if it may stand in a NATS subject: 1 to 64 characters of A-Z a-z 0-9 _ -.

    Raises:
        InvalidField: otherwise.
    """
    if not _NAME.fullmatch(value):
        raise InvalidField(field, value, "must be 1 to 64 characters of A-Z, a-z, 0-9, _ or -")
    return value


@dataclass(frozen=True, slots=True, order=True)
class DpRange:
    """The window of global ranks start_rank … start_rank + size - 1 that one worker owns.

    Raises:
        InvalidField: size 0, a negative number, or start_rank + size beyond uint32.
    """

    start_rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.start_rank <= UINT32_MAX:
            raise InvalidField("start_rank", self.start_rank, f"must be 0 … {UINT32_MAX}")
        if self.size < 1:
            raise InvalidField("size", self.size, "a window has at least one rank")
        if self.start_rank + self.size > UINT32_MAX:
            raise InvalidField("size", self.size, f"start_rank + size = {self.start_rank + self.size} overflows uint32")

    def check_within(self, data_parallel_size: int) -> None:
        """Raise InvalidField if the window passes the end of its DP group."""
        if self.end > data_parallel_size:
            raise InvalidField("dp_range", str(self), f"passes data_parallel_size={data_parallel_size}")

    @property
    def end(self) -> int:
        """First rank after the window."""
        return self.start_rank + self.size

    def __contains__(self, dp_rank: object) -> bool:
        return isinstance(dp_rank, int) and self.start_rank <= dp_rank < self.end

    def overlaps(self, other: DpRange) -> bool:
        return self.start_rank < other.end and other.start_rank < self.end

    def ranks(self) -> list[GlobalRank]:
        return [GlobalRank(rank) for rank in range(self.start_rank, self.end)]

    def to_local(self, dp_rank: int, owner: str) -> LocalRank:
        """The engine's number for a global rank.

        Raises:
            RankOutOfRange: the rank is outside the window; the message names `owner` and the window.
        """
        if dp_rank not in self:
            raise RankOutOfRange(dp_rank, owner, str(self))
        return LocalRank(dp_rank - self.start_rank)

    def to_global(self, local_rank: int) -> GlobalRank:
        """The group's number for an engine rank.

        Raises:
            InvalidField: not one of the engine's ranks.
        """
        if not 0 <= local_rank < self.size:
            raise InvalidField("local_rank", local_rank, f"the engine has {self.size} ranks")
        return GlobalRank(self.start_rank + local_rank)

    def __str__(self) -> str:
        return f"[{self.start_rank}, {self.end})"


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """What the router chooses: one global rank of one worker."""

    worker_id: str
    dp_rank: GlobalRank


@dataclass(frozen=True, slots=True, order=True)
class Instance:
    """One life of a worker: a restart is a new epoch (milliseconds since 1970 at its start)."""

    worker_id: str
    epoch: int
