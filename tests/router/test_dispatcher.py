"""A request from dispatch to its end, whatever fails on the way, against workers that do what the test says."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from harness.fake_worker import LENGTH, STOP, FakeWorker, Seen, continuation, letter
from harness.fleet import a_record
from harness.waiting import eventually

from rankway.errors import DeadlineExceeded, Overloaded, Unavailable
from rankway.router import dispatcher
from rankway.sampling import Sampling
from rankway.v1 import worker_pb2

Workers = tuple[FakeWorker, FakeWorker]


async def test_a_request_is_sent_booked_and_released(make_router: Any, one_worker: FakeWorker) -> None:
    """Start carries the request, deltas reach the sink, the end releases every booking."""
    router = await make_router(one_worker)
    _, sink = router.send(40, priority=3, cache_salt="s")
    seen = await one_worker.next_start()
    assert list(seen.prompt) == list(range(40))
    assert (seen.start.dp_rank, seen.start.priority, seen.start.cache_salt) == (0, 3, "s")
    assert seen.start.HasField("dp_rank")
    assert router.parts.ledger.loads.prefill_tokens[0] == 40
    assert router.parts.ledger.loads.decode_blocks[0] == 2
    seen.delta([1], cached=32)
    await asyncio.wait_for(sink.first.wait(), 5)
    assert router.parts.ledger.loads.prefill_tokens[0] == 0
    seen.delta([2, 3], finish=STOP)
    await sink.end()
    assert sink.target.target.worker_id == "w1"
    assert list(sink.tokens) == [1, 2, 3]
    assert (sink.outcome.prompt_tokens, sink.outcome.completion_tokens, sink.outcome.cached_tokens) == (40, 3, 32)
    assert sink.outcome.reasons == [STOP]
    assert router.is_idle()


async def test_output_that_fills_a_block_counts_as_one(make_router: Any, one_worker: FakeWorker) -> None:
    """Decode blocks grow with the output: 40 + 24 tokens are 4 full blocks."""
    router = await make_router(one_worker)
    _, sink = router.send(40)
    seen = await one_worker.next_start()
    loads = router.parts.ledger.loads
    for expected, tokens in ((2, 7), (3, 1), (3, 15), (4, 1), (6, 32)):
        seen.delta(list(range(tokens)))
        before = len(sink.tokens)
        await eventually(lambda before=before, tokens=tokens: len(sink.tokens) == before + tokens)
        assert loads.decode_blocks[0] == expected
    seen.delta([1], finish=LENGTH)
    await sink.end()
    assert router.is_idle()


async def test_a_request_of_n_choices_ends_with_the_last(make_router: Any, one_worker: FakeWorker) -> None:
    """Every choice has its reason; usage counts the tokens of all."""
    router = await make_router(one_worker)
    _, sink = router.send(40, n=2)
    seen = await one_worker.next_start()
    seen.delta([1, 2], index=1, finish=STOP)
    seen.delta([3], index=0)
    seen.delta([4], index=0, finish=LENGTH)
    await sink.end()
    assert sink.outcome.reasons == [LENGTH, STOP]
    assert sink.outcome.completion_tokens == 4


async def test_a_worker_that_dies_before_the_first_token_isnt_noticed(make_router: Any, two_workers: Workers) -> None:
    """Another target serves the request, the dead worker is set aside at once, and the client hears of one target only."""
    router = await make_router(*two_workers)
    _, sink = router.send(40)
    first, other = await _where(two_workers)
    await first.kill()
    seen = await other.next_start()
    assert list(seen.prompt) == list(range(40))
    assert not seen.start.resume
    assert not router.parts.eligibility.is_connected(first.record.instance)
    seen.delta([7], finish=STOP, cached=0)
    await sink.end()
    assert list(sink.tokens) == [7]
    assert sink.outcome.migrations == 0
    assert router.parts.dispatcher.counts.retries == 1
    assert router.is_idle()


async def test_a_worker_that_dies_in_mid_stream_is_replaced(make_router: Any, two_workers: Workers) -> None:
    """The next worker gets prompt and output so far; the client sees every token once; usage counts them all."""
    prompt = list(range(40))
    expected = continuation(prompt, 10)
    router = await make_router(*two_workers)
    _, sink = router.send(prompt, max_tokens=10)
    first, other = await _where(two_workers)
    seen = await first.next_start()
    seen.delta(expected[:3], cached=16)
    seen.delta(expected[3:4])
    await eventually(lambda: len(sink.tokens) == 4)
    await first.kill()
    seen = await other.next_start()
    assert list(seen.prompt) == prompt
    assert list(seen.resume) == expected[:4]
    assert seen.start.resume_chars == 4
    assert seen.start.sampling.max_tokens == 10
    seen.delta(expected[4:], finish=LENGTH, cached=32)
    await sink.end()
    assert list(sink.tokens) == expected
    assert sink.text == "".join(map(letter, expected))
    assert (sink.outcome.prompt_tokens, sink.outcome.completion_tokens, sink.outcome.cached_tokens) == (40, 10, 16)
    assert sink.outcome.migrations == 1
    assert router.is_idle()


async def test_fifty_streams_move_without_losing_a_token(make_router: Any, two_workers: Workers) -> None:
    """A worker is killed under 50 concurrent streams: each ends with exactly the tokens that one worker would have given."""
    gate = asyncio.Event()

    def generate(seen: Seen) -> None:
        asyncio.get_running_loop().create_task(_generate(seen, gate))

    for worker in two_workers:
        worker.on_start = generate
    router = await make_router(*two_workers)
    prompts = [list(range(i, i + 20 + i)) for i in range(50)]
    sinks = [router.send(prompt, max_tokens=30)[1] for prompt in prompts]
    await eventually(lambda: sum(len(sink.tokens) >= 5 for sink in sinks) == 50)
    await two_workers[0].kill()
    gate.set()
    for prompt, sink in zip(prompts, sinks, strict=True):
        await sink.end()
        assert sink.error is None
        assert list(sink.tokens) == continuation(prompt, 30)
        assert sink.outcome.completion_tokens == 30
    assert sum(sink.outcome.migrations for sink in sinks) > 0
    assert router.is_idle()


@pytest.mark.parametrize("fields", [{"n": 2}, {"sampling": Sampling(max_tokens=5, guided_json="{}")}])
async def test_what_cant_move_ends_in_a_clear_error(make_router: Any, two_workers: Workers, fields: dict[str, Any]) -> None:
    """n > 1 and guided decoding can't go on elsewhere: UNAVAILABLE, and the reason."""
    router = await make_router(*two_workers)
    _, sink = router.send(40, **fields)
    first, _ = await _where(two_workers)
    (await first.next_start()).delta([1])
    await asyncio.wait_for(sink.first.wait(), 5)
    await first.kill()
    await sink.end()
    assert isinstance(sink.error, Unavailable)
    assert "n > 1" in sink.error.message or "guided_json" in sink.error.message
    assert router.is_idle()


async def test_what_cant_move_may_still_be_retried_before_its_first_token(make_router: Any, two_workers: Workers) -> None:
    """A request of several choices that nobody has seen output of goes elsewhere like any other."""
    router = await make_router(*two_workers)
    _, sink = router.send(40, n=2)
    first, other = await _where(two_workers)
    await first.kill()
    seen = await other.next_start()
    seen.delta([1], index=0, finish=STOP)
    seen.delta([1], index=1, finish=STOP)
    await sink.end()
    assert sink.error is None


async def test_attempts_are_bounded(make_router: Any, two_workers: Workers) -> None:
    """A request that every engine breaks on gives up, with the last cause in the error."""
    router = await make_router(*two_workers, max_attempts=2)
    for worker in two_workers:
        worker.on_start = lambda seen: seen.fail(grpc.StatusCode.INTERNAL, "engine died")
    _, sink = router.send(40)
    await sink.end()
    assert isinstance(sink.error, Unavailable)
    assert "2 attempts" in sink.error.message
    assert "engine died" in sink.error.message
    assert router.is_idle()


async def test_a_worker_whose_engine_broke_is_set_aside(make_router: Any, two_workers: Workers) -> None:
    """After an engine error others are preferred for a while; then the worker is taken back."""
    router = await make_router(*two_workers, set_aside_s=0.3)
    two_workers[0].on_start = lambda seen: seen.fail(grpc.StatusCode.INTERNAL)
    two_workers[1].on_start = lambda seen: seen.delta([1], finish=STOP)
    _, sink = router.send(40, worker_id="w1")
    await sink.end()
    sinks = [router.send(40)[1] for _ in range(6)]
    for sink in sinks:
        await sink.end()
        assert sink.target.target.worker_id == "w2"
    two_workers[0].on_start = two_workers[1].on_start
    await eventually(lambda: router.parts.eligibility.all_eligible() == set(range(8)))


@pytest.mark.parametrize("nonsense", [{"tokens": b"abc"}, {"tokens": b"abcd", "index": 1}, {"index": 7, "finish_reason": STOP}])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_delta_that_cant_be_moves_its_request_alone(
    make_router: Any, two_workers: Workers, nonsense: dict[str, Any], begun: bool
) -> None:
    """Half a token or a choice that nobody asked for ends the attempt, at the engine too; the link's other requests stay."""
    router = await make_router(*two_workers)
    _, other = router.send(40, worker_id="w1")
    kept = await two_workers[0].next_start()
    _, sink = router.send(41, dp_rank=0 if not begun else None, session_id="s")
    worker, elsewhere = await _where(two_workers) if begun else (two_workers[0], two_workers[1])
    seen = await worker.next_start()
    if begun:
        seen.delta([1])
        await eventually(lambda: len(sink.tokens) == 1)
    seen.nonsense(**nonsense)
    await asyncio.wait_for(seen.aborted.wait(), 5)
    if begun:
        (await elsewhere.next_start()).delta([2], finish=STOP)
        await sink.end()
        assert list(sink.tokens) == [1, 2]
    else:
        await sink.end()
        assert sink.error is not None
        assert "sent a delta of choice" in sink.error.message
    kept.delta([1], finish=STOP)
    await other.end()
    assert other.error is None
    assert other.outcome.migrations == 0
    await eventually(router.is_idle)


async def test_a_request_that_breaks_on_a_lost_link_takes_nobody_along(
    make_router: Any, two_workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a link is lost each of its requests moves, whatever happens to the others; the link is made again."""
    router = await make_router(*two_workers)
    _, broken = router.send(40, worker_id="w1")
    await two_workers[0].next_start()
    flight, sink = router.send(41, dp_rank=0)
    await two_workers[0].next_start()
    for each in router.parts.dispatcher.flights - {flight}:
        monkeypatch.setattr(type(each), "on_lost", _raise_for(each, type(each).on_lost))
    await two_workers[0].kill()
    await two_workers[0].serve_again()
    (await two_workers[0].next_start()).delta([1], finish=STOP)
    await sink.end()
    assert (sink.error, broken.outcome) == (None, None)


def _raise_for(one: Any, on_lost: Any) -> Any:
    def raising(flight: Any, error: Any) -> None:
        if flight is one:
            raise ValueError("a fault of this request's own")
        on_lost(flight, error)

    return raising


@pytest.mark.parametrize(
    "greeting",
    [
        worker_pb2.AttachResponse(),
        worker_pb2.AttachResponse(step=worker_pb2.Step()),
        worker_pb2.AttachResponse(welcome=worker_pb2.Welcome(record={"worker_id": "w1", "epoch": 2})),
        worker_pb2.AttachResponse(welcome=worker_pb2.Welcome(record={"worker_id": "w2", "epoch": 1})),
    ],
    ids=["nothing", "a step", "another epoch", "another worker"],
)
async def test_only_its_own_welcome_attaches_a_worker(
    make_router: Any, one_worker: FakeWorker, greeting: worker_pb2.AttachResponse
) -> None:
    """An Attach that is answered by anything but the instance's Welcome is given up, and tried again."""
    right, one_worker.greeting = one_worker.greeting, greeting
    router = await make_router()
    joining = asyncio.create_task(router.join(one_worker))
    await eventually(lambda: len(one_worker.hellos) > 1)
    assert not joining.done()
    one_worker.greeting = right
    await joining


async def test_a_member_that_is_back_as_its_link_ends_is_attached_again(make_router: Any, one_worker: FakeWorker) -> None:
    """A worker that comes back in the very moment in which its retired link has ended gets a link of its own."""
    router = await make_router(one_worker)
    links, instance = router.parts.links, one_worker.record.instance
    link, task = links.get(instance), links._tasks[instance]
    links.retire(instance)
    while not task.done():  # noqa: ASYNC110  # an event would come too late
        await asyncio.sleep(0)  # a turn of the event loop: in the next one the link is forgotten
    links.open(instance, one_worker.record.endpoint)
    assert links.get(instance) is not link
    await eventually(lambda: links.get(instance).connected)


async def test_a_worker_that_refuses_for_a_while_sends_requests_elsewhere(make_router: Any, two_workers: Workers) -> None:
    """UNAVAILABLE (draining) and RESOURCE_EXHAUSTED from a worker are tried elsewhere; the client notices nothing."""
    router = await make_router(*two_workers, max_attempts=10)
    two_workers[0].on_start = lambda seen: seen.fail(grpc.StatusCode.UNAVAILABLE, "draining")
    two_workers[1].on_start = lambda seen: seen.delta([1], finish=STOP)
    for _ in range(4):
        _, sink = router.send(40)
        await sink.end()
        assert sink.error is None


async def test_a_request_that_is_wrong_isnt_tried_elsewhere(make_router: Any, two_workers: Workers) -> None:
    """INVALID_ARGUMENT from a worker is the client's: passed on with its code, once."""
    router = await make_router(*two_workers)
    for worker in two_workers:
        worker.on_start = lambda seen: seen.fail(grpc.StatusCode.INVALID_ARGUMENT, "prompt: too long")
    _, sink = router.send(40)
    await sink.end()
    assert sink.error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert sink.error.message == "prompt: too long"
    assert two_workers[0].started.qsize() + two_workers[1].started.qsize() == 1
    assert router.is_idle()


async def test_cancelling_reaches_the_engine(make_router: Any, one_worker: FakeWorker) -> None:
    """Before the first token and in mid-stream the worker gets an Abort, bookings go, and the sink hears nothing more."""
    router = await make_router(one_worker)
    for deltas in (0, 2):
        flight, sink = router.send(40)
        seen = await one_worker.next_start()
        for _ in range(deltas):
            seen.delta([1])
        await eventually(lambda sink=sink, deltas=deltas: len(sink.tokens) == deltas)
        flight.cancel()
        assert router.is_idle()
        await asyncio.wait_for(seen.aborted.wait(), 5)
        seen.delta([2], finish=STOP)
        flight.cancel()
        await eventually(lambda: router.is_idle())
        assert not sink.over.is_set()
        assert len(sink.tokens) == deltas
    assert router.parts.dispatcher.counts.cancelled == 2


async def test_cancelling_before_anything_was_sent_sends_nothing(make_router: Any, one_worker: FakeWorker) -> None:
    """A request cancelled in the same step as it came never reaches a worker."""
    router = await make_router(one_worker)
    flight, sink = router.send(40)
    flight.cancel()
    _, other = router.send(40)
    (await one_worker.next_start()).delta([1], finish=STOP)
    await other.end()
    assert one_worker.started.empty()
    assert sink.target is None


@pytest.mark.parametrize("near_s", [3.0, 0.1])
async def test_a_deadline_ends_the_request_and_the_engines_work(
    make_router: Any, one_worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, near_s: float
) -> None:
    """When the deadline passes: DEADLINE_EXCEEDED, an Abort, and the worker was told how long to care; also when it was too far
    away for a timer in the beginning."""
    monkeypatch.setattr(dispatcher, "NEAR_S", near_s)
    router = await make_router(one_worker)
    _, sink = router.send(40, deadline=asyncio.get_running_loop().time() + 0.2)
    seen = await one_worker.next_start()
    assert 0 < seen.start.timeout_ms <= 200
    await sink.end()
    assert isinstance(sink.error, DeadlineExceeded)
    await asyncio.wait_for(seen.aborted.wait(), 5)
    assert router.is_idle()


async def test_a_request_waits_while_every_target_is_full(make_router: Any, one_worker: FakeWorker) -> None:
    """At the limit requests wait in order and go as soon as one ends."""
    one_worker.record = a_record("w1", 0, 1, data_parallel_size=1, max_num_seqs=1)
    router = await make_router(one_worker, limit_running=1.0)
    router.send(40)
    seen = await one_worker.next_start()
    _, second = router.send(50, priority=1)
    third_flight, _ = router.send(60, priority=-1)
    await eventually(lambda: len(router.parts.dispatcher.queue) == 2)
    assert one_worker.started.empty()
    seen.delta([1], finish=STOP)
    seen = await one_worker.next_start()
    assert len(seen.prompt) == 60
    third_flight.cancel()
    seen = await one_worker.next_start()
    assert len(seen.prompt) == 50
    seen.delta([1], finish=STOP)
    await second.end()
    assert router.is_idle()


async def test_a_full_queue_refuses_with_a_delay(make_router: Any, one_worker: FakeWorker) -> None:
    """Beyond the queue's bound: RESOURCE_EXHAUSTED with retry_after_s; nothing is booked for it."""
    one_worker.record = a_record("w1", 0, 1, data_parallel_size=1, max_num_seqs=1)
    router = await make_router(one_worker, limit_running=1.0, queue_requests=1)
    router.send(40)
    await one_worker.next_start()
    router.send(40)
    _, refused = router.send(40)
    await refused.end()
    assert isinstance(refused.error, Overloaded)
    assert refused.error.retry_after_s > 0


async def test_a_request_that_waited_too_long_is_refused(make_router: Any, one_worker: FakeWorker) -> None:
    """The queue's age is bounded: RESOURCE_EXHAUSTED when it has passed."""
    one_worker.record = a_record("w1", 0, 1, data_parallel_size=1, max_num_seqs=1)
    router = await make_router(one_worker, limit_running=1.0, queue_age_s=0.1)
    flight, _ = router.send(40)
    await one_worker.next_start()
    _, waiting = router.send(40)
    await waiting.end()
    assert isinstance(waiting.error, Overloaded)
    flight.cancel()
    assert router.is_idle()


async def test_cancelling_a_waiting_request_takes_it_out_of_the_queue(make_router: Any, one_worker: FakeWorker) -> None:
    """A client that leaves while its request waits leaves nothing behind."""
    one_worker.record = a_record("w1", 0, 1, data_parallel_size=1, max_num_seqs=1)
    router = await make_router(one_worker, limit_running=1.0)
    running, _ = router.send(40)
    await one_worker.next_start()
    waiting, _ = router.send(40)
    await eventually(lambda: len(router.parts.dispatcher.queue) == 1)
    waiting.cancel()
    assert len(router.parts.dispatcher.queue) == 0
    running.cancel()
    assert router.is_idle()


async def test_no_worker_at_all_is_unavailable(make_router: Any) -> None:
    """Without a worker there is nothing to wait for."""
    router = await make_router()
    _, sink = router.send(40)
    await sink.end()
    assert isinstance(sink.error, Unavailable)


async def test_a_member_that_is_out_of_reach_is_waited_for(make_router: Any, one_worker: FakeWorker) -> None:
    """When the only worker's link breaks, the request waits for failover_wait_s; if nobody comes back it says so."""
    router = await make_router(one_worker, failover_wait_s=0.3)
    _, sink = router.send(40)
    await one_worker.next_start()
    await one_worker.kill()
    await eventually(lambda: len(router.parts.dispatcher.queue) == 1)
    await sink.end()
    assert isinstance(sink.error, Unavailable)
    assert "w1" in sink.error.message
    assert router.is_idle()


@pytest.mark.parametrize("sent", [False, True])
async def test_nobody_left_is_said_once(make_router: Any, two_workers: Workers, sent: bool) -> None:
    """A pin to a rank whose worker is lost and then gone: the ranks that live are named, and what an attempt failed with."""
    dead, _ = two_workers
    router = await make_router(*two_workers)
    if sent:
        _, sink = router.send(40, dp_rank=1)
        await dead.next_start()
    await dead.kill()
    await eventually(lambda: not router.parts.eligibility.is_connected(dead.record.instance))
    if not sent:
        _, sink = router.send(40, dp_rank=1)
    await eventually(lambda: len(router.parts.dispatcher.queue) == 1)
    router.leave(dead)
    await sink.end()
    assert isinstance(sink.error, Unavailable)
    said, _, before = sink.error.message.partition("; before that: ")
    assert said == "no target for model 'm': request is pinned to dp_rank 1 (w2/4, w2/5, w2/6, w2/7)"
    assert before.startswith("worker w1 was lost: ") if sent else not before
    assert router.is_idle()


async def test_a_retired_worker_finishes_what_it_runs(make_router: Any, two_workers: Workers) -> None:
    """A worker that left the registry takes nothing new; its running request ends there, then the link closes."""
    router = await make_router(*two_workers, lease_grace_s=0)
    _, sink = router.send(40, worker_id="w1")
    seen = await two_workers[0].next_start()
    router.leave(two_workers[0])
    _, other = router.send(40)
    (await two_workers[1].next_start()).delta([1], finish=STOP)
    await other.end()
    seen.delta([1], finish=STOP)
    await sink.end()
    assert sink.error is None
    await eventually(lambda: two_workers[0].attached == 0)
    assert [link.instance.worker_id for link in router.parts.links] == ["w2"]


async def test_a_worker_that_answers_outlives_its_lease_for_a_while(make_router: Any, two_workers: Workers) -> None:
    """A lost lease doesn't stop a worker that answers; after lease_grace_s it is gone."""
    router = await make_router(*two_workers, lease_grace_s=0.3)
    router.leave(two_workers[0])
    _, sink = router.send(40, worker_id="w1")
    (await two_workers[0].next_start()).delta([1], finish=STOP)
    await sink.end()
    await eventually(lambda: "w1" not in router.parts.fleet.records)
    assert len(router.parts.eligibility.all_eligible()) == 4


async def test_a_link_that_breaks_is_made_again(make_router: Any, one_worker: FakeWorker) -> None:
    """A worker whose stream breaks while it lives is attached to again, and used."""
    router = await make_router(one_worker)
    link = next(iter(router.parts.links))
    await one_worker.kill()
    await eventually(lambda: not link.connected)
    await one_worker.serve_again()
    _, sink = router.send(40)
    (await one_worker.next_start()).delta([1], finish=STOP)
    await sink.end()
    assert sink.error is None
    assert [hello.epoch for hello in one_worker.hellos] == [1, 1]


async def test_sessions_stay_where_they_were(make_router: Any, two_workers: Workers) -> None:
    """Requests of a session go to the target of the one before, even if the index knows nothing of it."""
    router = await make_router(*two_workers)
    for worker in two_workers:
        worker.on_start = lambda seen: seen.delta([1], finish=STOP)
    targets = set()
    for i in range(6):
        _, sink = router.send(list(range(100 * i, 100 * i + 40)), session_id="s1")
        await sink.end()
        targets.add(sink.target.target)
    assert len(targets) == 1


async def test_draining_refuses_new_requests_and_lets_running_ones_end(make_router: Any, one_worker: FakeWorker) -> None:
    """After refuse_new a new request is UNAVAILABLE; idle() returns when the running one has ended."""
    router = await make_router(one_worker)
    _, running = router.send(40)
    seen = await one_worker.next_start()
    router.parts.dispatcher.refuse_new(Unavailable("the router is stopping"))
    _, late = router.send(40)
    await late.end()
    assert isinstance(late.error, Unavailable)
    idle = asyncio.create_task(router.parts.dispatcher.idle(5))
    seen.delta([1], finish=STOP)
    assert await idle
    assert running.outcome is not None


async def test_a_thousand_requests_with_cancels_leave_nothing(make_router: Any, two_workers: Workers) -> None:
    """After many requests, a fifth of them cancelled at various stages, every count is back at 0."""
    for worker in two_workers:
        worker.on_start = _answer_in_steps
    router = await make_router(*two_workers)
    for batch in range(10):
        pairs = [router.send(list(range(i, i + 33 + i % 7))) for i in range(100)]
        await asyncio.sleep(0)
        for i, (flight, _) in enumerate(pairs):
            if i % 5 == batch % 5:
                flight.cancel()
        for i, (_, sink) in enumerate(pairs):
            if i % 5 != batch % 5:
                await sink.end()
                assert sink.error is None
    assert router.is_idle()
    for worker in two_workers:
        assert all(seen.aborted.is_set() or seen.start.stream for seen in worker.seen.values())


def _answer_in_steps(seen: Seen) -> None:
    seen.delta([1], cached=0)
    seen.delta([2])
    seen.delta([3], finish=STOP)


async def _generate(seen: Seen, gate: asyncio.Event) -> None:
    """The deterministic model: five tokens, then wait for the gate, then the rest."""
    produced = list(seen.resume)
    total = seen.start.sampling.max_tokens
    for token in continuation([*seen.prompt, *produced], total - len(produced)):
        if len(produced) >= 5:
            await gate.wait()
        produced.append(token)
        seen.delta([token], finish=LENGTH if len(produced) == total else 0)  # type: ignore[arg-type]


async def _where(workers: Workers) -> Workers:
    """(the worker that got the request, the other one); the Start stays in its queue."""
    first, other = workers
    await eventually(lambda: not (first.started.empty() and other.started.empty()))
    return (first, other) if not first.started.empty() else (other, first)
