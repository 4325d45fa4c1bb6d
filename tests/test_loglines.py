"""Rules of how children's log lines are shown."""

from __future__ import annotations

import json

import pytest

from rankway.loglines import LineFormat

LINE = json.dumps(
    {"worker_id": "w1", "text": "two words", "service": "router", "event": "Selected worker", "level": "info"}
    | {"timestamp": "2026-01-02T03:04:05.678901Z", "component": "policy"}
)


def fmt(level: str = "info", *, colour: bool = False, as_json: bool = False) -> LineFormat:
    return LineFormat(("router", "worker-0"), level=level, colour=colour, as_json=as_json)


def test_structured_line_is_readable() -> None:
    """Name, time, level, what happened, then its fields; text with spaces in quotes."""
    shown = fmt().render("router", LINE)
    assert shown == 'router   | 03:04:05.678 info    Selected worker worker_id=w1 text="two words"'


def test_colours_only_when_asked() -> None:
    """A terminal gets colours, a file none."""
    assert "\x1b[" in (fmt(colour=True).render("router", LINE) or "")
    assert "\x1b[" not in (fmt().render("router", LINE) or "")


def test_json_keeps_every_field() -> None:
    """JSON lines pass with the child's name added."""
    assert json.loads(fmt(as_json=True).render("router", LINE) or "") == {"process": "router", **json.loads(LINE)}


@pytest.mark.parametrize("line", ["plain text", "{not json", '{"no": "event"}', "[1, 2]", ""])
def test_any_other_line_is_shown_as_it_came(line: str) -> None:
    """What is no structured line loses nothing."""
    assert fmt().render("worker-0", line) == f"worker-0 | {line}"


def test_nats_banner_is_for_debugging() -> None:
    """nats-server's info is debug here; its warnings are warnings."""
    assert fmt().render("worker-0", "[12] 2026/12/01 03:36:36.385931 [INF] Starting") is None
    assert fmt("debug").render("worker-0", "[12] 2026/12/01 03:36:36.385931 [INF] Up") == "worker-0 | 03:36:36.385 debug   Up"
    assert fmt().render("worker-0", "[12] 2026/12/01 03:36:36.385931 [WRN] Slow") == "worker-0 | 03:36:36.385 warning Slow"


def test_settings_are_shown_at_debug() -> None:
    """The long line that every service starts with doesn't bury the table."""
    line = json.dumps({"event": "settings", "level": "info"})
    assert fmt().render("router", line) is None
    assert fmt("debug").render("router", line) is not None
    assert fmt(as_json=True).render("router", line) is not None


def test_traceback_becomes_lines() -> None:
    """A structured traceback is shown frame by frame, the error last."""
    frames = [{"filename": "a.py", "lineno": 7, "name": "f"}]
    line = json.dumps(
        {"event": "failed", "level": "error", "exception": [{"exc_type": "OSError", "exc_value": "gone", "frames": frames}]}
    )
    assert (fmt().render("router", line) or "").splitlines()[1:] == ["    a.py:7 in f", "    OSError: gone"]
