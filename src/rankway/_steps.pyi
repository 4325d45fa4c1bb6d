from collections.abc import Callable
from typing import Any

class Pipe:
    chars: int
    grow_at: int
    closed: bool
    def __init__(
        self,
        socket: tuple[Callable[[bytes], None], Callable[[], bool], Callable[[], int], int],
        before: bytes,
        after: bytes,
        chunked: bool,
        generated: bytearray,
        chars: int,
        grow_at: int,
    ) -> None: ...

def dispatch(receivers: dict[int, Any], decode: Callable[[bytes], Any], message: bytes) -> None: ...
def dispatch_frames(receivers: dict[int, Any], decode: Callable[[bytes], Any], data: bytes) -> int: ...
