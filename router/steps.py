"""From a worker's message to the requests it belongs to: the way of every token, compiled where this machine has it.

`dispatch` hands each delta of a message to its receiver. With the compiled part, a receiver that is a `Pipe` gets its plain
deltas (tokens and text, nothing else) without any Python object in between: they become server-sent events at once, and what one
message brings for a stream leaves in one write. The first one takes the answer's head with it; books are kept when the client has
its bytes. Without the compiled part there are no pipes, and the client gets the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from google.protobuf.message import DecodeError

from rankway import native
from rankway.errors import RankwayError
from rankway.v1 import types_pb2, worker_pb2

if TYPE_CHECKING:
    from rankway.router.request import Flight

_steps: Any = None
if native.WANTED:
    with contextlib.suppress(ImportError):
        from rankway import _steps

COMPILED = _steps is not None

MALFORMED: tuple[type[Exception], ...] = (DecodeError, _steps.Malformed) if COMPILED else (DecodeError,)
"""What `dispatch` raises for a message that is no AttachResponse."""


class Socket(NamedTuple):
    """Where a connection's bytes go."""

    write: Callable[[bytes], None]
    closing: Callable[[], bool]
    unwritten: Callable[[], int]
    """Bytes that the transport holds because the socket hasn't taken them."""
    fd: int
    """-1: `write` is the only way."""

    @classmethod
    def of(cls, transport: asyncio.Transport) -> Socket:
        """A plain transport's; behind one that encrypts there is no socket for plain bytes."""
        socket = transport.get_extra_info("socket") if transport.get_extra_info("sslcontext") is None else None
        return cls(
            transport.write, transport.is_closing, transport.get_write_buffer_size, -1 if socket is None else socket.fileno()
        )


class Events(NamedTuple):
    """How a client's side turns text into events."""

    socket: Socket
    chunked: bool
    """Whether writes are framed as HTTP chunks."""
    head: bytes
    """What is written before everything else, not framed."""
    opening: bytes
    """Events before the first delta's."""
    before: bytes
    """An event's bytes before its JSON string …"""
    after: bytes
    """… and after it."""
    head_written: Callable[[], None]
    """To be called once the head, if there is one, has been written."""


class Receives(Protocol):
    def on_delta(self, delta: worker_pb2.StepDelta) -> None: ...


class Pipe(Protocol):
    """A flight's stand-in at its link."""

    chars: int
    """Code points of text that went through."""
    grow_at: int
    """Bytes of output tokens from which the flight grows."""
    closed: bool
    """The flight has left: nothing is written any more."""
    begun: bool
    """The attempt's first delta has come, by this way or the long one."""

    def on_delta(self, delta: worker_pb2.StepDelta) -> None: ...

    def on_lost(self, error: RankwayError) -> None: ...


def dispatch(message: bytes, receivers: dict[int, Any]) -> None:
    """Hand the deltas of an AttachResponse to their receivers (`Receives`), by stream; nobody's are passed over.

    Raises:
        `MALFORMED`: it is none, or a part of it is none.
    """
    if COMPILED:
        _steps.dispatch(receivers, worker_pb2.StepDelta.FromString, message)
        return
    for delta in worker_pb2.AttachResponse.FromString(message).step.deltas:
        receiver = receivers.get(delta.stream)
        if receiver is not None:
            receiver.on_delta(delta)


def frame_dispatcher(receivers: dict[int, Any]) -> Callable[[bytes], int] | None:
    """`dispatch` for what a socket mostly gives: whole HTTP/2 DATA frames of stream 1 with a whole gRPC message each.

    It takes bytes from the socket and returns how many of them were the frames' payload; 0: something else is there, too, and
    nothing was done. It raises what `dispatch` does. None where the compiled part is missing.
    """
    return functools.partial(_steps.dispatch_frames, receivers, worker_pb2.StepDelta.FromString) if COMPILED else None


def open_pipe(flight: Flight, events: Events) -> Pipe | None:
    """A pipe from here to the client; None where the compiled part is missing."""
    if not COMPILED:
        return None
    *form, head_written = events
    pipe = _FlightPipe(*form, flight.generated, flight.grow_at)
    pipe.flight, pipe.head_written = flight, head_written
    return pipe


if COMPILED:

    class _FlightPipe(_steps.Pipe):  # type: ignore[misc]  # its module may be missing
        """What isn't plain goes to the flight itself."""

        __slots__ = ("flight", "head_written")
        flight: Flight
        head_written: Callable[[], None]

        def on_delta(self, delta: worker_pb2.StepDelta) -> None:
            self.flight.on_delta(delta)

        def on_lost(self, error: RankwayError) -> None:
            self.flight.on_lost(error)

        def on_grow(self) -> None:
            self.flight.grow()

        def on_first(self, cached_tokens: int) -> None:
            self.head_written()
            self.flight.on_first(cached_tokens if cached_tokens >= 0 else None)

        def on_end(self, reason: types_pb2.FinishReason.ValueType) -> None:
            self.flight.on_end(reason)
