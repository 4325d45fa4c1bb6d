"""The router's gRPC API, over real gRPC, in front of scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from harness.fake_worker import LENGTH, STOP, FakeWorker, Seen
from harness.fleet import a_record
from harness.router import TestRouter
from harness.router import a_request as dispatched
from harness.waiting import eventually

from rankway import rpc
from rankway.blocks import pack_tokens, unpack_tokens
from rankway.indexer.client import ViewBegin, ViewLost, ViewReady
from rankway.router.grpc_generation import StreamSink
from rankway.v1 import generate_pb2, generate_pb2_grpc, router_pb2, router_pb2_grpc, types_pb2, worker_pb2

Workers = tuple[FakeWorker, FakeWorker]


class Client:
    """A client of one router."""

    def __init__(self, channel: grpc.aio.Channel, router: TestRouter) -> None:
        self.router = router
        self.generation = generate_pb2_grpc.GenerationStub(channel)
        self.routing = router_pb2_grpc.RouterStub(channel)

    async def generate(self, **fields: Any) -> list[generate_pb2.GenerateResponse]:
        return [message async for message in self.generation.Generate(a_request(**fields), timeout=5)]

    async def error(self, **fields: Any) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.generate(**fields)
        return raised.value


@pytest.fixture(params=["direct", "grpcio"])
async def client(make_router: Any, two_workers: Workers, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """A client of a router over w1 (ranks 0-3) and w2 (ranks 4-7), on either server."""
    router = await make_router(*two_workers, grpc_server=request.param)
    async with rpc.open_channel(await router.serve()) as channel:
        yield Client(channel, router)


def a_request(prompt: int = 40, *, max_tokens: int = 4, **fields: Any) -> generate_pb2.GenerateRequest:
    if not {"text", "chat", "token_ids"} & fields.keys():
        fields["token_ids"] = types_pb2.TokenIds(ids=range(prompt))
    return generate_pb2.GenerateRequest(sampling=types_pb2.SamplingParams(max_tokens=max_tokens), **fields)


def answer(seen: Seen) -> None:
    """Two deltas and the end."""
    seen.delta([1], cached=16)
    seen.delta([2, 3], finish=STOP)


async def test_a_stream_is_routed_deltas_finished(client: Client, two_workers: Workers) -> None:
    """One Routed, then Deltas, then one Finished with usage."""
    for worker in two_workers:
        worker.on_start = answer
    messages = await client.generate(request_id="mine", dp_rank=5)
    assert messages[0].WhichOneof("event") == "routed"
    routed = messages[0].routed
    assert (routed.request_id, routed.worker_id, routed.dp_rank, routed.prompt_tokens) == ("mine", "w2", 5, 40)
    deltas = [message.delta for message in messages if message.HasField("delta")]
    assert b"".join(delta.token_ids.packed for delta in deltas) == bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])
    assert "".join(delta.text for delta in deltas) == "bcd"
    assert [delta.finish_reason for delta in deltas][-1] == STOP
    finished = messages[-1].finished
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens, finished.usage.cached_tokens) == (40, 3, 16)
    assert (finished.reason, list(finished.reasons), finished.migrations) == (STOP, [STOP], 0)


async def test_routed_names_the_target_that_answers(client: Client, two_workers: Workers) -> None:
    """The first target fails before its first delta: the client hears of the second one only."""
    call = client.generation.Generate(a_request())
    await eventually(lambda: any(worker.seen for worker in two_workers))
    first, other = two_workers if two_workers[0].seen else reversed(two_workers)
    seen = await first.next_start()
    seen.fail(grpc.StatusCode.INTERNAL)  # sets the whole worker aside
    answer(await other.next_start())
    events = [message async for message in call]
    assert [message.WhichOneof("event") for message in events if not message.HasField("delta")] == ["routed", "finished"]
    assert (events[0].routed.worker_id, events[-1].finished.migrations) == (other.record.worker_id, 0)


async def test_an_error_before_the_first_delta_is_a_status_alone(client: Client, two_workers: Workers) -> None:
    """Nothing comes before it, no headers either: clients may retry such a call by themselves."""
    call = client.generation.Generate(a_request(worker_id="w1"))
    seen = await two_workers[0].next_start()
    seen.fail(grpc.StatusCode.INVALID_ARGUMENT, "the engine refuses it")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await eventually(client.router.is_idle)


async def test_every_rank_can_be_pinned(client: Client, two_workers: Workers) -> None:
    """dp_rank 0 … 7 lands exactly there; 0 is a rank."""
    for worker in two_workers:
        worker.on_start = answer
    for rank in range(8):
        routed = (await client.generate(dp_rank=rank))[0].routed
        assert routed.HasField("dp_rank")
        assert (routed.worker_id, routed.dp_rank) == ("w1" if rank < 4 else "w2", rank)
    assert two_workers[0].started.qsize() == two_workers[1].started.qsize() == 4


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"dp_rank": 8}, grpc.StatusCode.OUT_OF_RANGE, ["dp_rank=8", "[0, 8)"]),
        ({"worker_id": "w2", "dp_rank": 3}, grpc.StatusCode.OUT_OF_RANGE, ["dp_rank=3", "w2", "[4, 8)"]),
        ({"worker_id": "w9"}, grpc.StatusCode.NOT_FOUND, ["w9", "w1, w2"]),
        ({"model": "nope"}, grpc.StatusCode.NOT_FOUND, ["nope", "m"]),
        ({"dp_group": "x"}, grpc.StatusCode.NOT_FOUND, ["x", "g"]),
        ({"prompt": 0}, grpc.StatusCode.INVALID_ARGUMENT, ["token_ids"]),
        ({"max_tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT, ["max_tokens=0"]),
        ({"worker_id": "a.b"}, grpc.StatusCode.INVALID_ARGUMENT, ["worker_id", "a.b"]),
    ],
)
async def test_what_is_wrong_is_named_and_nothing_is_booked(
    client: Client, two_workers: Workers, fields: dict[str, Any], code: grpc.StatusCode, words: list[str]
) -> None:
    """Each refusal has its code and names field and value; no worker hears of it."""
    error = await client.error(**fields)
    assert error.code() is code
    assert all(word in (error.details() or "") for word in words)
    assert client.router.is_idle()
    assert two_workers[0].started.empty()
    assert two_workers[1].started.empty()


async def test_every_token_of_a_burst_comes_once(client: Client, two_workers: Workers) -> None:
    """400 deltas in one step arrive whole and in order."""
    for worker in two_workers:
        worker.on_start = lambda seen: seen.burst(range(400), LENGTH)
    messages = await client.generate(max_tokens=400)
    deltas = [message.delta for message in messages if message.HasField("delta")]
    assert list(unpack_tokens(b"".join(delta.token_ids.packed for delta in deltas))) == list(range(400))
    assert sum(len(delta.text) for delta in deltas) == 400
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [LENGTH]


async def test_deltas_that_are_there_already_come_joined() -> None:
    """What has come while grpcio was busy is one message: tokens and text appended, the finish reason of the last."""
    sink = StreamSink(dispatched())
    for token in range(3):
        sink.delta(worker_pb2.StepDelta(tokens=pack_tokens([token]), text=str(token)))
    sink.delta(worker_pb2.StepDelta(tokens=pack_tokens([7]), text="7", finish_reason=STOP))
    sink.delta(worker_pb2.StepDelta(index=1, tokens=pack_tokens([9]), text="9"))
    first, second = [message.delta for message in await sink.take()]
    assert (list(unpack_tokens(first.token_ids.packed)), first.text, first.finish_reason) == ([0, 1, 2, 7], "0127", STOP)
    assert (second.index, second.text) == (1, "9")


async def test_a_client_that_leaves_is_noticed_at_every_stage(client: Client, two_workers: Workers) -> None:
    """Cancelled before the first token or in mid-stream: the engine's request is aborted and nothing stays booked."""
    for after in (0, 1):
        call = client.generation.Generate(a_request(worker_id="w1"))
        seen = await two_workers[0].next_start()
        if after:
            seen.delta([1])
            assert (await call.read()).HasField("routed")
            assert (await call.read()).HasField("delta")
        call.cancel()
        await asyncio.wait_for(seen.aborted.wait(), 2)
        await eventually(client.router.is_idle, 2)
    assert client.router.parts.generation.active == 0


async def test_a_deadline_reaches_the_engine(client: Client, two_workers: Workers) -> None:
    """The call's deadline ends the request on every side."""
    call = client.generation.Generate(a_request(worker_id="w1"), timeout=0.3)
    seen = await two_workers[0].next_start()
    assert 0 < seen.start.timeout_ms <= 300
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        _ = [message async for message in call]
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(seen.aborted.wait(), 2)
    await eventually(client.router.is_idle, 2)


async def test_overload_carries_a_retry_delay(make_router: Any, one_worker: FakeWorker) -> None:
    """RESOURCE_EXHAUSTED comes with google.rpc.RetryInfo."""
    one_worker.record = a_record("w1", 0, 1, data_parallel_size=1, max_num_seqs=1)
    router = await make_router(one_worker, limit_running=1.0, queue_requests=0)
    async with rpc.open_channel(await router.serve()) as channel:
        client = Client(channel, router)
        running = client.generation.Generate(a_request())
        await one_worker.next_start()
        error = await client.error()
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(error)
        retry = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() > 0
        running.cancel()


async def test_route_books_and_is_idempotent_until_released(client: Client) -> None:
    """The same request_id gets the same answer and one booking; Release ends it, twice is harmless."""
    first = await client.routing.Route(router_pb2.RouteRequest(request=a_request(request_id="r")))
    again = await client.routing.Route(router_pb2.RouteRequest(request=a_request(request_id="r")))
    assert first == again
    assert (first.prompt_tokens, first.ttl_ms, first.request_id) == (40, 30_000, "r")
    record = client.router.parts.fleet.records[first.worker_id]
    assert (first.endpoint, first.epoch) == (record.endpoint, record.epoch)
    assert not first.HasField("token_ids")
    assert sum(client.router.parts.ledger.loads.decode_blocks) == 2
    assert (await client.routing.Release(router_pb2.ReleaseRequest(reservation_id=first.reservation_id))).released
    assert client.router.is_idle()
    assert not (await client.routing.Release(router_pb2.ReleaseRequest(reservation_id=first.reservation_id))).released
    assert not (await client.routing.Release(router_pb2.ReleaseRequest(reservation_id="unknown"))).released


async def test_a_reservation_expires_by_itself(client: Client) -> None:
    """After its ttl nothing is booked, and the same request_id is chosen afresh."""
    request = router_pb2.RouteRequest(request=a_request(request_id="r"), ttl_ms=100)
    first = await client.routing.Route(request)
    await eventually(client.router.is_idle)
    assert len(client.router.parts.dispatcher.reservations) == 0
    assert (await client.routing.Route(request)).reservation_id != first.reservation_id


async def test_route_returns_the_token_ids_of_text(client: Client) -> None:
    """A client that gave text sends the worker what the router tokenised."""
    answer = await client.routing.Route(router_pb2.RouteRequest(request=a_request(text="hello")))
    assert list(unpack_tokens(answer.token_ids.packed)) == list(b"hello")
    assert answer.prompt_tokens == 5


async def test_generate_fulfils_a_reservation(client: Client, two_workers: Workers) -> None:
    """Generate with a reservation_id goes to its target on its booking; an ended one is chosen afresh."""
    for worker in two_workers:
        worker.on_start = answer
    for _ in range(4):
        reserved = await client.routing.Route(router_pb2.RouteRequest(request=a_request()))
        routed = (await client.generate(reservation_id=reserved.reservation_id))[0].routed
        assert (routed.worker_id, routed.dp_rank) == (reserved.worker_id, reserved.dp_rank)
        await eventually(client.router.is_idle)
        assert not (await client.routing.Release(router_pb2.ReleaseRequest(reservation_id=reserved.reservation_id))).released
    assert (await client.generate(reservation_id="over"))[-1].HasField("finished")


async def test_explain_names_every_candidate_and_books_nothing(client: Client) -> None:
    """Every target with every term, cheapest first, and why nothing overlaps."""
    response = await client.routing.Explain(router_pb2.ExplainRequest(request=a_request(196)))
    assert len(response.candidates) == 8
    assert {candidate.cost for candidate in response.candidates} == {24.25}
    assert (response.prompt_tokens, response.block_size, response.overlap_weight) == (196, 16, 1.0)
    assert all(candidate.eligible and candidate.decode_blocks == 12.0 for candidate in response.candidates)
    assert any("all overlaps are 0" in remark for remark in response.remarks)
    assert any("index" in remark and "unknown" in remark for remark in response.remarks)
    assert client.router.is_idle()


@pytest.mark.parametrize("policy", ["kv", "round_robin"])
async def test_explain_names_what_would_be_chosen(make_router: Any, two_workers: Workers, policy: str) -> None:
    """Whatever decides, whose turn it is or a session's last target, Explain names what Route then gets, and moves nothing."""
    router = await make_router(*two_workers, policy=policy)
    async with rpc.open_channel(await router.serve()) as channel:
        routing = router_pb2_grpc.RouterStub(channel)
        held = await routing.Route(router_pb2.RouteRequest(request=a_request(dp_rank=6, session_id="s")))
        for session_id in ("s", "", "s", ""):
            if policy == "kv" and not session_id:
                continue  # ties go at random
            request = a_request(session_id=session_id)
            told = [await routing.Explain(router_pb2.ExplainRequest(request=request)) for _ in range(3)]
            got = await routing.Route(router_pb2.RouteRequest(request=request))
            assert {(each.worker_id, each.dp_rank) for each in told} == {(got.worker_id, got.dp_rank)}
            assert any("costs are shown, and don't count" in remark for remark in told[0].remarks) == (policy != "kv")
            if policy == "kv":
                assert got.dp_rank == held.dp_rank
            await routing.Release(router_pb2.ReleaseRequest(reservation_id=got.reservation_id))


async def test_explain_says_why_nobody_is_chosen(make_router: Any, one_worker: FakeWorker) -> None:
    """When every target is above its limits, Explain says so and names none."""
    one_worker.record = a_record("w1", 0, 1, data_parallel_size=1, max_num_seqs=1)
    router = await make_router(one_worker, limit_running=1.0)
    async with rpc.open_channel(await router.serve()) as channel:
        routing = router_pb2_grpc.RouterStub(channel)
        await routing.Route(router_pb2.RouteRequest(request=a_request()))
        told = await routing.Explain(router_pb2.ExplainRequest(request=a_request()))
    assert (told.worker_id, told.HasField("dp_rank"), len(told.candidates)) == ("", False, 1)
    assert any("nobody is chosen now: every target" in remark for remark in told.remarks)


async def test_explain_says_that_the_index_is_old(client: Client) -> None:
    """Without an indexer, and without any load for long, Explain says so instead of looking for the reason in the prompt."""

    async def remarks() -> str:
        return "; ".join((await client.routing.Explain(router_pb2.ExplainRequest(request=a_request(196)))).remarks)

    now = asyncio.get_running_loop().time()
    replica = client.router.parts.replica
    assert "no indexer has been reached so far" in await remarks()
    for update in (ViewBegin("i"), ViewReady()):
        replica.apply(update, now)
    assert "is NATS reachable" in await remarks()
    replica.apply(ViewLost(), now - 7.2)
    assert "no indexer has been reached for 7 s: the index is as it was then" in await remarks()
    assert "differs in its first tokens" not in await remarks()


async def test_explain_says_why_somebody_isnt_eligible(client: Client, two_workers: Workers) -> None:
    """The ineligible come last, each with its reason."""
    await two_workers[0].kill()
    await eventually(lambda: len(client.router.parts.eligibility.all_eligible()) == 4)
    response = await client.routing.Explain(router_pb2.ExplainRequest(request=a_request(dp_rank=5)))
    assert [candidate.eligible for candidate in response.candidates] == [True] + [False] * 7
    assert response.candidates[0].dp_rank == response.dp_rank == 5
    reasons = {(candidate.worker_id, candidate.reason) for candidate in response.candidates}
    assert reasons == {
        ("w2", ""),
        ("w2", "request is pinned to dp_rank 5"),
        ("w1", "request is pinned to dp_rank 5"),
    }
    response = await client.routing.Explain(router_pb2.ExplainRequest(request=a_request()))
    assert {candidate.reason for candidate in response.candidates if candidate.worker_id == "w1"} == {"not connected"}


async def test_explain_remembers_recent_requests(client: Client, two_workers: Workers) -> None:
    """A recent request's decision with the loads of then; an unknown one is NOT_FOUND; neither is INVALID_ARGUMENT."""
    for worker in two_workers:
        worker.on_start = answer
    routed = (await client.generate(prompt=196, request_id="past"))[0].routed
    response = await client.routing.Explain(router_pb2.ExplainRequest(request_id="past"))
    assert (response.worker_id, response.dp_rank, response.prompt_tokens) == (routed.worker_id, routed.dp_rank, 196)
    chosen = next(c for c in response.candidates if (c.worker_id, c.dp_rank) == (routed.worker_id, routed.dp_rank))
    assert (chosen.cost, chosen.queued_prefill_tokens, chosen.decode_blocks) == (24.25, 0, 12.0)
    for request, code in (
        (router_pb2.ExplainRequest(request_id="unheard"), grpc.StatusCode.NOT_FOUND),
        (router_pb2.ExplainRequest(), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.routing.Explain(request)
        assert raised.value.code() is code


async def test_streams_are_bounded(make_router: Any, two_workers: Workers) -> None:
    """Beyond max_requests a stream is refused at once."""
    router = await make_router(*two_workers, max_requests=1)
    async with rpc.open_channel(await router.serve()) as channel:
        client = Client(channel, router)
        running = client.generation.Generate(a_request(worker_id="w1"))
        await two_workers[0].next_start()
        assert (await client.error()).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        running.cancel()
