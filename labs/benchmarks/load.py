"""A load generator that is never the bottleneck: prepared bytes over plain sockets and epoll, on one core.

An asyncio client spends as much on a request as the server it measures. This one spends some 20 us on an answer and
reports how busy it was, so that a reader can see whether it held the server back.
"""

import json
import select
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

OK = 200
CHUNKED_END = b"0\r\n\r\n"
RECEIVE_BYTES = 256 * 1024
EVENT = b"data: "
DONE = b"data: [DONE]"
TAIL_BYTES = len(CHUNKED_END)  # kept between reads; shorter than EVENT, so that none is counted twice


class BadAnswer(RuntimeError):
    """The server answered with an unexpected status, or closed the connection."""


@dataclass(slots=True)
class Load:
    """The results of a load."""

    seconds: float = 0.0
    answers: int = 0
    events: int = 0
    fewest_events: int | None = None  # in one answer
    latencies: list[float] = field(default_factory=list)  # seconds, request to end of answer
    busy: float = 0.0  # share of its core that the generator used


def post(path: str, body: Mapping[str, object], key: str = "", **headers: object) -> bytes:
    """One HTTP/1.1 request as bytes; in the names of further headers _ stands for -."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    authorization = f"authorization: Bearer {key}\r\n" if key else ""
    further = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"{head}{authorization}{further}content-length: {len(content)}\r\n\r\n".encode() + content


class Connection:
    """One keep-alive connection with one request at a time."""

    __slots__ = (
        "_chunked",
        "_expected",
        "_left",
        "_tail",
        "event_times",
        "num_events",
        "said_done",
        "sent_at",
        "sock",
        "status",
    )

    def __init__(self, port: int, expected: Collection[int] = (OK,)) -> None:
        """`expected`: statuses that answers may have."""
        self._expected = expected
        self.status = 0  # of the last answer
        self.said_done = False  # a stream that is cut short does not
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sent_at = 0.0
        self.num_events = 0
        self.event_times: list[float] = []  # of the last answer, one for each event
        self._tail = b""
        self._left = -1  # outstanding bytes of the answer; -1: before its head
        self._chunked = False

    def send(self, request: bytes) -> None:
        self._left, self._chunked, self._tail = -1, False, b""
        self.num_events, self.event_times, self.said_done = 0, [], False
        self.sent_at = time.perf_counter()
        self.sock.sendall(request)

    def receive(self) -> bool:
        """Read the received bytes; True once the answer is complete. Raises `BadAnswer`."""
        data = self.sock.recv(RECEIVE_BYTES)
        if not data:
            raise BadAnswer("the server closed the connection")
        if self._left < 0:
            data = self._read_head(data)
        elif not self._chunked:
            self._left -= len(data)
        if self._chunked:
            return self._read_events(data)
        return self._left == 0

    def _read_head(self, data: bytes) -> bytes:
        head, _, rest = data.partition(b"\r\n\r\n")
        self.status = int(head[9:12]) if head.startswith(b"HTTP/1.1 ") else 0
        if self.status not in self._expected:
            raise BadAnswer(data[:500].decode(errors="replace"))
        _, found, length = head.partition(b"content-length: ")
        self._chunked = not found
        self._left = int(length.partition(b"\r\n")[0]) - len(rest) if found else 0
        return rest

    def _read_events(self, data: bytes) -> bool:
        data = self._tail + data
        count = data.count(EVENT)
        self.num_events += count
        self.event_times += [time.perf_counter()] * count
        self.said_done = self.said_done or DONE in data
        self._tail = data[-TAIL_BYTES:]
        return self._tail == CHUNKED_END


def closed_loop(port: int, requests: Iterator[bytes], connections: int, seconds: float, warm_up: float = 0.5) -> Load:
    """`connections` clients, each sending the next request when its last is answered, for `seconds` after a warm-up."""
    with Clients(port, connections) as clients:
        clients.send(requests)
        if warm_up:
            clients.run(requests, warm_up)
        return clients.run(requests, seconds)


def all_at_once(port: int, requests: Iterable[bytes]) -> tuple[float, list[list[float]]]:
    """Every request on its own connection at once: seconds until the last is answered, and each one's event times.

    Times are in seconds from the sending of the first request.
    """
    prepared = list(requests)
    with Clients(port, len(prepared)) as clients:
        started = time.perf_counter()
        for connection, request in zip(clients.connections, prepared, strict=True):
            connection.send(request)
        pending = len(prepared)
        while pending:
            pending -= sum(connection.receive() for connection in clients.readable(60))
        seconds = time.perf_counter() - started
        return seconds, [[at - started for at in connection.event_times] for connection in clients.connections]


class Clients:
    """Connections and one epoll over them."""

    def __init__(self, port: int, connections: int) -> None:
        self._poll = select.epoll()
        self.connections = [Connection(port) for _ in range(connections)]
        self._by_fd = {connection.sock.fileno(): connection for connection in self.connections}
        for fd in self._by_fd:
            self._poll.register(fd, select.EPOLLIN)

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        self._poll.close()
        for connection in self.connections:
            connection.sock.close()

    def readable(self, timeout: float) -> list[Connection]:
        """Connections with something to read. Raises `BadAnswer` when nothing comes within `timeout` seconds."""
        ready = self._poll.poll(timeout)
        if not ready:
            raise BadAnswer(f"nothing came for {timeout} s")
        return [self._by_fd[fd] for fd, _ in ready]

    @property
    def num_events(self) -> int:
        """Returns how many events of their last answers all connections have."""
        return sum(connection.num_events for connection in self.connections)

    def send(self, requests: Iterator[bytes]) -> None:
        """Send a request on every connection."""
        for connection in self.connections:
            connection.send(next(requests))

    def begin_streams(self, requests: Iterator[bytes]) -> None:
        """Send a request on every connection, and wait until all of them stream."""
        self.send(requests)
        while not all(connection.num_events > 2 for connection in self.connections):
            self._receive_unfinished()

    def stream_for(self, seconds: float) -> None:
        """Receive for `seconds`. Raises `BadAnswer` when a stream ends within them."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self._receive_unfinished()

    def _receive_unfinished(self) -> None:
        for connection in self.readable(10):
            if connection.receive():
                raise BadAnswer("a stream ended within the window")

    def run(self, requests: Iterator[bytes], seconds: float) -> Load:
        """Keep every connection busy for `seconds`; an answer counts where it ends."""
        load = Load()
        started, cpu = time.perf_counter(), time.process_time()
        now = started
        while now - started < seconds:
            for connection in self.readable(10):
                before = connection.num_events
                complete = connection.receive()
                load.events += connection.num_events - before
                if complete:
                    now = time.perf_counter()
                    load.latencies.append(now - connection.sent_at)
                    load.fewest_events = min(load.fewest_events or connection.num_events, connection.num_events)
                    connection.send(next(requests))
            now = time.perf_counter()
        load.seconds = now - started
        load.answers = len(load.latencies)
        load.busy = (time.process_time() - cpu) / load.seconds
        return load
