"""Output text: whole characters, stop strings, min_tokens, resumed streams."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rankway.tokenizer import Tokenizer
from rankway.worker.text import OutputText

BYTES = Tokenizer.byte_level()


def run(text: OutputText, *chunks: Sequence[int]) -> tuple[str, int, bool]:
    """(all text shown, tokens that count, stopped) after these chunks and the end."""
    shown, count = "", 0
    for chunk in chunks:
        piece, used, stopped = text.push(chunk)
        shown += piece
        count += used
        if stopped:
            return shown, count, True
    return shown + text.finish(), count, False


def output(stop: Sequence[str] = (), min_tokens: int = 0, delivered: int = 0) -> OutputText:
    return OutputText(BYTES.stream(), stop, min_tokens, delivered)


def test_characters_are_shown_whole() -> None:
    """A character that is split over tokens appears with its last one; an unfinished one at the end never does."""
    text = output()
    assert [text.push([byte])[0] for byte in "é€".encode()] == ["", "é", "", "", "€"]
    assert text.push("é".encode()[:1])[0] == ""
    assert text.finish() == ""


def test_a_stop_string_is_cut_with_all_after_it() -> None:
    """The stop string isn't shown; its token counts, later ones of the same step don't."""
    assert run(output(["lo w"]), b"hello world") == ("hel", 7, True)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    """Text that may be the start of a stop string waits until it isn't."""
    text = output(["abc"])
    assert text.push(b"xab") == ("x", 3, False)
    assert text.push(b"d") == ("abd", 1, False)
    assert text.push(b"a") == ("", 1, False)
    assert text.finish() == "a"


def test_the_first_completed_stop_string_wins() -> None:
    """Of several the one that is complete earliest ends the text, of those that end together the longest."""
    assert run(output(["cd", "bc"]), b"abcd") == ("a", 3, True)
    assert run(output(["c", "abc"]), b"xabc") == ("x", 4, True)


def test_stop_strings_wait_for_min_tokens() -> None:
    """A stop string completed within the first min_tokens is text like any other; one completed after them counts."""
    assert run(output(["b"], min_tokens=4), b"abcdefbg") == ("abcdef", 7, True)
    assert run(output(["cd"], min_tokens=3), b"abcde") == ("ab", 4, True)
    assert run(output(["cd"], min_tokens=4), b"abcde") == ("abcde", 5, False)


def test_delivered_characters_are_not_shown_again() -> None:
    """A resumed stream shows what the tokens so far left undelivered, then goes on."""
    text = output(["xyz"], delivered=4)
    assert text.push(b"hello x")[0] == "o "
    assert text.push(b"a")[0] == "xa"


_TEXTS = st.text(alphabet="ab€é", max_size=30)
_STOPS = st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=4)


def chunked(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def naive(text: str, stops: Sequence[str], min_tokens: int) -> str:
    """The rule, read character by character: `min_tokens` counts bytes here, one token each."""
    for end in range(1, len(text) + 1):
        if len(text[:end].encode()) > min_tokens:
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found:
                return text[: end - max(map(len, found))]
    return text


@given(_TEXTS, _STOPS, st.integers(0, 20), st.lists(st.integers(0, 200), max_size=8))
def test_text_does_not_depend_on_the_grouping_of_tokens(text: str, stops: list[str], min_tokens: int, cuts: list[int]) -> None:
    """However the tokens are grouped, text and number of tokens are the same, and the text is what the rule says."""
    data = text.encode()
    whole = run(output(stops, min_tokens), data)
    assert run(output(stops, min_tokens), *chunked(data, cuts)) == whole
    assert run(output(stops, min_tokens), *(data[i : i + 1] for i in range(len(data)))) == whole
    assert whole[0] == naive(text, stops, min_tokens)


@given(_TEXTS, _STOPS, st.integers(0, 20))
def test_nothing_shown_is_ever_taken_back(text: str, stops: list[str], min_tokens: int) -> None:
    """At every point what has been shown is a prefix of the final text: no part of a stop string appears."""
    data = text.encode()
    final = naive(text, stops, min_tokens)
    stream = output(stops, min_tokens)
    shown = ""
    for byte in data:
        piece, _, stopped = stream.push([byte])
        shown += piece
        assert final.startswith(shown)
        if stopped:
            return


@given(_TEXTS, _STOPS, st.integers(0, 20), st.integers(0, 60))
def test_a_resumed_stream_shows_exactly_the_rest(text: str, stops: list[str], min_tokens: int, cut: int) -> None:
    """The text up to a cut and the text of a stream resumed there are together the whole text."""
    data = text.encode()
    cut = min(cut, len(data))
    first = output(stops, min_tokens)
    shown, _, stopped = first.push(data[:cut])
    if stopped:
        return
    rest = output(stops, min_tokens, delivered=len(shown))
    assert shown + run(rest, data[:cut], data[cut:])[0] == naive(text, stops, min_tokens)
