"""The short way of a delta does what the long one does: same events, same counts, whatever a worker sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rankway.ranks import GlobalRank, Target
from rankway.router import steps
from rankway.router.attach_wire import BidiCall
from rankway.router.http_exchange import Exchange
from rankway.router.openai_form import ChatForm, CompletionForm
from rankway.router.openai_sinks import StreamedAnswer
from rankway.router.request import Flight
from rankway.router.requests import Routed, RouterRequest
from rankway.router.targets import Place
from rankway.sampling import Sampling
from rankway.v1 import types_pb2, worker_pb2

pytestmark = pytest.mark.skipif(not steps.COMPILED, reason="no compiled part: there is only the long way")


class FakeConnection:
    """Keeps what is written."""

    class state:  # noqa: N801  # an attribute of the connection
        date_header = b""
        draining = False

    def __init__(self) -> None:
        self.data = b""
        self.writes = 0
        self.socket = steps.Socket(self.write, lambda: False, lambda: 0, -1)

    def write(self, data: bytes) -> None:
        self.data += data
        self.writes += 1

    def answered(self, exchange: Any) -> None:
        pass


class Owner:
    """A flight's dispatcher that only counts."""

    def __init__(self) -> None:
        self.grown_to: list[int] = []
        self.answers: list[int | None] = []

    def answered(self, flight: Any, cached_tokens: int | None = None) -> None:
        self.answers.append(cached_tokens)

    def grown(self, booking: Any, blocks: int) -> None:
        self.grown_to.append(blocks)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: None


class Link:
    """Receivers by stream."""

    def __init__(self) -> None:
        self.receivers: dict[int, Any] = {}

    def hand_over(self, stream: int, receiver: Any) -> None:
        self.receivers[stream] = receiver

    def forget(self, stream: int) -> None:
        self.receivers.pop(stream, None)

    abort = forget


class Decision:
    block_size = 4
    place = Place(Target("w", GlobalRank(0)), 1)


class Client:
    """One streaming request at a link."""

    def __init__(self, form: type[ChatForm | CompletionForm], *, http10: bool, short: bool) -> None:
        self.connection = FakeConnection()
        exchange = Exchange(self.connection, "POST", b"/", {}, b"", http10=http10)  # type: ignore[arg-type]
        sink = StreamedAnswer(
            exchange,
            form("r", "m", 1, 1, False),
            "r",
            Owner(),  # type: ignore[arg-type]
            include_usage=False,
            logprobs=False,
            n=1,
        )
        if not short:
            sink.__class__ = type("Long", (StreamedAnswer,), {"__slots__": (), "plain_events": lambda self: None})
        self.owner = Owner()
        self.flight = Flight(self.owner, RouterRequest("r", "m", b"\0" * 8, Sampling(max_tokens=9)), sink, 0.0)  # type: ignore[arg-type]
        self.flight.link, self.flight.stream = Link(), 5  # type: ignore[assignment]
        self.flight.stage = type(self.flight.stage).SENT
        self.flight.decision, self.flight.booking = Decision(), object()  # type: ignore[assignment]
        self.flight._set_growth(4)
        sink.routed(Routed(Target("w", GlobalRank(0)), 0, 0.0))
        self.receivers = self.flight.link.receivers  # type: ignore[union-attr]
        self.receivers[5] = self.flight
        self.flight._open_pipe()

    def take(self, messages: list[worker_pb2.AttachResponse], *, short: bool) -> None:
        for message in messages:
            if short:
                steps.dispatch(message.SerializeToString(), self.receivers)
            else:
                for delta in message.step.deltas:
                    if delta.stream in self.receivers:
                        self.receivers[delta.stream].on_delta(delta)

    def seen(self) -> tuple[Any, ...]:
        flight = self.flight
        chars = flight.chars + (flight.pipe.chars if flight.pipe is not None else 0)
        head, _, body = self.connection.data.partition(b"\r\n\r\n")
        counts = bytes(flight.generated), chars, self.owner.grown_to, self.owner.answers
        return head, _body(body), *counts, flight.stage, flight.reasons, flight.cached_tokens

    def text(self) -> str:
        body = _body(self.connection.data.partition(b"\r\n\r\n")[2])
        events = [json.loads(line.removeprefix(b"data: ")) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
        return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


def _body(data: bytes) -> bytes:
    """What is written after the head, without the framing of chunks."""
    if b"\r\n" not in data:
        return data
    body = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        body += rest[: int(size, 16)]
        data = rest[int(size, 16) + 2 :]
    return body


EXAMPLES = int(os.environ.get("STEPS_EXAMPLES", "100"))
"""The sanitizers make each of them slow."""

HARD_TEXTS = ["\u2028", "\u0085", '"\\', "\x00\n", "é🙂"]


@st.composite
def deltas(draw: st.DrawFn) -> worker_pb2.StepDelta:
    delta = worker_pb2.StepDelta(
        stream=draw(st.sampled_from([5, 5, 5, 6])),
        tokens=b"abcd" * draw(st.integers(0, 3)) + draw(st.sampled_from([b"", b"", b"", b"", b"ab"])),
        text=draw(st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(HARD_TEXTS)),
    )
    match draw(st.integers(0, 20)):
        case 0:
            delta.finish_reason = types_pb2.FINISH_REASON_STOP
        case 1:
            delta.cached_tokens = 3
        case 2:
            delta.logprobs.add(token_id=1, logprob=-1.0)
        case 3:
            delta.index = 0
    return delta


messages = st.lists(
    st.lists(deltas(), max_size=5).map(lambda found: worker_pb2.AttachResponse(step=worker_pb2.Step(deltas=found))), max_size=5
)


@settings(max_examples=EXAMPLES)
@given(messages, st.sampled_from([ChatForm, CompletionForm]), st.booleans())
@example([], ChatForm, False)
def test_both_ways_lead_to_the_same(
    messages: list[worker_pb2.AttachResponse], form: type[ChatForm | CompletionForm], http10: bool
) -> None:
    """Whatever deltas come, the client gets the same bytes and the flight counts the same tokens, characters and blocks."""
    short, long = (Client(form, http10=http10, short=is_short) for is_short in (True, False))
    short.take(messages, short=True)
    long.take(messages, short=False)
    assert short.seen() == long.seen()


def test_what_one_message_brings_leaves_in_one_write() -> None:
    """Many deltas of a stream in one message are as many events and one write."""
    client = Client(ChatForm, http10=False, short=True)
    first = worker_pb2.StepDelta(stream=5, tokens=b"abcd", text="a", cached_tokens=0)
    rest = [worker_pb2.StepDelta(stream=5, tokens=b"abcd", text=text) for text in "bcdefg"]
    client.take([worker_pb2.AttachResponse(step=worker_pb2.Step(deltas=[first]))], short=True)
    client.take([worker_pb2.AttachResponse(step=worker_pb2.Step(deltas=rest))], short=True)
    assert client.connection.writes == 2
    assert client.text() == "abcdefg"


def test_the_last_token_does_not_wait_for_the_end() -> None:
    """A stream's first write is its head with the first token; the last token leaves before what its end brings."""
    client = Client(ChatForm, http10=False, short=True)
    deltas = [worker_pb2.StepDelta(stream=5, tokens=b"abcd", text=text) for text in "abc"]
    deltas[-1].finish_reason = types_pb2.FINISH_REASON_LENGTH
    seen = []
    for delta in deltas:
        client.take([worker_pb2.AttachResponse(step=worker_pb2.Step(deltas=[delta]))], short=True)
        seen.append(client.connection.writes)
    assert seen == [1, 2, 4]
    assert client.connection.data.startswith(b"HTTP/1.1 200 OK")
    assert client.text() == "abc"
    assert client.flight.pipe is None
    assert not client.receivers


@settings(max_examples=EXAMPLES)
@given(st.binary(max_size=60))
def test_garbage_is_refused(data: bytes) -> None:
    """Bytes that are no AttachResponse raise, or dispatch what they mean; nothing else happens."""
    client = Client(ChatForm, http10=False, short=True)
    first = worker_pb2.StepDelta(stream=5, tokens=b"abcd", text="a", cached_tokens=0)
    client.take([worker_pb2.AttachResponse(step=worker_pb2.Step(deltas=[first]))], short=True)
    with contextlib.suppress(*steps.MALFORMED):
        steps.dispatch(data, client.receivers)


@pytest.mark.parametrize("data", ["12030aff0112001200", "0800120205", "99808080100000000000000000"])
def test_a_step_that_breaks_off_is_refused(data: str) -> None:
    """A part that ends too early is malformed whatever follows it, and so is a field number beyond all: with protobuf, too."""
    for refuses in (worker_pb2.AttachResponse.FromString, lambda data: steps.dispatch(data, {})):
        with pytest.raises(steps.MALFORMED):
            refuses(bytes.fromhex(data))


class Heard:
    """A receiver that keeps what it hears."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_delta(self, delta: worker_pb2.StepDelta) -> None:
        self.texts.append(delta.text)


def frame(kind: int, payload: bytes, flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + (1).to_bytes(4, "big") + payload


@st.composite
def framed_messages(draw: st.DrawFn) -> tuple[list[str], list[bytes]]:
    """Texts, and what brings them: messages in one frame or two, window updates and padding between them, cut anywhere."""
    texts, data = draw(st.lists(st.text("ab", min_size=1, max_size=3), max_size=8)), b""
    for text in texts:
        body = _message(text)
        message = b"\0" + len(body).to_bytes(4, "big") + body
        cut = draw(st.just(len(message)) | st.integers(0, len(message)))
        parts = [message[:cut], message[cut:]] if cut < len(message) else [message]
        for part in parts:
            data += frame(0, part) + draw(st.sampled_from([b"", b"", frame(8, b"\0\0\1\0"), frame(0, b"\2\0\0", 8)]))
    ends = sorted(draw(st.lists(st.integers(0, len(data)), max_size=6)))
    return texts, [data[begin:end] for begin, end in zip([0, *ends], [*ends, len(data)], strict=True)]


@settings(max_examples=EXAMPLES, deadline=None)
@given(framed_messages())
def test_frames_come_whole_however_they_are_cut(given: tuple[list[str], list[bytes]]) -> None:
    """A socket may cut the stream anywhere, other frames may stand between: each message is dispatched once, in order."""
    texts, reads = given
    heard = Heard()

    async def receive() -> None:
        receivers = {5: heard}
        call = BidiCall("/x", "x", lambda message: steps.dispatch(message, receivers))
        call._transport = FakeTransport()  # type: ignore[assignment]
        call.short_way = steps.frame_dispatcher(receivers)
        for data in reads:
            if data:
                call.data_received(data)
        assert not call.ended.done()

    asyncio.run(receive())
    assert heard.texts == texts


def lone_pipe(transport: asyncio.Transport, generated: bytearray) -> Any:
    """A pipe without a flight."""
    kind = type("Lone", (steps._steps.Pipe,), {"on_first": lambda self, cached_tokens: None})
    return kind(steps.Socket.of(transport), False, b"HEAD", b"FIRST", b"<", b">", generated, 2**40)


async def test_a_socket_that_is_full_gets_the_rest_later() -> None:
    """What the socket doesn't take at once goes the transport's way, and nothing overtakes it."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    generated = bytearray()
    pipe = lone_pipe(transport, generated)
    texts = ["".join(random.Random(number).choices("abc", k=300)) for number in range(400)]

    def read() -> bytes:
        data = b""
        while not data.endswith(b"END"):
            data += theirs.recv(50_000)
        return data

    for text in texts[:300]:
        steps.dispatch(_message(text), {5: pipe})
    assert transport.get_write_buffer_size() > 0
    reading = asyncio.create_task(asyncio.to_thread(read))
    for text in texts[300:]:
        steps.dispatch(_message(text), {5: pipe})
        await asyncio.sleep(0)
    transport.write(b"END")
    received = await asyncio.wait_for(reading, 10)
    assert received == b"HEADFIRST" + "".join(f'<"{text}">' for text in texts).encode() + b"END"
    assert len(generated) == 4 * len(texts)
    transport.close()
    theirs.close()


async def test_a_closing_transport_gets_nothing_through_its_socket() -> None:
    """Once a transport closes, its descriptor may become another connection's: no byte goes there by itself."""
    ours, theirs = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    pipe = lone_pipe(transport, bytearray())
    transport.abort()
    steps.dispatch(_message("lost"), {5: pipe})
    theirs.settimeout(5)
    assert await asyncio.to_thread(theirs.recv, 100) == b""
    theirs.close()


def _message(text: str) -> bytes:
    delta = worker_pb2.StepDelta(stream=5, tokens=b"abcd", text=text)
    return worker_pb2.AttachResponse(step=worker_pb2.Step(deltas=[delta])).SerializeToString()


class FakeTransport:
    """Takes everything."""

    def write(self, data: bytes) -> None:
        pass


def test_text_that_is_no_utf8() -> None:
    """Text that isn't UTF-8 is malformed: protobuf says the same."""
    client = Client(ChatForm, http10=False, short=True)
    first = worker_pb2.StepDelta(stream=5, tokens=b"abcd", text="a", cached_tokens=0)
    client.take([worker_pb2.AttachResponse(step=worker_pb2.Step(deltas=[first]))], short=True)
    good = worker_pb2.AttachResponse(step=worker_pb2.Step(deltas=[worker_pb2.StepDelta(stream=5, text="éé")]))
    for bad in (b"\xff", b"\xc3", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"):
        broken = good.SerializeToString().replace("éé".encode(), bad.ljust(4, b"a"))
        with pytest.raises(steps.MALFORMED):
            steps.dispatch(broken, client.receivers)
