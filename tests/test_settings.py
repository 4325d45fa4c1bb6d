"""Settings: options, then environment, then defaults; and one process's settings as another's options."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankway import settings
from rankway.settings import option


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    name: str = option("a name")
    port: int = option("a port", 80)
    ratio: float = option("a ratio", 0.5, unit="blocks")
    flag: bool = option("a flag", False)
    peers: tuple[str, ...] = option("some peers", ())
    level: str = option("a level", "info", choices=("debug", "info"))
    limit: int | None = option("a limit", None)

    def __post_init__(self) -> None:
        if self.port < 0:
            raise ValueError(f"port={self.port}: must not be negative")


def parse(*argv: str, **environ: str) -> Example:
    return settings.parse(Example, argv, environ, prog="example", description="An example")


def test_defaults() -> None:
    """What isn't given has its default."""
    assert parse("--name", "n") == Example(name="n")


def test_options_before_environment_before_defaults() -> None:
    """An option wins over its environment variable, which wins over the default."""
    environ = {"RANKWAY_NAME": "env", "RANKWAY_PORT": "1", "RANKWAY_FLAG": "true", "RANKWAY_PEERS": "a:1, b:2"}
    given_settings = parse("--port", "2", **environ)
    assert given_settings == Example(name="env", port=2, flag=True, peers=("a:1", "b:2"))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--name"),
        (["--name", "n", "--port", "x"], "--port"),
        (["--name", "n", "--port", "-1"], "port=-1: must not be negative"),
        (["--name", "n", "--level", "loud"], "--level"),
        (["--name", "n", "--nope"], "--nope"),
        (["--name", "n", "--lev", "info"], "--lev"),
    ],
)
def test_a_bad_option(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad option ends with status 2 and a line that names it; abbreviations aren't taken."""
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_bad_environment_variable(capsys: pytest.CaptureFixture[str]) -> None:
    """A bad value from the environment is refused like one from an option."""
    with pytest.raises(SystemExit):
        parse("--name", "n", RANKWAY_PORT="many")
    assert "--port" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """--help explains every option with its unit, its default and its environment variable."""
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "a ratio [blocks] (default: 0.5) ($RANKWAY_RATIO)" in text


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=20)


@given(
    st.builds(
        Example,
        name=words,
        port=st.integers(0, 2**40),
        ratio=st.floats(allow_nan=False, allow_infinity=False),
        flag=st.booleans(),
        peers=st.lists(st.text("abc:123", min_size=1), max_size=3).map(tuple),
        level=st.sampled_from(["debug", "info"]),
        limit=st.none() | st.integers(0, 100),
    )
)
def test_as_options(given_settings: Example) -> None:
    """Settings turned into options and parsed again are equal, whatever the environment says."""
    argv = settings.to_argv(given_settings)
    assert parse(*argv, RANKWAY_PORT="7", RANKWAY_FLAG="1" if not given_settings.flag else "0") == given_settings
