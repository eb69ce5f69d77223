"""Clients of several tenants against one server, some in open loops on a timetable, some in closed loops.

Each request in flight has a connection of its own, as many as that takes. Waits are counted from the moment a request
was due, so that a client which falls behind its timetable makes them longer, not shorter.
"""

import select
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from labs.benchmarks.load import OK, Connection

OVERLOADED = 503


class Due(NamedTuple):
    """A request of a timetable, `at` seconds from its start."""

    at: float
    tenant: str
    request: bytes


class ClosedLoop(NamedTuple):
    """Clients that send the next of their requests when one is answered."""

    clients: int
    requests: Iterator[bytes]


@dataclass(slots=True)
class Exchange:
    """One request; times in seconds from the start."""

    tenant: str
    due: float
    sent: float
    first: float | None = None  # event
    done: float | None = None  # end of a whole stream
    refused: float | None = None  # end of the whole refusal
    status: int | None = None  # of an answer that has ended
    events: list[float] = field(default_factory=list)  # as they came, by `time.perf_counter`

    def waited(self, now: float) -> float:
        """For its first event; so far, where none has come."""
        return (now if self.first is None else self.first) - self.due


@dataclass(slots=True)
class Heard:
    """All requests and their results."""

    seconds: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)
    busy: float = 0.0  # share of its core that the client used

    def of(self, tenant: str) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.tenant == tenant]

    def answered(self, tenant: str) -> int:
        return sum(exchange.done is not None for exchange in self.of(tenant))

    def refused(self, tenant: str) -> int:
        return sum(exchange.refused is not None for exchange in self.of(tenant))

    def waits(self, tenant: str) -> list[float]:
        """Seconds to the first event, ascending; of requests without one, the seconds until the clients stopped."""
        return sorted(exchange.waited(self.seconds) for exchange in self.of(tenant) if exchange.refused is None)

    @property
    def latest(self) -> float:
        """The furthest that a request was sent behind its timetable."""
        return max((exchange.sent - exchange.due for exchange in self.exchanges), default=0.0)


class Traffic:
    """Use once, in a block: leaving it closes every connection, which ends what is still running."""

    def __init__(self, port: int, refusals: Collection[int] = (OVERLOADED,)) -> None:
        """`refusals`: statuses that answers may have besides 200."""
        self._port, self._statuses = port, (OK, *refusals)
        self._poll = select.epoll()
        self._idle: list[Connection] = []
        self._open: dict[int, tuple[Connection, Exchange]] = {}
        self._all: dict[int, Connection] = {}
        self._loops: dict[str, Iterator[bytes]] = {}
        self._heard = Heard()
        self._started = 0.0

    def __enter__(self) -> "Traffic":
        return self

    def __exit__(self, *_: object) -> None:
        self._poll.close()
        for connection in self._all.values():
            connection.sock.close()

    def connect(self, connections: int) -> None:
        """Open idle connections in advance, so that requests need not wait for one."""
        self._idle += [self._connect() for _ in range(connections)]

    def run(
        self,
        seconds: float,
        timetable: Iterable[Due] = (),
        loops: Mapping[str, ClosedLoop] | None = None,
        until_answered: bool = False,
    ) -> Heard:
        """Send a timetable, in ascending order, beside closed loops by tenant.

        Ends after `seconds`; or, `until_answered`, once the timetable is through and nothing is in flight.
        Raises `BadAnswer` for any answer but 200 and refusals.
        """
        self._started, cpu = time.perf_counter(), time.process_time()
        for tenant, loop in (loops or {}).items():
            self._loops[tenant] = loop.requests
            for request in islice(loop.requests, loop.clients):
                self._send(tenant, request, self._now())
        due = iter(timetable)
        upcoming = next(due, None)
        while (now := self._now()) < seconds and not (until_answered and upcoming is None and not self._open):
            while upcoming is not None and upcoming.at <= now:
                self._send(upcoming.tenant, upcoming.request, upcoming.at)
                upcoming = next(due, None)
            self._listen(min(seconds, upcoming.at if upcoming else seconds) - now)
        heard = self._heard
        heard.seconds = self._now()
        heard.busy = (time.process_time() - cpu) / heard.seconds
        return heard

    def _now(self) -> float:
        return time.perf_counter() - self._started

    def _send(self, tenant: str, request: bytes, due: float) -> None:
        connection = self._idle.pop() if self._idle else self._connect()
        exchange = Exchange(tenant, due, self._now())
        self._heard.exchanges.append(exchange)
        self._open[connection.sock.fileno()] = connection, exchange
        connection.send(request)
        exchange.events = connection.event_times

    def _connect(self) -> Connection:
        connection = Connection(self._port, self._statuses)
        self._all[connection.sock.fileno()] = connection
        self._poll.register(connection.sock.fileno(), select.EPOLLIN)
        return connection

    def _listen(self, patience: float) -> None:
        for fd, _ in self._poll.poll(max(0.0, patience)):
            if fd in self._open:
                self._read(fd)
            else:
                self._forget(fd)

    def _read(self, fd: int) -> None:
        connection, exchange = self._open[fd]
        complete = connection.receive()
        if exchange.first is None and connection.event_times:
            exchange.first = connection.event_times[0] - self._started
        if complete:
            del self._open[fd]
            self._idle.append(connection)
            self._end(exchange, connection)

    def _end(self, exchange: Exchange, connection: Connection) -> None:
        """Its answer has ended."""
        exchange.status = connection.status
        if connection.status != OK:
            exchange.refused = self._now()
            return
        exchange.done = self._now() if connection.said_done else None
        if exchange.tenant in self._loops:
            self._send(exchange.tenant, next(self._loops[exchange.tenant]), self._now())

    def _forget(self, fd: int) -> None:
        """Its server closed it."""
        connection = self._all.pop(fd)
        self._idle = [idle for idle in self._idle if idle is not connection]
        self._poll.unregister(fd)
        connection.sock.close()
