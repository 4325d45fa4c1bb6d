"""Where a request shall run, who asks, and what the answer's headers tell."""

from __future__ import annotations

from typing import Any

import pytest
from harness.front_door import House, open_house

from rankway.router.limits import RateLimit
from rankway.router.requests import RouterRequest

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "hi"}


async def placed(house: House, body: dict[str, Any], headers: dict[str, str]) -> RouterRequest:
    answer = await house.post(PATH, BODY | body, headers)
    assert answer.status == 200, answer.body
    return house.dispatcher.seen[-1].request


async def test_headers(echo_house: House) -> None:
    """Worker, global rank and session may be given as headers; rank 0 is a rank."""
    headers = {"X-Rankway-Worker-Id": "w1", "x-rankway-dp-rank": "0", "x-rankway-session-id": "s"}
    request = await placed(echo_house, {}, headers)
    assert (request.worker_id, request.dp_rank, request.session_id) == ("w1", 0, "s")


async def test_body(echo_house: House) -> None:
    """They may be given in the body's `rankway` field; absent means any."""
    request = await placed(echo_house, {"rankway": {"worker_id": "w2", "dp_rank": 7, "session_id": "s"}}, {})
    assert (request.worker_id, request.dp_rank, request.session_id) == ("w2", 7, "s")
    request = await placed(echo_house, {}, {})
    assert (request.worker_id, request.dp_rank, request.session_id) == ("", None, "")


async def test_agreement(echo_house: House) -> None:
    """Header and body may say the same; different things are a 400."""
    request = await placed(echo_house, {"rankway": {"dp_rank": 3, "worker_id": "w1"}}, {"x-rankway-dp-rank": "3"})
    assert request.dp_rank == 3
    for header, value in (("x-rankway-dp-rank", "4"), ("x-rankway-worker-id", "w2"), ("x-rankway-session-id", "t")):
        body = BODY | {"rankway": {"dp_rank": 3, "worker_id": "w1", "session_id": "s"}}
        answer = await echo_house.post(PATH, body, {header: value})
        assert answer.status == 400
        assert "contradicts" in answer.error["message"]


@pytest.mark.parametrize("rank", ["8", "-1", "two", "1.5", "", "99999999999999999999", "0x1", "٣"])
async def test_no_rank_in_header(echo_house: House, rank: str) -> None:
    """A header that is no rank of the group is a 400 that names the ranks there are."""
    await check_no_rank(echo_house, BODY, {"x-rankway-dp-rank": rank.encode().decode("latin-1")}, "[0, 8)")


@pytest.mark.parametrize("rank", [8, -1, "two", "3", 1.5, True, 10**30, [], {}])
async def test_no_rank_in_body(echo_house: House, rank: object) -> None:
    """So is a value in the body, numbers as text included."""
    await check_no_rank(echo_house, BODY | {"rankway": {"dp_rank": rank}}, {}, "[0, 8)")


async def test_rank_of_another_worker(echo_house: House) -> None:
    """A rank outside the pinned worker's window is a 400 that names the window."""
    await check_no_rank(
        echo_house, BODY, {"x-rankway-worker-id": "w2", "x-rankway-dp-rank": "3"}, "worker w2 owns the global ranks [4, 8)"
    )


async def check_no_rank(house: House, body: dict[str, Any], headers: dict[str, str], ranks: str) -> None:
    answer = await house.post(PATH, body, headers)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == "dp_rank"
    assert answer.error["code"] == "rank_out_of_range"
    assert ranks in answer.error["message"]
    assert house.dispatcher.seen == []


async def test_unknown_worker(echo_house: House) -> None:
    """A worker that isn't there is a 404; a name that can't be one is a 400."""
    assert (await echo_house.post(PATH, BODY, {"x-rankway-worker-id": "w9"})).status == 404
    assert (await echo_house.post(PATH, BODY, {"x-rankway-worker-id": "w.9"})).status == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_headers(house: House, stream: bool) -> None:
    """The answer's headers tell worker, rank, overlap and request id, streamed or not."""
    client = await house.connect()
    await client.send_request(
        "POST", PATH, b'{"prompt":"hi","stream":%b}' % (b"true" if stream else b"false"), {"x-request-id": "r-1"}
    )
    running = await house.dispatcher.next()
    assert running.request.request_id == "r-1"
    running.route("w2", 6, overlap_blocks=12).say("x").end()
    answer = await client.answer()
    client.close()
    shown = {name.removeprefix("x-rankway-"): value for name, value in answer.headers.items() if name.startswith("x-")}
    assert shown == {"worker-id": "w2", "dp-rank": "6", "overlap-blocks": "12", "x-request-id": "r-1"}


async def test_request_ids(echo_house: House) -> None:
    """A request without an id is given one, different each time; an id that could break a header is refused."""
    first, second = await echo_house.post(PATH, BODY), await echo_house.post(PATH, BODY)
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert first.json["id"] == f"cmpl-{first.headers['x-request-id']}"
    for bad in ("a b", "x" * 129, "ä"):
        assert (await echo_house.post(PATH, BODY, {"x-request-id": bad})).error["param"] == "x-request-id"


async def test_request_id_of_a_refusal(echo_house: House) -> None:
    """A refused request's id comes back too."""
    answer = await echo_house.post(PATH, BODY | {"n": 0}, {"x-request-id": "r-2"})
    assert answer.headers["x-request-id"] == "r-2"


async def test_tenants(echo_house: House) -> None:
    """The tenant is the header, else a name made from the API key (never the key itself), else the user."""
    assert (await placed(echo_house, {"user": "u"}, {"x-rankway-tenant": "t", "authorization": "Bearer k"})).tenant == "t"
    keyed = (await placed(echo_house, {"user": "u"}, {"authorization": "Bearer secret"})).tenant
    assert keyed.startswith("key-")
    assert "secret" not in keyed
    assert (await placed(echo_house, {"user": "u"}, {})).tenant == "u"
    assert (await placed(echo_house, {}, {})).tenant == ""


async def test_rate_limit() -> None:
    """A tenant beyond its rate gets 429 with Retry-After; another one doesn't."""
    async with open_house(script=lambda running: running.route().end(), rate_limit=RateLimit(0.1, 2)) as house:
        statuses = [(await house.post(PATH, BODY, {"x-rankway-tenant": "a"})).status for _ in range(3)]
        assert statuses == [200, 200, 429]
        refused = await house.post(PATH, BODY, {"x-rankway-tenant": "a"})
        assert 1 <= int(refused.headers["retry-after"]) <= 10
        assert refused.error["code"] == "rate_limit_exceeded"
        assert (await house.post(PATH, BODY, {"x-rankway-tenant": "b"})).status == 200


async def test_most_requests() -> None:
    """Beyond `max_requests` at once a request gets 429 and is not dispatched; when one ends there is room again."""
    async with open_house(max_requests=1) as house:
        client = await house.connect()
        await client.send_request("POST", PATH, b'{"prompt":"hi"}')
        running = await house.dispatcher.next()
        refused = await house.post(PATH, BODY)
        assert refused.status == 429
        assert refused.headers["retry-after"] == "1"
        running.route().end()
        assert (await client.answer()).status == 200
        await client.send_request("POST", PATH, b'{"prompt":"hi"}')
        (await house.dispatcher.next()).route().end()
        assert (await client.answer()).status == 200
        client.close()
