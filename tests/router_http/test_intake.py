"""Intake: from a draft to a checked request, and the threads behind it."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Mapping

import pytest
from harness.front_door import FakeFleet
from harness.models import byte_level_bpe
from hypothesis import given
from hypothesis import strategies as st

from rankway.errors import InvalidField, Overloaded, Unavailable
from rankway.router.drafts import from_proto
from rankway.router.intake import Draft, Intake, all_below
from rankway.router.tokenizers import LONG_CHARS, MAX_KEPT, EncodingThreads, Tokenizers
from rankway.sampling import Sampling
from rankway.tokenizer import Tokenizer
from rankway.v1 import generate_pb2


async def no_fetch(fingerprint: str) -> Mapping[str, bytes]:
    raise Unavailable(fingerprint)


@pytest.fixture
def intake() -> Intake:
    return Intake(FakeFleet(max_model_len=100), Tokenizers(no_fetch), EncodingThreads(1, 4, 10**6))


@given(
    st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 200_000), max_size=50), st.integers(1, 2**32) | st.integers(1, 200_000)
)
def test_all_below(tokens: list[int], limit: int) -> None:
    """The quick check of packed token ids is `max`."""
    packed = array("I", tokens).tobytes()
    assert all_below(packed, limit) == (max(tokens, default=0) < limit)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2, 512], r"prompt\[2\]=512: token ids are 0 … 511"),
        ([-1], r"prompt\[0\]=-1"),
        ([2**32], r"prompt\[0\]=4294967296"),
        (b"\1\0\0\0\0\2\0\0", r"prompt\[1\]=512"),
        (b"abc", "no multiple of 4"),
        (b"", "must not be empty"),
        ([], "must not be empty"),
    ],
)
def test_token_ids(intake: Intake, tokens: list[int] | bytes, message: str) -> None:
    """Token ids that aren't in the vocabulary are named with their place, whatever their form."""
    with pytest.raises(InvalidField, match=message):
        intake.prepare_now(Draft(Sampling(), tokens=tokens))


def test_default_max_tokens(intake: Intake) -> None:
    """Token and text prompts get 16 tokens, or what fits; chats all that fits."""
    for draft, expected in (
        (Draft(Sampling(), text="hi"), 16),
        (Draft(Sampling(), tokens=[1] * 90), 10),
        (Draft(Sampling(), messages=[{"role": "user", "content": "hi"}]), 100 - 26),
        (Draft(Sampling(max_tokens=98), text="hi"), 98),
    ):
        request = intake.prepare_now(draft)
        assert request is not None
        assert request.sampling.max_tokens == expected


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft(Sampling(), tokens=[1] * 100), "prompt='100 tokens': max_model_len=100"),
        (Draft(Sampling(max_tokens=99), text="hi"), "max_tokens=99: with a prompt of 2 tokens it passes max_model_len=100"),
        (Draft(Sampling(min_tokens=17), text="hi"), "min_tokens=17: must be 0 … max_tokens=16"),
        (Draft(Sampling()), "exactly one prompt"),
        (Draft(Sampling(), text="a", tokens=[1]), "exactly one prompt"),
    ],
)
def test_lengths(intake: Intake, draft: Draft, message: str) -> None:
    """Prompt and output must fit the model; there is exactly one prompt."""
    with pytest.raises(InvalidField, match=message):
        intake.prepare_now(draft)


def test_no_prompt_text_in_errors() -> None:
    """Errors name the prompt's size, not its text."""
    intake = Intake(FakeFleet(max_model_len=10), Tokenizers(no_fetch), EncodingThreads(1, 4, 10**6))
    with pytest.raises(InvalidField) as error:
        intake.prepare_now(Draft(Sampling(), text="a secret text"))
    assert "secret" not in error.value.message


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"chat": {"messages": [{"role": "user", "content": "x"}], "template_kwargs_json": "["}}, "template_kwargs_json"),
        ({"chat": {"messages": [{"role": "user", "content": "x"}], "template_kwargs_json": "[1]"}}, "JSON object"),
        ({"chat": {"messages": [{"role": "user", "content": "x"}], "template_kwargs_json": "[" * 10**5}}, "template_kwargs_json"),
        ({"chat": {}}, "must not be empty"),
        ({"text": ""}, "must not be empty"),
        ({"token_ids": {}}, "must not be empty"),
        ({"token_ids": {"ids": [1], "packed": b"\1\0\0\0"}}, "not both"),
        ({}, "exactly one prompt"),
        ({"text": "x", "sampling": {"temperature": 3}}, "temperature"),
        ({"text": "x", "sampling": {"temperature": float("nan")}}, "temperature"),
        ({"text": "x", "sampling": {"n": 0}}, "n=0"),
        ({"text": "x", "worker_id": "a b"}, "worker_id"),
        ({"text": "x", "request_id": "x" * 129}, "request_id"),
    ],
)
def test_bad_grpc_requests(intake: Intake, request_: dict[str, object], message: str) -> None:
    """What comes over gRPC is checked alike."""
    with pytest.raises(InvalidField, match=message):
        intake.prepare_now(from_proto(generate_pb2.GenerateRequest(**request_)))  # type: ignore[arg-type]


def test_grpc_request(intake: Intake) -> None:
    """Every field of a gRPC request arrives; rank 0 is a rank, absent is none."""
    message = generate_pb2.GenerateRequest(
        request_id="r", text="hi", dp_rank=0, worker_id="w1", dp_group="default", cache_salt="s", priority=-1,
        session_id="c", tenant="t", reservation_id="v",
    )  # fmt: skip
    request = intake.prepare_now(from_proto(message, deadline=5.0))
    assert request is not None
    assert (request.request_id, request.prompt, request.dp_rank, request.worker_id) == ("r", b"h\0\0\0i\0\0\0", 0, "w1")
    assert (request.dp_group, request.cache_salt, request.priority) == ("default", "s", -1)
    assert (request.session_id, request.tenant, request.reservation_id, request.deadline) == ("c", "t", "v", 5.0)
    message.ClearField("dp_rank")
    request = intake.prepare_now(from_proto(message))
    assert request is not None
    assert request.dp_rank is None


async def test_threads_are_bounded() -> None:
    """Beyond the bound in number or characters a text is refused; one alone is taken whatever its length."""
    threads = EncodingThreads(1, max_waiting=2, max_waiting_chars=100)
    hold = threading.Event()

    def work() -> int:
        hold.wait(10)
        return 1

    first = asyncio.ensure_future(threads.run(1000, work))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="1 texts of 1000 characters"):
        await threads.run(1, work)
    hold.set()
    assert await first == 1
    hold.clear()
    waiting = [asyncio.ensure_future(threads.run(10, work)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await threads.run(1, work)
    hold.set()
    assert await asyncio.gather(*waiting) == [1, 1]
    assert (threads.stats.waiting, threads.stats.waiting_chars, threads.stats.refused) == (0, 0, 2)
    threads.close()


async def test_very_long_texts_hold_nobody_up() -> None:
    """While very long texts keep their thread busy, a text of ordinary length is tokenised."""
    threads = EncodingThreads(1, max_waiting=9, max_waiting_chars=10**9)
    hold = threading.Event()
    long = [asyncio.ensure_future(threads.run(LONG_CHARS + 1, lambda: hold.wait(10))) for _ in range(2)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(threads.run(LONG_CHARS, lambda: "done"), 5) == "done"
    hold.set()
    await asyncio.gather(*long)
    threads.close()


async def test_waiting_text_of_a_client_that_left() -> None:
    """A text that waits for a thread is dropped with its request."""
    threads = EncodingThreads(1, max_waiting=9, max_waiting_chars=100)
    hold = threading.Event()
    ran: list[int] = []
    first = asyncio.ensure_future(threads.run(1, lambda: hold.wait(10)))
    second = asyncio.ensure_future(threads.run(1, lambda: ran.append(2)))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    hold.set()
    await first
    assert threads.stats.waiting == 0
    threads.close()
    assert ran == []


async def test_tokenizers_kept() -> None:
    """The byte-level tokenizer is always there; of the others the newest stay."""
    tokenizers = Tokenizers(no_fetch)
    template = byte_level_bpe()
    made = [Tokenizer.from_files(template | {"chat_template.jinja": str(i).encode()}) for i in range(MAX_KEPT + 2)]
    for tokenizer in made:
        tokenizers.add(tokenizer)
    assert tokenizers.ready("bytes") is not None
    assert [tokenizers.ready(tokenizer.fingerprint) is not None for tokenizer in made] == [False] * 2 + [True] * MAX_KEPT


async def test_close_gives_up_fetching() -> None:
    """Closing ends a fetch under way, and the request that waits for it."""
    begun = asyncio.Event()

    async def fetch(fingerprint: str) -> Mapping[str, bytes]:
        begun.set()
        await asyncio.Event().wait()
        return {}

    tokenizers = Tokenizers(fetch)
    waiting = asyncio.ensure_future(tokenizers.get("0123"))
    await begun.wait()
    await tokenizers.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
