"""The follower: what it does when an indexer misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rankway import rpc
from rankway.indexer import client
from rankway.indexer.client import Follower, RankKnown, Update, ViewBegin, ViewLost, ViewReady
from rankway.v1 import indexer_pb2, indexer_pb2_grpc

Answers = list[indexer_pb2.FollowResponse | None]

BEGIN = indexer_pb2.FollowBegin(indexer_id="scripted")
STATE = indexer_pb2.RankState(worker_id="w", epoch=1, dp_rank=0, known=True, dp_group="g")
READY = indexer_pb2.FollowReady()


def response(position: int, **event: Any) -> indexer_pb2.FollowResponse:
    return indexer_pb2.FollowResponse(position=position, **event)


GOOD: Answers = [response(1, begin=BEGIN), response(2, state=STATE), response(3, ready=READY), None]


class ScriptedIndexer(indexer_pb2_grpc.IndexerServicer):
    """Answers each Follow with the next script; None at a script's end keeps the stream open."""

    def __init__(self, *scripts: Answers) -> None:
        self.scripts = list(scripts)
        self.requests: list[indexer_pb2.FollowRequest] = []
        self.server = rpc.Server(["rankway.v1.Indexer"])
        indexer_pb2_grpc.add_IndexerServicer_to_server(self, self.server.grpc)

    async def Follow(self, request: indexer_pb2.FollowRequest, context: Any) -> AsyncIterator[indexer_pb2.FollowResponse]:  # type: ignore[override]
        self.requests.append(request)
        await context.send_initial_metadata(())
        for answer in self.scripts.pop(0):
            if answer is None:
                await asyncio.Event().wait()
            else:
                yield answer


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Any]]:
    servers = []

    async def start(*scripts: Answers) -> tuple[ScriptedIndexer, str]:
        indexer = ScriptedIndexer(*scripts)
        servers.append(indexer.server)
        return indexer, f"127.0.0.1:{await indexer.server.start('127.0.0.1:0')}"

    yield start
    for server in servers:
        await server.stop(0)


async def read_until_ready(follower: Follower, views: int = 1) -> list[Update]:
    """Updates up to the `views`th ViewReady."""
    updates: list[Update] = []
    async for update in follower:
        updates.append(update)
        views -= isinstance(update, ViewReady)
        if not views:
            break
    return updates


async def test_updates_are_typed_and_the_request_names_the_follower(serve: Callable[..., Any]) -> None:
    """A stream's messages come as typed updates; group and follower id go with the request."""
    indexer, endpoint = await serve(GOOD)
    updates = await read_until_ready(Follower([endpoint], "g", "me"))
    assert list(map(type, updates)) == [ViewBegin, RankKnown, ViewReady]
    assert (indexer.requests[0].dp_group, indexer.requests[0].follower_id) == ("g", "me")


@pytest.mark.parametrize(
    "bad",
    [
        response(3, state=STATE),
        response(2),
        response(2, blocks=indexer_pb2.RankBlocks(worker_id="w", block_hashes=b"123")),
        response(2, batch={"worker_id": "w", "seq": 0}),
        indexer_pb2.FollowResponse(several=indexer_pb2.Several(responses=[response(2, state=STATE), response(2, state=STATE)])),
    ],
    ids=["hole", "unknown kind", "half a hash", "no seq", "repeated position"],
)
async def test_a_stream_that_is_not_right_is_followed_afresh(serve: Callable[..., Any], bad: indexer_pb2.FollowResponse) -> None:
    """A hole in the positions, or a message that can't be read, ends the view; a new one begins."""
    indexer, endpoint = await serve([response(1, begin=BEGIN), bad, None], GOOD)
    updates = await read_until_ready(Follower([endpoint]))
    views = [type(update) for update in updates if isinstance(update, ViewBegin | ViewLost | ViewReady)]
    assert views == [ViewBegin, ViewLost, ViewBegin, ViewReady]
    assert len(indexer.requests) == 2


async def test_an_indexer_that_says_nothing_is_left(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a first message in time the follower goes to the next indexer."""
    monkeypatch.setattr(client, "FIRST_MESSAGE_TIMEOUT_S", 0.2)
    _, silent = await serve([None])
    _, good = await serve(GOOD)
    follower = Follower([silent, good])
    await read_until_ready(follower)
    assert follower.connects == 1


async def test_a_stream_that_ends_is_followed_afresh(serve: Callable[..., Any]) -> None:
    """Neither a normal end nor an unreachable indexer ends the iteration."""
    _, endpoint = await serve(GOOD[:3], GOOD)
    follower = Follower([endpoint, "127.0.0.1:1"])
    await read_until_ready(follower, views=2)
    assert follower.connects == 2


async def test_restart_leaves_a_view(serve: Callable[..., Any]) -> None:
    """`restart` ends the view at once, whether the consumer works on an update or waits for the next one."""
    _, endpoint = await serve(GOOD, GOOD, GOOD)
    follower = Follower([endpoint])
    ready = asyncio.Event()
    views = 0

    async def follow() -> None:
        nonlocal views
        async for update in follower:
            if isinstance(update, ViewReady):
                views += 1
                if views == 1:
                    follower.restart("while working")
                ready.set()

    task = asyncio.create_task(follow())
    for expected in (2, 3):
        while views < expected:
            await asyncio.wait_for(ready.wait(), 5)
            ready.clear()
            if views == 2:
                await asyncio.sleep(0)
                follower.restart("while waiting")
    assert follower.connected_to == endpoint
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert follower.connected_to == ""


def test_no_endpoints_are_refused() -> None:
    """A follower needs at least one indexer."""
    with pytest.raises(ValueError, match="indexer_endpoints"):
        Follower([])
