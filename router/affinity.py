"""Session affinity: a session's requests prefer the target of the one before. Pure, bounded; times are arguments, in seconds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rankway.ranks import Instance
from rankway.router.targets import Place


@dataclass(slots=True)
class _Session:
    place: Place
    expires: float


class Affinity:
    """Session -> target, for `ttl_s` after its last request. The session unused for longest goes first when there are too many.

    Args:
        ttl_s: 0 turns affinity off.
    """

    def __init__(self, ttl_s: float, max_sessions: int = 100_000) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def target(self, session_id: str, now: float) -> Place | None:
        """Where the session was last; None: nowhere, or too long ago."""
        session = self._sessions.get(session_id)
        if session is None:
            return None
        if session.expires <= now:
            del self._sessions[session_id]
            return None
        return session.place

    def keep(self, session_id: str, place: Place, now: float) -> None:
        """The session's request went there: the next one prefers it."""
        if not session_id or self._ttl_s <= 0:
            return
        self._sessions[session_id] = _Session(place, now + self._ttl_s)
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)

    def forget(self, instance: Instance) -> None:
        """The instance is gone, and with it what its sessions had there."""
        for session_id in [known for known, session in self._sessions.items() if session.place.instance == instance]:
            del self._sessions[session_id]

    def expire(self, now: float) -> None:
        """Forget the sessions whose time is over: they are the ones used longest ago."""
        while self._sessions:
            session_id, session = next(iter(self._sessions.items()))
            if session.expires > now:
                return
            del self._sessions[session_id]
