"""What watchers are shown: order, resumption, ends that are held back."""

from __future__ import annotations

from harness.registry import record
from hypothesis import given
from hypothesis import strategies as st

from rankway.ranks import Instance
from rankway.registry.records import Gone, Put, Record
from rankway.registry.view import Entry, View

LEASE_S = 5.0


def put(revision: int, given_record: Record, *, pending: bool = False) -> Entry:
    return Entry(given_record.worker_id, revision, given_record, pending=pending)


def ended(revision: int, worker_id: str = "w1", *, deregistered: bool = False) -> Entry:
    return Entry(worker_id, revision, None, deregistered=deregistered)


def events(view: View, position: int = 0) -> list[Put | Gone]:
    deltas = view.since(position)
    assert deltas is not None
    return [delta.event for delta in deltas]


def test_changes_in_order() -> None:
    """A new record, a changed one and an ended one are one delta each; a renewal is none."""
    view = View(LEASE_S)
    view.apply(put(1, record()), 0)
    view.apply(put(2, record()), 0)
    view.apply(put(3, record(labels={"zone": "b"})), 0)
    view.apply(ended(4), 0)
    assert events(view) == [Put(record()), Put(record(labels={"zone": "b"})), Gone(Instance("w1", 1000))]
    assert (view.revision, len(view)) == (4, 0)


def test_pending_records_are_invisible() -> None:
    """A record that isn't admitted shows nothing, but ends the life before it."""
    view = View(LEASE_S)
    view.apply(put(1, record("w2"), pending=True), 0)
    view.apply(put(2, record()), 0)
    view.apply(put(3, record(epoch=2000), pending=True), 0)
    assert view.records() == []
    view.apply(put(4, record(epoch=2000)), 0)
    assert events(view) == [Put(record()), Gone(Instance("w1", 1000)), Put(record(epoch=2000))]


def test_old_changes_are_passed_over() -> None:
    """A change at or before the view's revision changes nothing."""
    view = View(LEASE_S)
    view.apply(put(5, record()), 0)
    view.apply(ended(5), 0)
    view.apply(ended(4), 0)
    assert len(view) == 1


def test_an_end_after_an_interruption_is_held_back() -> None:
    """A lease that ended while nobody could renew it ends nothing until the worker had a lease's time to come back."""
    view = View(LEASE_S)
    view.apply(put(1, record()), 0)
    view.interrupted(100)
    view.apply(ended(2), 101)
    assert (len(view), view.next_expiry(), view.announced) == (1, 105, 1)
    view.apply(put(3, record(), pending=True), 102)
    view.apply(put(4, record()), 102)
    assert (events(view), view.next_expiry(), view.announced) == ([Put(record())], None, 4)


def test_a_worker_that_does_not_come_back_is_gone() -> None:
    """An end that was held back takes effect when its time is over."""
    view = View(LEASE_S)
    view.apply(put(1, record()), 0)
    view.interrupted(100)
    view.apply(ended(2), 101)
    view.expire(104.9)
    assert len(view) == 1
    view.expire(105)
    assert events(view, 1) == [Gone(Instance("w1", 1000))]


def test_deregistration_is_never_held_back() -> None:
    """A worker that left on purpose is gone at once, interruption or not."""
    view = View(LEASE_S)
    view.apply(put(1, record()), 0)
    view.interrupted(100)
    view.apply(ended(2, deregistered=True), 100)
    assert len(view) == 0


def test_a_second_interruption_prolongs() -> None:
    """Ends that are held back wait for a lease after the last interruption."""
    view = View(LEASE_S)
    view.apply(put(1, record()), 0)
    view.interrupted(100)
    view.apply(ended(2), 100)
    view.interrupted(103)
    view.expire(105)
    assert (len(view), view.next_expiry()) == (1, 108)


def test_reload_shows_only_what_differs() -> None:
    """Loading the bucket anew tells watchers the differences, and nothing of what stayed."""
    view = View(LEASE_S)
    view.reload([put(1, record("w1")), put(2, record("w2", 4)), put(3, record("w3", 8))], 3, 0)
    position = view.position
    view.reload([put(1, record("w1")), put(7, record("w2", 4, labels={"a": "b"}))], 9, 50)
    assert events(view, position) == [Put(record("w2", 4, labels={"a": "b"})), Gone(Instance("w3", 1000))]


def test_no_resumption_over_a_reload() -> None:
    """A watcher that stopped before a reload gets a snapshot: changes may have been missed."""
    view = View(LEASE_S)
    view.reload([put(5, record())], 5, 0)
    assert view.resume(4) is None
    assert view.resume(5) == 1
    assert view.resume(6) is None


def test_a_watcher_behind_the_log() -> None:
    """A position or a revision that the bounded log has left behind can't be served from it."""
    view = View(LEASE_S, log_size=3)
    for revision in range(1, 6):
        view.apply(put(revision, record(labels={"n": str(revision)})), 0)
    assert view.since(1) is None
    assert len(view.since(2) or []) == 3
    assert view.resume(1) is None
    assert view.resume(2) == 2


class Watcher:
    """Reads the view as a watch stream does."""

    def __init__(self) -> None:
        self.known: dict[str, Record] = {}
        self._told = 0
        self._position: int | None = None

    def reconnect(self, view: View) -> None:
        self._position = view.resume(self._told)

    def read(self, view: View, most: int = 1000) -> None:
        deltas = view.since(self._position) if self._position is not None else None
        if deltas is None:
            self.known = {r.worker_id: r for r in view.records()}
            self._told, self._position = view.announced, view.position
            return
        for delta in deltas[:most]:
            self._told = delta.announced
            if isinstance(delta.event, Put):
                self.known[delta.event.record.worker_id] = delta.event.record
            elif self._instance(delta.event.instance.worker_id) == delta.event.instance:
                del self.known[delta.event.instance.worker_id]
        self._position = view.position

    def _instance(self, worker_id: str) -> Instance | None:
        return self.known[worker_id].instance if worker_id in self.known else None


changes = st.lists(
    st.tuples(
        st.sampled_from(["put", "pending", "end", "leave", "interrupt", "wait"]),
        st.sampled_from(["w1", "w2", "w3"]),
        st.integers(1, 3),
        st.sampled_from(["read", "read", "reconnect", "break", "sleep"]),
    ),
    max_size=50,
)


@given(changes, st.integers(2, 8))
def test_a_watcher_that_resumes_ends_where_the_view_is(changes: list[tuple[str, str, int, str]], log_size: int) -> None:
    """However often a watcher falls behind, is cut off and resumes by what it was told last, it ends with the view's records."""
    view = View(LEASE_S, log_size=log_size)
    watcher = Watcher()
    now = 0.0
    for revision, (action, worker_id, epoch, habit) in enumerate(changes, start=1):
        if action in ("put", "pending"):
            view.apply(put(revision, record(worker_id, epoch=epoch), pending=action == "pending"), now)
        elif action in ("end", "leave"):
            view.apply(ended(revision, worker_id, deregistered=action == "leave"), now)
        elif action == "interrupt":
            view.interrupted(now)
        else:
            now += 3
            view.expire(now)
        if habit == "sleep":
            continue
        if habit == "break":  # the stream broke after its first message
            watcher.read(view, most=1)
        if habit in ("reconnect", "break"):
            watcher.reconnect(view)
        watcher.read(view)
        assert watcher.known == {r.worker_id: r for r in view.records()}
