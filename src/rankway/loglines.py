"""What `rankway up` makes of its children's log lines: one readable line each, with the child's name before it. Pure."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

_RESET = "\x1b[0m"
_DIM = "\x1b[2m"
_LEVEL_COLOURS = {"debug": _DIM, "info": "\x1b[32m", "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
_NAME_COLOURS = ("\x1b[36m", "\x1b[35m", "\x1b[34m", "\x1b[96m", "\x1b[95m", "\x1b[94m")
_NATS_LINE = re.compile(r"\[\d+\] \S+ (?P<time>[\d:]{8}\.\d{3})\d* \[(?P<level>[A-Z]{3})\] ?(?P<text>.*)")
_NATS_LEVELS = {"TRC": "debug", "DBG": "debug", "INF": "debug", "WRN": "warning", "ERR": "error", "FTL": "error"}
"""nats-server's info lines are its start-up banner: of interest only to somebody who debugs."""
_ORDER = ("debug", "info", "warning", "error", "critical")
_OWN_KEYS = frozenset({"event", "level", "timestamp", "service", "component", "exception"})


class LineFormat:
    """How lines of all children are shown.

    Args:
        names: the children's names, for a prefix of one width.
        level: lines below it are left out (the services filter themselves; this is for nats-server).
        colour: whether to use terminal colours.
        as_json: pass JSON lines on, with a key `process`, instead of making text of them.
    """

    def __init__(self, names: tuple[str, ...], *, level: str, colour: bool, as_json: bool) -> None:
        self._width = max(map(len, names), default=0)
        self._least = _ORDER.index(level)
        self._colour = colour
        self._as_json = as_json

    def render(self, name: str, line: str) -> str | None:
        """One line as it is shown, or None if it isn't."""
        record = _parse(line)
        level = str(record.get("level", "info"))
        if level in _ORDER and _ORDER.index(level) < self._least:
            return None
        if self._as_json:
            return json.dumps({"process": name, **record}, ensure_ascii=False)
        # What a service starts with is long and the same at each start: it is one level less interesting here.
        if record["event"] == "settings" and self._least > 0:
            return None
        return self.prefix(name) + self._text(level, record)

    def prefix(self, name: str) -> str:
        """What stands before each line of a child."""
        text = f"{name:<{self._width}} | "
        return f"{_NAME_COLOURS[zlib.crc32(name.encode()) % len(_NAME_COLOURS)]}{text}{_RESET}" if self._colour else text

    def _text(self, level: str, record: Mapping[str, Any]) -> str:
        if "level" not in record:  # not one of ours: as it came
            return str(record["event"])
        clock = str(record.get("timestamp", ""))[11:23].rstrip("Z")
        fields = "".join(f" {key}={_value(value)}" for key, value in record.items() if key not in _OWN_KEYS)
        exception = "".join(f"\n    {line}" for line in _exception(record.get("exception")))
        if not self._colour:
            return f"{clock:<12} {level:<7} {record['event']}{fields}{exception}"
        colour = _LEVEL_COLOURS.get(level, "")
        return f"{_DIM}{clock:<12}{_RESET} {colour}{level:<7}{_RESET} {record['event']}{_DIM}{fields}{_RESET}{exception}"


def _parse(line: str) -> dict[str, Any]:
    """The fields of a structured line, of one of nats-server's, or of any other (then only `event`)."""
    if line.startswith("{"):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and "event" in record:
            return record
    nats = _NATS_LINE.match(line)
    if nats:
        return {"event": nats["text"], "level": _NATS_LEVELS.get(nats["level"], "info"), "timestamp": f"{'':11}{nats['time']}"}
    return {"event": line}


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) and (not text or " " in text) else text


def _exception(traceback: object) -> list[str]:
    """A structured traceback as lines: where, then what."""
    if not isinstance(traceback, list):
        return str(traceback).splitlines() if traceback else []
    lines = []
    for part in traceback:
        lines += [f"{frame.get('filename')}:{frame.get('lineno')} in {frame.get('name')}" for frame in part.get("frames", ())]
        lines.append(f"{part.get('exc_type')}: {part.get('exc_value')}")
    return lines
