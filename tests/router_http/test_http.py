"""HTTP/1.1 as such: framing, limits, malformed requests, draining."""

from __future__ import annotations

import asyncio
import json

import pytest
from harness.front_door import House, Running, echo, open_house
from harness.waiting import eventually

from rankway.router.http_connection import MAX_PIPELINED
from rankway.router.http_exchange import HttpLimits

PATH = "/v1/completions"
BODY = b'{"prompt":"hi"}'
STREAM = b'{"prompt":"hi","stream":true}'


def post(body: bytes, *lines: str, path: str = PATH, version: str = "1.1") -> bytes:
    head = [f"POST {path} HTTP/{version}", "host: test", f"content-length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


async def test_keep_alive(echo_house: House) -> None:
    """A connection serves one request after the other, errors included."""
    client = await echo_house.connect()
    for body, status in ((BODY, 200), (b"{", 400), (STREAM, 200), (b'{"prompt":"hi","n":0}', 400), (BODY, 200)):
        await client.send(post(body))
        assert (await client.answer()).status == status


async def test_connection_close(echo_house: House) -> None:
    """A client that asks for it gets `connection: close` and the close."""
    for body in (BODY, STREAM):
        client = await echo_house.connect()
        await client.send(post(body, "connection: close"))
        answer = await client.answer()
        assert answer.headers["connection"] == "close"
        assert await client.closed() == b""


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_http_1_0(echo_house: House, body: bytes) -> None:
    """An HTTP/1.0 client gets no chunks: the end of the connection is the end of the answer."""
    client = await echo_house.connect()
    await client.send(post(body, version="1.0"))
    answer = await client.answer()
    assert answer.status == 200
    assert "transfer-encoding" not in answer.headers
    assert b"lo" in answer.body
    assert await client.closed() == b""


async def test_pipelining(house: House) -> None:
    """Pipelined requests are answered in their order, however they end."""
    client = await house.connect()
    await client.send(post(STREAM) + post(b"{") + b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n" + post(BODY))
    first = await house.dispatcher.next()
    first.route().say("one").end()
    second = await house.dispatcher.next()
    second.route().say("two").end()
    answers = [await client.answer() for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 400, 200, 200]
    assert b"one" in answers[0].body
    assert answers[3].json["choices"][0]["text"] == "two"


async def test_too_many_pipelined(house: House) -> None:
    """A client that pipelines without end is cut off, and its running request cancelled."""
    client = await house.connect()
    await client.send(post(BODY) * (MAX_PIPELINED + 2))
    running = await house.dispatcher.next()
    await asyncio.wait_for(running.cancelled.wait(), 5)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await client.head()


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_split_anywhere(echo_house: House, size: int) -> None:
    """A request may arrive in pieces of any size."""
    client = await echo_house.connect()
    data = post(BODY, "x-rankway-dp-rank: 3")
    for at in range(0, len(data), size):
        await client.send(data[at : at + size])
        await asyncio.sleep(0)
    assert (await client.answer()).status == 200
    assert echo_house.dispatcher.seen[0].request.dp_rank == 3


async def test_chunked_request(echo_house: House) -> None:
    """A request's body may be chunked."""
    client = await echo_house.connect()
    head = f"POST {PATH} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    await client.send(head + b'5;x=y\r\n{"pro\r\na\r\nmpt":"hi"}\r\n0\r\ntrailer: x\r\n\r\n')
    assert (await client.answer()).status == 200


async def test_expect_continue(echo_house: House) -> None:
    """A client that asks before it sends its body is told to go on, or refused before it has sent anything."""
    client = await echo_house.connect()
    head = f"POST {PATH} HTTP/1.1\r\nhost: t\r\nexpect: 100-continue\r\ncontent-length: "
    await client.send(f"{head}{len(BODY)}\r\n\r\n".encode())
    assert (await client.head())[0] == 100
    await client.send(BODY)
    assert (await client.answer()).status == 200
    await client.send(f"{head}{2**40}\r\n\r\n".encode())
    assert (await client.answer()).status == 413


async def test_body_limit() -> None:
    """A body beyond the limit is a 413 naming the limit, whether its length is announced or not; the next request is fine."""
    async with open_house(script=echo, http=HttpLimits(body_bytes=1000)) as house:
        announced = await house.post(PATH, b"x" * 1001)
        assert (announced.status, announced.error["code"]) == (413, "request_too_large")
        assert "1000" in announced.error["message"]
        client = await house.connect()
        await client.send(f"POST {PATH} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        await client.send(b"258\r\n" + b"x" * 600 + b"\r\n" + b"258\r\n" + b"x" * 600 + b"\r\n")
        assert (await client.answer()).status == 413
        assert await client.closed() == b""
        assert (await house.post(PATH, BODY)).status == 200


async def test_answer_to_a_body_that_is_still_coming() -> None:
    """A 413 reaches the client although it goes on sending for a while."""
    async with open_house(http=HttpLimits(body_bytes=1000)) as house:
        client = await house.connect()
        await client.send(post(b"x" * 4_000_000))
        assert (await client.answer()).status == 413


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n" + b"x-a: b\r\n" * 10_000,
        b"GET /health HTTP/1.1\r\nx-long: " + b"x" * 100_000,
        b"GET /" + b"x" * 100_000,
        b"GET /health HTTP/1.1\r\n" + b"y" * 100_000,
    ],
    ids=["many", "long", "target", "name"],
)
async def test_head_limit(echo_house: House, head: bytes) -> None:
    """A head beyond the limit is a 431, also one that never ends."""
    client = await echo_house.connect()
    for at in range(0, len(head), 1000):
        if client.reader.at_eof():
            break
        await client.send(head[at : at + 1000])
    assert (await client.answer()).status == 431
    assert (await echo_house.get("/health")).status == 200


async def test_head_limit_in_one_piece(echo_house: House) -> None:
    """A head beyond the limit is a 431 also when it comes all at once and nothing follows."""
    client = await echo_house.connect()
    await client.send(b"GET /health HTTP/1.1\r\nx-long: " + b"x" * 100_000)
    assert (await client.answer()).status == 431


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\na\x00b: c\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked, identity\r\n\r\n",
    ],
)
async def test_malformed(echo_house: House, data: bytes) -> None:
    """What is no HTTP is a 400 with an error object, and the connection closes."""
    client = await echo_house.connect()
    await client.send(data)
    answer = await client.answer()
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert await client.closed() == b""
    assert (await echo_house.get("/health")).status == 200


async def test_garbage_behind_a_running_request(house: House) -> None:
    """A request under way is still answered when garbage follows it; then the connection closes."""
    client = await house.connect()
    await client.send(post(STREAM))
    running = await house.dispatcher.next()
    running.route().say("one")
    await client.send(b"\x00\x01garbage\r\n\r\n")
    await eventually(lambda: house.door.server.state.malformed == 1)
    running.say("two").end()
    answer = await client.answer()
    assert b"two" in answer.body
    assert await client.closed() == b""


async def test_upgrade_is_ignored(echo_house: House) -> None:
    """A client that offers another protocol is answered in HTTP/1.1, and the connection stays."""
    client = await echo_house.connect()
    for _ in range(2):
        await client.send(post(BODY, "connection: Upgrade, HTTP2-Settings", "upgrade: h2c"))
        assert (await client.answer()).status == 200


async def test_connect(echo_house: House) -> None:
    """CONNECT is a 405."""
    client = await echo_house.connect()
    await client.send(b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n")
    assert (await client.answer()).status == 405


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat/completions/", "/v1/embeddings", "/%2e%2e/x", "/v2/models"])
async def test_unknown_path(echo_house: House, path: str) -> None:
    """An unknown path is a 404 with an error object."""
    answer = await echo_house.get(path)
    assert (answer.status, answer.error["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", PATH, "POST"),
        ("HEAD", PATH, "POST"),
        ("PUT", PATH, "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models/tiny", "GET"),
        ("OPTIONS", "/health", "GET"),
    ],
)
async def test_wrong_method(echo_house: House, method: str, path: str, allow: str) -> None:
    """A wrong method is a 405 that says which is right."""
    answer = await echo_house.request(method, path)
    assert answer.status == 405
    assert answer.headers["allow"] == allow


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/tiny", "/metrics", "/nope"])
async def test_head(echo_house: House, path: str) -> None:
    """HEAD has the head of GET and no body."""
    client = await echo_house.connect()
    await client.send_request("HEAD", path)
    head = await client.answer(head_only=True)
    await client.send_request("GET", path)
    whole = await client.answer()
    assert head.status == whole.status
    assert head.headers["content-type"] == whole.headers["content-type"]


async def test_query_is_ignored(echo_house: House) -> None:
    """A query string doesn't hide the path."""
    assert (await echo_house.get("/health?verbose=1")).json == {"status": "ok"}


async def test_models(echo_house: House) -> None:
    """/v1/models lists names, aliases and adapters; one is found by its name; an unknown one is a 404."""
    listed = (await echo_house.get("/v1/models")).json
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny", "small", "tiny-lora"]
    assert [model["parent"] for model in listed["data"]] == [None, None, "tiny"]
    assert (await echo_house.get("/v1/models/tiny%2Dlora")).json == listed["data"][2]
    assert (await echo_house.get("/v1/models/none")).status == 404


async def test_ready(echo_house: House) -> None:
    """/ready tells the truth and the reason; /health only that the process lives."""
    assert (await echo_house.get("/ready")).status == 200
    echo_house.fleet.windows = {}
    answer = await echo_house.get("/ready")
    assert (answer.status, answer.json["reason"]) == (503, "no worker")
    assert (await echo_house.get("/health")).status == 200


async def test_metrics(echo_house: House) -> None:
    """/metrics shows the front door's own series."""
    await echo_house.post(PATH, BODY)
    await echo_house.post(PATH, b"{")
    answer = await echo_house.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    for line in (
        'rankway_router_http_answers_total{status="200"} 1.0',
        'rankway_router_http_answers_total{status="400"} 1.0',
        "rankway_router_http_active_requests 0.0",
        "rankway_router_tokenize_waiting 0.0",
    ):
        assert line in answer.body.decode().splitlines()


async def test_tokenize(echo_house: House) -> None:
    """/tokenize and /detokenize are each other's inverse; messages go through the chat template."""
    answer = (await echo_house.post("/tokenize", {"model": "tiny", "prompt": "hi€"})).json
    assert answer == {"count": 5, "max_model_len": 4096, "tokens": [104, 105, 226, 130, 172]}
    assert (await echo_house.post("/detokenize", {"tokens": answer["tokens"]})).json == {"prompt": "hi€"}
    chat = (await echo_house.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})).json
    assert bytes(chat["tokens"]) == b"<|user|>\nhi\n<|assistant|>\n"
    assert (await echo_house.post("/tokenize", {"prompt": ""})).json["count"] == 0
    assert (await echo_house.post("/detokenize", {"tokens": []})).json == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "none"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "extra": 1}, 400, "extra"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [512]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "none"}, 404, "model"),
    ],
)
async def test_tokenize_refuses(echo_house: House, path: str, body: object, status: int, param: str) -> None:
    """What they can't do they refuse, naming the field."""
    answer = await echo_house.post(path, body)
    assert (answer.status, answer.error["param"]) == (status, param)


async def test_slow_request() -> None:
    """A request that doesn't arrive in time is a 408; an idle connection is closed without a word."""
    limits = HttpLimits(header_timeout_s=0.1, body_timeout_s=0.1, idle_timeout_s=0.1)
    async with open_house(script=echo, http=limits) as house:
        silent, half_head, half_body, idle = [await house.connect() for _ in range(4)]
        await half_head.send(b"POST / HTTP/1.1\r\nhos")
        await half_body.send(b"POST / HTTP/1.1\r\ncontent-length: 5\r\n\r\nab")
        await idle.send(post(BODY))
        assert (await idle.answer()).status == 200
        assert await silent.closed() == b""
        assert (await half_head.answer()).status == 408
        assert (await half_body.answer()).status == 408
        assert await idle.closed() == b""


async def test_most_connections() -> None:
    """A connection beyond the limit is told so and closed; when one goes there is room again."""
    async with open_house(script=echo, http=HttpLimits(connections=1)) as house:
        first = await house.connect()
        await first.send(post(BODY))
        assert (await first.answer()).status == 200
        second = await house.connect()
        assert (await second.answer()).status == 503
        first.close()
        second.close()
        await eventually(lambda: not house.door.server.state.connections)
        assert (await house.post(PATH, BODY)).status == 200


async def test_drain(house: House) -> None:
    """A drain lets running answers end, closes idle connections and accepts nothing new; /ready says no meanwhile."""
    idle, busy, other = [await house.connect() for _ in range(3)]
    await idle.send(b"GET /health HTTP/1.1\r\n\r\n")
    await idle.answer()
    await busy.send(post(STREAM))
    running = await house.dispatcher.next()
    running.route().say("one")
    await other.send(post(BODY) + b"GET /ready HTTP/1.1\r\n\r\n")
    waiting = await house.dispatcher.next()
    draining = asyncio.ensure_future(house.door.server.drain(10))
    assert await idle.closed() == b""
    with pytest.raises(OSError, match=r"refused|failed"):
        await house.connect()
    waiting.route().end()
    answer = await other.answer()
    assert answer.headers["connection"] == "close"
    running.say("two").end()
    assert b"two" in (await busy.answer()).body
    await asyncio.wait_for(draining, 5)
    assert not house.door.server.state.connections


async def test_stop_cuts_what_is_left(house: House) -> None:
    """What hasn't ended when the grace is over is cancelled and its connection cut."""
    client = await house.connect()
    await client.send(post(STREAM))
    running = await house.dispatcher.next()
    running.route()
    await house.door.stop(0)
    assert running.cancelled.is_set()
    assert house.door.stats.active == 0
    assert not house.door.server.state.tasks


async def test_failing_handler(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of ours is a 500 without details, and the server lives."""
    monkeypatch.setattr(house.door, "_not_ready", lambda: 1 / 0)
    answer = await house.get("/ready")
    assert (answer.status, answer.error["message"]) == (500, "internal error")
    assert (await house.get("/health")).status == 200


async def test_address_in_use(echo_house: House) -> None:
    """An address that can't be had is an OSError that names it."""
    async with open_house() as other:
        await other.door.server.stop(0)
        with pytest.raises(OSError, match=echo_house.address):
            await other.door.start(echo_house.address)


async def test_large_answer_to_a_slow_client() -> None:
    """A whole answer larger than the write buffer reaches a client that reads it late."""

    def answer(running: Running) -> None:
        running.route().say("x" * 3_000_000).end()

    async with open_house(script=answer) as house:
        client = await house.connect()
        await client.send(post(BODY) * 2)
        await eventually(lambda: house.dispatcher.seen)
        for _ in range(2):
            assert len(json.loads((await client.answer()).body)["choices"][0]["text"]) == 3_000_000
