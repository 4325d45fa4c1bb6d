from collections.abc import Callable
from typing import Any

class Pipe:
    chars: int
    grow_at: int
    closed: bool
    def __init__(
        self,
        write: Callable[[bytes], None],
        before: bytes,
        after: bytes,
        chunked: bool,
        generated: bytearray,
        chars: int,
        grow_at: int,
    ) -> None: ...

def dispatch(message: bytes, receivers: dict[int, Any], decode: Callable[[bytes], Any]) -> None: ...
