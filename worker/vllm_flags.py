"""vLLM's data-parallel flags and the window of global ranks that they mean. Pure: no vLLM in here.

vLLM changes these flags while it builds its configuration. What counts is the configuration afterwards; what the operator wrote
is kept beside it, to refuse what vLLM would drop in silence.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankway.errors import InvalidField, Mismatch
from rankway.ranks import DpRange


@dataclass(frozen=True, slots=True)
class DpFlags:
    """The flags as the operator wrote them; None: not given."""

    size: int = 1
    size_local: int | None = None
    start_rank: int | None = None
    rank: int | None = None
    hybrid_lb: bool = False


@dataclass(frozen=True, slots=True)
class DpConfig:
    """vLLM's parallel_config after create_engine_config()."""

    size: int
    size_local: int
    rank: int
    hybrid_lb: bool
    external_lb: bool
    is_moe: bool = True
    """Whether the model has experts, as vLLM sees it."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """The window that the operator gave to Rankway itself; None: not given."""

    data_parallel_size: int | None = None
    start_rank: int | None = None
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an engine stands in its DP group, and who balances inside the window."""

    window: DpRange
    data_parallel_size: int
    balancing: str
    """"hybrid", "external", "internal", or "independent": an engine that knows of no other ranks."""

    @property
    def waits_for(self) -> str:
        """The other engines of the group that vLLM waits for while it starts, in words; "": none."""
        if self.balancing not in ("hybrid", "external"):
            return ""
        if self.window.start_rank:
            return "the process that owns global rank 0"
        return f"the processes that own the global ranks {DpRange(self.window.end, self.data_parallel_size - self.window.end)}"


def placement(flags: DpFlags, config: DpConfig, assigned: Assigned) -> Placement:
    """The window that vLLM's configuration means.

    Raises:
        InvalidField: flags that vLLM drops or that pass the end of the group.
        Mismatch: Rankway's own window options say something else than vLLM's configuration.
    """
    if flags.start_rank and flags.size_local is None and config.rank != flags.start_rank:
        raise InvalidField(
            "--data-parallel-start-rank",
            flags.start_rank,
            "vLLM ignores it without --data-parallel-size-local: give the number of ranks of this process",
        )
    if config.size <= 1:
        return _independent(flags, assigned)
    if config.external_lb and not config.is_moe:
        raise InvalidField(
            "--data-parallel-size-local",
            config.size_local,
            "vLLM makes external load balancing of one local rank and can't run that for dense models: start independent engines "
            f"with --data-parallel-size {config.size} --start-rank {config.rank} --size 1 before -- and no such flags after it",
        )
    if config.hybrid_lb or config.external_lb:
        window = DpRange(config.rank, config.size_local)
        balancing = "hybrid" if config.hybrid_lb else "external"
    else:
        if config.rank:
            raise InvalidField(
                "--data-parallel-start-rank",
                config.rank,
                f"{config.size_local} local ranks of {config.size} balance internally, which starts at rank 0",
            )
        window = DpRange(0, config.size)
        balancing = "internal"
    if window.end > config.size:
        raise InvalidField(
            "--data-parallel-start-rank",
            window.start_rank,
            f"{window.size} local ranks from here pass --data-parallel-size {config.size}",
        )
    _check_agrees(window, config.size, assigned)
    return Placement(window, config.size, balancing)


def _independent(flags: DpFlags, assigned: Assigned) -> Placement:
    if flags.rank or flags.start_rank:
        raise InvalidField(
            "--data-parallel-rank", flags.rank or flags.start_rank, "vLLM ignores it without --data-parallel-size above 1"
        )
    size = 1 if assigned.size is None else assigned.size
    start = assigned.start_rank or 0
    if size != 1:
        raise InvalidField(
            "--size",
            size,
            "this vLLM engine has one rank: for more give vLLM's own flags after --, for example "
            f"--data-parallel-size {assigned.data_parallel_size or size} --data-parallel-size-local {size} "
            f"--data-parallel-start-rank {start} --data-parallel-hybrid-lb",
        )
    total = start + 1 if assigned.data_parallel_size is None else assigned.data_parallel_size
    window = DpRange(start, 1)
    window.check_within(total)
    return Placement(window, total, "independent")


def _check_agrees(window: DpRange, data_parallel_size: int, assigned: Assigned) -> None:
    for name, given, actual in (
        ("data_parallel_size", assigned.data_parallel_size, data_parallel_size),
        ("start_rank", assigned.start_rank, window.start_rank),
        ("size", assigned.size, window.size),
    ):
        if given is not None and given != actual:
            raise Mismatch(
                f"{name}={given}: vLLM's own configuration says {actual} (window {window} of {data_parallel_size} ranks)"
            )


def group_flags(data_parallel_size: int, window: DpRange) -> list[str]:
    """The vLLM flags that make one process serve `window`: hybrid LB, or internal where the window is the whole group.

    The processes of a group on one host also need the same --data-parallel-rpc-port, which no other group there uses.
    """
    if window.size == data_parallel_size:
        return [f"--data-parallel-size={data_parallel_size}"]
    return [
        f"--data-parallel-size={data_parallel_size}",
        f"--data-parallel-size-local={window.size}",
        f"--data-parallel-start-rank={window.start_rank}",
        "--data-parallel-hybrid-lb",
    ]
