"""Settings: frozen dataclasses whose fields are command-line options and environment variables.

Only a service's `__main__` reads argv and the environment; everything else is handed its settings.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from rankway.errors import RankwayError

S = TypeVar("S")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage of thirty options would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help explains the options)\n")


def option(help: str, default: Any = dataclasses.MISSING, *, unit: str = "", choices: Sequence[str] = ()) -> Any:
    """A dataclass field that is also `--name` and RANKWAY_NAME; a field without a default must be given."""
    return dataclasses.field(default=default, metadata={"help": help, "unit": unit, "choices": tuple(choices)})


def parse(settings: type[S], argv: Sequence[str], environ: Mapping[str, str], *, prog: str, description: str) -> S:
    """Settings from options, then environment variables, then defaults. Exits with status 2 and one line on a bad value.

    A field of type tuple[str, ...] takes a comma-separated list; a bool makes --name and --no-name.
    """
    parser = _Parser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        _add_option(parser, field, hints[field.name], environ)
    values = vars(parser.parse_args(argv))
    try:
        return settings(**values)
    except (ValueError, RankwayError) as error:
        parser.error(str(error))


def check_listen(name: str, value: str) -> str:
    """Return `value` if it is host:port with a port of 0 … 65535.

    Raises:
        ValueError: otherwise; the message names the setting.
    """
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{name}={value!r}: must be host:port, the port 0 … 65535")
    return value


def effective(settings: object) -> dict[str, Any]:
    """The settings as a dict for the start-up log line."""
    return dataclasses.asdict(settings)  # type: ignore[call-overload, no-any-return]


def to_argv(settings: object) -> list[str]:
    """Options that `parse` turns back into equal settings: how one process starts another."""
    argv = []
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, field.name)
        name = field.name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        else:
            argv.append(f"--{name}={','.join(value) if isinstance(value, tuple) else value}")
    return argv


def _add_option(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any, environ: Mapping[str, str]) -> None:
    variable = f"RANKWAY_{field.name.upper()}"
    kind = _plain_type(hint)
    required = field.default is dataclasses.MISSING and variable not in environ
    default = environ.get(variable, field.default)
    unit = f" [{field.metadata['unit']}]" if field.metadata.get("unit") else ""
    shown = "" if field.default in (dataclasses.MISSING, None, "", ()) else f" (default: {field.default})"
    help_text = f"{field.metadata['help']}{unit}{shown} (${variable})".replace("%", "%%")
    flag = f"--{field.name.replace('_', '-')}"
    if kind is bool:
        if isinstance(default, str):
            default = default.lower() in ("1", "true", "yes", "on")
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=help_text)
        return
    parser.add_argument(
        flag,
        type=_comma_list if kind is tuple else kind,
        default=None if default is dataclasses.MISSING else default,
        required=required,
        choices=field.metadata.get("choices") or None,
        metavar=None if field.metadata.get("choices") else kind.__name__.upper().replace("TUPLE", "A,B"),
        help=help_text,
    )


def _plain_type(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    return typing.get_origin(hint) or hint


def _comma_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
