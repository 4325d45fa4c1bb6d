"""Clients that leave, don't read, or send prompts that take long: nobody else notices, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from harness.front_door import Client, House, Running, open_house
from harness.models import byte_level_bpe
from harness.waiting import eventually

from rankway.errors import Unavailable
from rankway.router.http_exchange import HttpLimits
from rankway.tokenizer import Tokenizer

PATH = "/v1/completions"
LONG = "x" * 100_000  # longer than what the byte-level tokenizer does at once


class HeldTokenizer:
    """The byte-level tokenizer, whose long encodings wait for `release`."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.released = threading.Event()
        self._real = Tokenizer.byte_level()
        self.fingerprint = "held"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        if len(text) > self._real.quick_chars:
            self.started.set()
            assert self.released.wait(20)
        return self._real.encode(text, add_special_tokens)


async def started(house: House, *, stream: bool = True, prompt: str = "hi") -> Client:
    client = await house.connect()
    await client.send_request("POST", PATH, json.dumps({"prompt": prompt, "stream": stream}).encode())
    return client


async def nothing_left(house: House) -> None:
    """All counts are back to 0 within 2 s."""
    await eventually(lambda: house.door.stats.active == 0 and not house.door.server.state.connections, 2)
    await eventually(lambda: not house.door.server.state.tasks, 2)


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("stage", ["dispatched", "routed", "streaming", "whole"])
async def test_client_leaves(house: House, stage: str, how: str) -> None:
    """A client that leaves while its request waits, prefills or decodes cancels it at once, streamed or not."""
    client = await started(house, stream=stage != "whole")
    running = await house.dispatcher.next()
    if stage in ("routed", "streaming", "whole"):
        running.route()
    if stage in ("streaming", "whole"):
        running.say("x")
    getattr(client, how)()
    await asyncio.wait_for(running.cancelled.wait(), 2)
    await nothing_left(house)
    assert house.door.stats.answers["client_left"] == 1


async def test_client_leaves_after_the_end(house: House) -> None:
    """A request that has ended is not cancelled when its connection closes."""
    client = await started(house)
    running = await house.dispatcher.next()
    running.route().end()
    await client.answer()
    client.close()
    await nothing_left(house)
    assert not running.cancelled.is_set()


async def test_client_leaves_in_mid_request(house: House) -> None:
    """A request that never arrived whole is forgotten."""
    client = await house.connect()
    await client.send(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\n\r\n{")
    client.abort()
    await nothing_left(house)
    assert house.dispatcher.seen == []


async def test_pipelined_requests_of_a_client_that_leaves(house: House) -> None:
    """Requests that wait behind a running one are dropped with it."""
    client = await started(house)
    running = await house.dispatcher.next()
    await client.send_request("POST", PATH, b'{"prompt":"again"}')
    await client.send_request("GET", "/health")
    await eventually(lambda: len(next(iter(house.door.server.state.connections))._waiting) == 2)
    client.abort()
    await asyncio.wait_for(running.cancelled.wait(), 2)
    await nothing_left(house)
    assert len(house.dispatcher.seen) == 1


async def test_slow_reader() -> None:
    """A client that doesn't read its stream is cut off when the buffer is full, and its request cancelled; others go on."""
    async with open_house(http=HttpLimits(write_buffer_bytes=100_000)) as house:
        slow, other = await started(house), await started(house)
        stuck, fine = await house.dispatcher.next(), await house.dispatcher.next()
        stuck.route()
        fine.route()
        while not stuck.cancelled.is_set():
            stuck.say("x" * 10_000)
            await asyncio.sleep(0)
        assert house.door.server.state.slow_readers == 1
        fine.say("fine").end()
        assert b"fine" in (await other.answer()).body
        slow.abort()
        other.close()
        await nothing_left(house)


async def test_client_that_reads_nothing_of_the_end() -> None:
    """A finished answer that nobody reads doesn't keep its connection for ever."""
    limits = HttpLimits(idle_timeout_s=0.1, write_timeout_s=0.1)
    async with open_house(script=lambda running: running.route().say("x" * 8_000_000).end(), http=limits) as house:
        await started(house, stream=False)
        await eventually(lambda: house.door.server.state.accepted == 1)
        await nothing_left(house)


async def test_long_prompt() -> None:
    """While a 5 MB prompt is being tokenised, other requests begin, stream and end, and /health answers."""
    held = HeldTokenizer()
    async with open_house(tokenizer=held, max_model_len=10**7) as house:  # type: ignore[arg-type]
        streaming = await started(house)
        running = await house.dispatcher.next()
        running.route().say("zero")
        await streaming.head()
        assert b"zero" in await streaming.chunk()
        patient = await started(house, prompt="y" * 5_000_000)
        await asyncio.to_thread(held.started.wait, 10)
        assert house.intake.threads.stats.waiting == 1
        for word in ("one", "two"):
            running.say(word)
            assert word.encode() in await streaming.chunk()
        assert (await house.get("/health")).status == 200
        newcomer = await started(house, stream=False)
        (await house.dispatcher.next()).route().say("new").end()
        assert (await newcomer.answer()).json["choices"][0]["text"] == "new"
        running.end()
        assert "[DONE]" in (await streaming.answer_of_open_stream())
        assert len(house.dispatcher.seen) == 2
        held.released.set()
        last = await house.dispatcher.next()
        assert last.request.prompt_tokens == 5_000_000
        last.route().end()
        assert (await patient.answer()).status == 200


async def test_client_leaves_while_its_prompt_is_tokenised() -> None:
    """A request whose client leaves while it is tokenised is never dispatched."""
    held = HeldTokenizer()
    async with open_house(tokenizer=held, max_model_len=10**7) as house:  # type: ignore[arg-type]
        client = await started(house, prompt=LONG)
        await asyncio.to_thread(held.started.wait, 10)
        assert house.door.stats.active == 1
        client.abort()
        await nothing_left(house)
        held.released.set()
        await eventually(lambda: house.intake.threads.stats.waiting == 0)
        assert house.dispatcher.seen == []


async def test_long_prompt_is_refused() -> None:
    """A long prompt that proves too long for the model is a 400 like a short one, and counts as nothing."""
    async with open_house(max_model_len=1000) as house:
        answer = await house.post(PATH, {"prompt": LONG})
        assert (answer.status, answer.error["param"]) == (400, "prompt")
        assert "100000 tokens" in answer.error["message"]
        await nothing_left(house)


async def test_tokenizer_from_a_worker() -> None:
    """A tokenizer that isn't here is fetched once, from a worker, by all requests that want it."""
    files = byte_level_bpe()
    tokenizer = Tokenizer.from_files(files)
    asked: list[str] = []
    give = asyncio.Event()

    async def fetch(fingerprint: str) -> Mapping[str, bytes]:
        asked.append(fingerprint)
        await give.wait()
        return files

    async with open_house(script=lambda running: running.route().end(), fetch=fetch) as house:
        house.fleet.tokenizer, house.fleet.vocab_size = tokenizer.fingerprint, tokenizer.vocab_size
        clients = [await started(house, stream=False, prompt="the dog") for _ in range(3)]
        await eventually(lambda: asked)
        await eventually(lambda: house.door.stats.active == 3)
        give.set()
        assert [(await client.answer()).status for client in clients] == [200] * 3
        assert asked == [tokenizer.fingerprint]
        prompts = {running.request.prompt for running in house.dispatcher.seen}
        assert prompts == {tokenizer.encode("the dog").tobytes()}


async def test_no_worker_gives_the_tokenizer() -> None:
    """A tokenizer that can't be had, or is another one than announced, is a 503; the next request tries again."""
    answers: list[Mapping[str, bytes] | Exception] = [Unavailable("w1 is gone"), byte_level_bpe(), {"tokenizer.json": b"{"}]

    async def fetch(fingerprint: str) -> Mapping[str, bytes]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with open_house(fetch=fetch) as house:
        house.fleet.tokenizer = "0123"
        for expected in ("w1 is gone", "the workers gave the tokenizer", "can't be used"):
            answer = await house.post(PATH, {"prompt": "hi"})
            assert answer.status == 503
            assert expected in answer.error["message"]


async def test_model_without_a_tokenizer(house: House) -> None:
    """A model that is served by token ids only takes them, and refuses text by name."""
    house.fleet.tokenizer = ""
    refused = await house.post(PATH, {"prompt": "hi"})
    assert (refused.status, refused.error["code"]) == (400, "unsupported_parameter")
    client = await house.connect()
    await client.send_request("POST", PATH, b'{"prompt":[104]}')
    (await house.dispatcher.next()).route().end()
    assert (await client.answer()).status == 200


async def test_many_clients_that_come_and_go(house: House) -> None:
    """Of a crowd some leave, some are served: every request is either cancelled or ended, and nothing is left."""

    async def visit(number: int) -> None:
        client = await started(house, stream=number % 2 == 0, prompt=str(number))
        if number % 3 == 0:
            client.abort()
        else:
            assert (await client.answer()).status == 200
            client.close()

    async def serve() -> None:
        while True:
            running: Running = await house.dispatcher.next()
            if not running.cancelled.is_set():
                running.route()
            await asyncio.sleep(0)
            if not running.cancelled.is_set():
                running.say("x").end()

    serving = asyncio.create_task(serve())
    await asyncio.gather(*(visit(number) for number in range(60)))
    await nothing_left(house)
    serving.cancel()
