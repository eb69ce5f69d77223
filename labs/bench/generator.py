"""Sends the traffic of several tenants from one thread, and records what becomes of each request.

A request of an open loop is due at its time, and its waits count from then, also of a slow server: a generator or a
server that falls behind makes them longer, not fewer. In a closed loop a request is due when its client sends it.
"""

import gc
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

from labs.bench.exchange import Exchange, Outcome
from labs.bench.retries import retry_delay, should_retry
from labs.bench.wire import Address, BadAnswer, Connection
from labs.bench.workloads import Session, Turn

OK = 200
SLOW_PAUSE_SECONDS = 0.25  # of a slow reader, between two reads
TICK_SECONDS = 1.0


@dataclass(slots=True)
class TenantLoad:
    """The traffic of one tenant: sessions at times of an ascending timetable, or of `clients` one after another."""

    name: str
    headers: dict[str, str]
    arrivals: Iterator[tuple[float, Session]]  # seconds from the start
    sessions: Callable[[], Session]  # of the clients
    clients: int = 0
    start: float = 0.0  # of the clients' first sessions; a timetable has its own
    stop: float = inf  # no session and no turn begins later
    think: float = 0.0  # seconds, mean
    leave: float = 0.0  # share of the requests
    slow: float = 0.0
    retries: int = 0


@dataclass(slots=True)
class Run:
    """The requests of a benchmark and the generator's own part in it."""

    exchanges: list[Exchange] = field(default_factory=list)
    seconds: float = 0.0  # with the drain
    cpu_share: float = 0.0  # of one core, that the generator used
    peak_in_flight: int = 0
    fault_at: float | None = None


class _Flight:
    """One request until it has an outcome."""

    __slots__ = ("connection", "exchange", "is_reused", "leave_after", "load", "request", "session", "turn")

    def __init__(self, load: TenantLoad, session: Session, turn: Turn, exchange: Exchange, request: bytes) -> None:
        self.load, self.session, self.turn, self.exchange, self.request = load, session, turn, exchange, request
        self.leave_after: int | None = None  # chunks
        self.connection: Connection | None = None
        self.is_reused = False


class Generator:
    """Use once."""

    def __init__(
        self,
        address: Address,
        loads: list[TenantLoad],
        *,
        seconds: float,
        drain: float,
        timeout: float,
        random: Random,
        tick: Callable[["Generator"], None] = lambda _: None,
    ) -> None:
        """Sessions begin for `seconds`; then at most `drain` seconds are left to requests in flight.

        `timeout` ends a request, in seconds from the moment it was due. `tick` is called once a second.
        """
        self.run_record = Run()
        self.outcomes: Counter[Outcome] = Counter()
        self.num_pending = 0  # requests without an outcome
        self._address, self._loads, self._random, self._tick = address, loads, random, tick
        self._seconds, self._drain, self._timeout = seconds, drain, timeout
        self._poll = select.epoll()
        self._flights: dict[int, _Flight] = {}  # by file descriptor
        self._idle: dict[int, Connection] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._started = 0.0

    @property
    def now(self) -> float:
        """Seconds from the start."""
        return time.perf_counter() - self._started

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Call an action at a moment in seconds from the start."""
        heappush(self._due, (moment, next(self._order), action))

    def run(self) -> Run:
        """Send everything; returns when all has an outcome."""
        collecting = gc.isenabled()
        gc.disable()  # a collection would look at every waiting request, and stop all streams for it
        try:
            return self._run()
        finally:
            if collecting:
                gc.enable()
            self._poll.close()

    def _run(self) -> Run:
        record = self.run_record
        self._started, cpu = time.perf_counter(), time.process_time()
        for load in self._loads:
            self._schedule(load)
            for _ in range(load.clients):
                self.at(load.start + self._random.random() * load.think, partial(self._begin_client, load))
        ticked = 0.0
        while self._is_busy(now := self.now):
            while self._due and self._due[0][0] <= now:
                heappop(self._due)[2]()
                now = self.now
            ends = self._seconds if now < self._seconds else self._seconds + self._drain
            next_at = min(self._due[0][0] if self._due else ends, ends, now + TICK_SECONDS)
            for fd, events in self._poll.poll(max(0.0, next_at - now)):
                self._handle(fd, events)
            record.peak_in_flight = max(record.peak_in_flight, len(self._flights))
            if (now := self.now) - ticked >= TICK_SECONDS:
                ticked = now
                self._expire(now)
                self._tick(self)
        self._stop()
        record.seconds = self.now
        record.cpu_share = (time.process_time() - cpu) / record.seconds
        return record

    def _stop(self) -> None:
        """Give up what is still running, and hang up."""
        for flight in list(self._flights.values()):
            self._finish(flight, Outcome.UNFINISHED)
        for exchange in self.run_record.exchanges:
            if exchange.outcome is None:  # it waited for its next attempt
                exchange.outcome, exchange.ended = Outcome.UNFINISHED, self.now
        for connection in self._idle.values():
            connection.close()

    def _is_busy(self, now: float) -> bool:
        if now < self._seconds:
            return bool(self._due or self.num_pending)
        return self.num_pending > 0 and now < self._seconds + self._drain

    def _schedule(self, load: TenantLoad) -> None:
        """Put the next arrival of a timetable into the future."""
        moment, session = next(load.arrivals, (inf, None))
        if session is not None and moment < self._end_of(load):
            self.at(moment, partial(self._arrive, load, session, moment))

    def _end_of(self, load: TenantLoad) -> float:
        return min(self._seconds, load.stop)

    def _arrive(self, load: TenantLoad, session: Session, due: float) -> None:
        self._schedule(load)
        self._request(load, session, next(session), due)

    def _begin_client(self, load: TenantLoad) -> None:
        if (now := self.now) < self._end_of(load):
            session = load.sessions()
            self._request(load, session, next(session), now)

    def _request(self, load: TenantLoad, session: Session, turn: Turn, due: float) -> None:
        if due >= self._end_of(load):
            return
        exchange = Exchange(load.name, due, is_slow=self._random.random() < load.slow)
        self.run_record.exchanges.append(exchange)
        self.num_pending += 1
        flight = _Flight(load, session, turn, exchange, self._address.post(turn.path, turn.body, load.headers))
        if self._random.random() < load.leave:
            flight.leave_after = self._random.randint(1, max(1, turn.output_tokens))
        exchange.sent = self.now
        self._attempt(flight)

    def _attempt(self, flight: _Flight, may_reuse: bool = True) -> None:
        exchange = flight.exchange
        exchange.attempts += 1
        exchange.token_times = []
        flight.is_reused = may_reuse and bool(self._idle) and not exchange.is_slow
        try:
            if flight.is_reused:
                fd, connection = self._idle.popitem()
            else:
                connection = Connection(self._address, exchange.is_slow)
                fd = connection.sock.fileno()
                self._poll.register(fd, connection.waits_for)
            flight.connection = connection
            self._flights[fd] = flight
            connection.send(flight.request)
            self._poll.modify(fd, connection.waits_for)
        except OSError as error:
            self._failed(flight, error)

    def _handle(self, fd: int, events: int) -> None:
        flight = self._flights.get(fd)
        if flight is None:
            if fd in self._idle:  # its server has closed it
                self._idle.pop(fd).close()
            return
        connection, exchange = flight.connection, flight.exchange
        assert connection is not None and connection.answer is not None
        try:
            is_complete = connection.handle(events, self.now)
        except (OSError, BadAnswer) as error:
            self._failed(flight, error)
            return
        answer = connection.answer
        exchange.token_times = answer.token_times
        if is_complete:
            self._answered(flight)
        elif flight.leave_after is not None and len(answer.token_times) >= flight.leave_after:
            self._finish(flight, Outcome.LEFT)
        elif exchange.is_slow and connection.is_open and not connection.waits_for & select.EPOLLOUT:
            self._poll.modify(fd, 0)
            self.at(self.now + SLOW_PAUSE_SECONDS, partial(self._resume, fd, flight))
        elif events & select.EPOLLOUT:
            self._poll.modify(fd, connection.waits_for)

    def _resume(self, fd: int, flight: _Flight) -> None:
        if self._flights.get(fd) is flight:
            self._poll.modify(fd, select.EPOLLIN)

    def _answered(self, flight: _Flight) -> None:
        """Its response is complete: an answer, a refusal, or a stream that failed."""
        connection, exchange = flight.connection, flight.exchange
        assert connection is not None and connection.answer is not None
        answer = connection.answer
        if answer.status != OK:
            if exchange.attempts <= flight.load.retries and should_retry(answer.status, answer.headers):
                self._release(flight)
                self.at(
                    self.now + retry_delay(exchange.attempts, answer.headers, self._random),
                    partial(self._attempt, flight),
                )
                return
            code = f"{answer.status} {answer.error}".strip()
            pause = retry_delay(1, answer.headers, self._random)
            self._finish(flight, Outcome.REFUSED, code, pause)
            return
        if answer.error or (answer.is_stream and not answer.said_done):
            self._finish(flight, Outcome.FAILED, answer.error or "stream without [DONE]")
            return
        if flight.turn.check is not None:
            exchange.is_right = flight.turn.check("".join(answer.text), answer.finish)
        self._finish(flight, Outcome.ANSWERED)

    def _failed(self, flight: _Flight, error: Exception) -> None:
        exchange = flight.exchange
        answer = flight.connection.answer if flight.connection is not None else None
        has_begun = answer is not None and bool(answer.headers)
        self._release(flight)
        if flight.is_reused and not has_begun:  # its server closed an idle connection as the request went out
            exchange.attempts -= 1
            self._attempt(flight, may_reuse=False)
        elif exchange.attempts <= flight.load.retries and not has_begun:
            self.at(self.now + retry_delay(exchange.attempts, {}, self._random), partial(self._attempt, flight))
        else:
            code = str(error) if isinstance(error, BadAnswer) else f"{type(error).__name__}: {error.args[-1]}"
            self._finish(flight, Outcome.FAILED, code, pause=retry_delay(1, {}, self._random))

    def _release(self, flight: _Flight, keep: bool = True) -> None:
        """Note a request's usage, take its connection, and keep that for another one if its answer is complete."""
        connection = flight.connection
        if connection is None:
            return
        fd = connection.sock.fileno()
        self._flights.pop(fd, None)
        flight.connection = None
        answer = connection.answer
        if answer is not None and answer.usage is not None:
            flight.exchange.note_usage(answer.usage)
        if keep and answer is not None and answer.may_go_on and connection.is_open and not connection.is_slow:
            connection.answer = None
            self._idle[fd] = connection
        else:
            connection.close()  # which also takes it from the poll

    def _finish(self, flight: _Flight, outcome: Outcome, code: str = "", pause: float = 0.0) -> None:
        """Record the outcome, and go on with the session or the client's next one, `pause` seconds later at least."""
        exchange, load = flight.exchange, flight.load
        answer = flight.connection.answer if flight.connection is not None else None
        text = "".join(answer.text) if answer is not None else ""
        self._release(flight, keep=outcome in (Outcome.ANSWERED, Outcome.REFUSED))
        exchange.outcome, exchange.code, exchange.ended = outcome, code, self.now
        self.outcomes[outcome] += 1
        self.num_pending -= 1
        if outcome is Outcome.ANSWERED:
            try:
                turn = flight.session.send(text)
            except StopIteration:
                pass
            else:
                due = exchange.ended + turn.wait
                self.at(due, partial(self._request, load, flight.session, turn, due))
                return
        if load.clients:
            think = self._random.expovariate(1 / load.think) if load.think else 0.0
            self.at(exchange.ended + max(think, pause), partial(self._begin_client, load))

    def _expire(self, now: float) -> None:
        for flight in list(self._flights.values()):
            if now - flight.exchange.due > self._timeout:
                self._finish(flight, Outcome.FAILED, "timeout")
