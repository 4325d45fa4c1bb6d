"""Proxies that do to connections and messages what networks do: cut, stall, drop, duplicate, delay, reorder."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast


class TcpProxy:
    """Forwards TCP connections to host:port as they are. `start` first, `stop` in the end."""

    def __init__(self, target: Callable[[], tuple[str, int]]) -> None:
        self.port = 0
        self._target = target
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._refusing = False

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Side(self._new_link(), to_server=True), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self.sever()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """End every connection; new ones are taken."""
        for link in list(self._links):
            link.close()

    def sever(self) -> None:
        """End every connection and take no new ones until `heal`."""
        self._refusing = True
        self.cut()

    def heal(self) -> None:
        self._refusing = False

    def stall(self) -> None:
        """Connections stay open and nothing passes until `flow`; what comes waits in the kernel."""
        for link in self._links:
            link.pause()

    def flow(self) -> None:
        for link in self._links:
            link.resume()

    def _new_link(self) -> _Link:
        link = _Link(self)
        self._links.add(link)
        return link

    async def _connect(self, link: _Link) -> None:
        try:
            if self._refusing:
                raise OSError("severed")
            host, port = self._target()
            await asyncio.get_running_loop().create_connection(lambda: _Side(link, to_server=False), host, port)
        except OSError:
            link.close()

    def _to_server(self, link: _Link, data: bytes) -> None:
        link.write_to_server(data)


class _Link:
    """One connection through a proxy: a transport to each side."""

    def __init__(self, proxy: TcpProxy) -> None:
        self.proxy = proxy
        self.client: asyncio.Transport | None = None
        self.server: asyncio.Transport | None = None
        self.early = bytearray()
        self.buffer = bytearray()
        self.opening: asyncio.Task[None] | None = None
        self.closed = False

    def write_to_server(self, data: bytes) -> None:
        if self.server is None:
            self.early += data
        elif not self.closed:
            self.server.write(data)

    def close(self) -> None:
        self.closed = True
        self.proxy._links.discard(self)
        for transport in (self.client, self.server):
            if transport is not None:
                transport.abort()

    def pause(self) -> None:
        for transport in (self.client, self.server):
            if transport is not None and transport.is_reading():
                transport.pause_reading()

    def resume(self) -> None:
        for transport in (self.client, self.server):
            if transport is not None and not transport.is_closing() and not transport.is_reading():
                transport.resume_reading()


class _Side(asyncio.Protocol):
    def __init__(self, link: _Link, *, to_server: bool) -> None:
        self._link = link
        self._from_client = to_server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        link = self._link
        transport = cast("asyncio.Transport", transport)
        if self._from_client:
            link.client = transport
            link.opening = asyncio.get_running_loop().create_task(link.proxy._connect(link))
            return
        link.server = transport
        if link.closed:
            transport.abort()
        elif link.early:
            transport.write(bytes(link.early))
            link.early.clear()

    def data_received(self, data: bytes) -> None:
        if self._from_client:
            self._link.proxy._to_server(self._link, data)
        elif self._link.client is not None:
            self._link.client.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._link.close()


@dataclass(slots=True)
class Faults:
    """Probabilities per published message, and how long a delayed one is held at most (seconds)."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    longest_delay_s: float = 0.3

    @property
    def none(self) -> bool:
        return not (self.drop or self.duplicate or self.delay or self.reorder or self.corrupt)


class NatsProxy(TcpProxy):
    """Between a NATS client and its server: does its faults to what the client publishes under `rankway.v1.`.

    A delayed message goes out on whatever connection there is when its time comes: so it may come after a reconnect or
    after its worker's restart.
    """

    def __init__(self, target: Callable[[], tuple[str, int]], rng: random.Random) -> None:
        super().__init__(target)
        self.faults = Faults()
        self.dropped = self.duplicated = self.delayed = self.reordered = self.corrupted = 0
        self._rng = rng
        self._held: bytes | None = None

    def _to_server(self, link: _Link, data: bytes) -> None:
        link.buffer += data
        start = 0
        while (end := link.buffer.find(b"\r\n", start)) >= 0:
            line = bytes(link.buffer[start:end])
            end += 2
            if line[:3].upper() == b"PUB" or line[:4].upper() == b"HPUB":
                end += int(line.rsplit(b" ", 1)[1]) + 2
                if end > len(link.buffer):
                    break
            frame = bytes(link.buffer[start:end])
            start = end
            if line.startswith((b"PUB rankway.v1.", b"HPUB rankway.v1.")):
                self._publish(link, frame)
            else:
                link.write_to_server(frame)
        del link.buffer[:start]

    def _publish(self, link: _Link, frame: bytes) -> None:
        held, self._held = self._held, None
        faults, chance = self.faults, self._rng.random
        if faults.none:
            link.write_to_server(frame)
        elif chance() < faults.drop:
            self.dropped += 1
        elif chance() < faults.delay:
            self.delayed += 1
            delay_s = self._rng.uniform(0, faults.longest_delay_s)
            asyncio.get_running_loop().call_later(delay_s, self._send_late, frame)
        elif chance() < faults.reorder:
            self.reordered += 1
            self._held = frame
        else:
            link.write_to_server(frame)
            if chance() < faults.duplicate:
                self.duplicated += 1
                link.write_to_server(frame)
            if chance() < faults.corrupt:
                self.corrupted += 1
                link.write_to_server(_corrupted(frame, self._rng))
        if held is not None:
            link.write_to_server(held)

    def _send_late(self, frame: bytes) -> None:
        for link in self._links:
            if link.server is not None:
                link.write_to_server(frame)
                return

    def release(self) -> None:
        """Let go what waits for the next message."""
        held, self._held = self._held, None
        if held is not None:
            self._send_late(held)


def _corrupted(frame: bytes, rng: random.Random) -> bytes:
    """The frame with a payload cut short: valid NATS, and no message of ours."""
    line, _, rest = frame.partition(b"\r\n")
    words = line.split(b" ")
    payload = rest[: rng.randrange(len(rest) - 2)] if len(rest) > 2 else b""
    return b" ".join([b"PUB", words[1], str(len(payload)).encode()]) + b"\r\n" + payload + b"\r\n"
