"""The connections of a port, and the victim to evict for a new one at the limit.

A new connection cannot show a key before it is accepted, so it is not refused while evicting another loses less. The
victim is the first of this list that exists:

1. a stranger, on which no request has shown a valid key yet, or whose refusal is delayed: the oldest by the time of its
acceptance, so that a trickle of bytes does not help;

2. a connection that has shown a key and waits for its next request: the longest waiting;

3. an incomplete upload of a tenant with more than half of all connections: the oldest.

Strangers keep a quarter of all connections at the cost of 2 and 3: otherwise a flood of them would leave new clients no
time to show a key. A request that has shown a key and arrived whole is never evicted.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from itertools import chain
from typing import Protocol

from gateway.http.address import network_of

STRANGERS_DIVISOR = 4  # unauthenticated connections may always hold a quarter of all


class ConnectionLimitReached(Exception):
    """No connection may be evicted for a new one; the message names the limit."""


class ConnectionState(IntEnum):
    """The state of a connection, by the names that the metric `sluice_connections` gives it."""

    STRANGER = 0  # has not shown a valid key, or waits for a refusal
    IDLE = 1  # has shown one, and waits for a request
    UPLOADING = 2  # a request with a key, whose body is incomplete
    SERVING = 3  # a request with a key, complete and not yet answered


class ConnectionCounts(Protocol):
    """Counts the connections of a port for its metrics."""

    @property
    def num_evicted(self) -> Sequence[int]:
        """Connections evicted for others, by state."""
        ...

    @property
    def num_refused(self) -> int:
        """Connections refused for lack of a victim."""
        ...

    def num(self, state: ConnectionState) -> int:
        """Returns how many connections are in this state."""
        ...


class ConnectionEntry:
    """One connection in the table, from its acceptance to its end; `close` is called when it is evicted."""

    __slots__ = ("_groups", "_is_complete", "close", "state", "tenant")

    def __init__(self, groups: "tuple[_Group, ...]", close: Callable[[], object]) -> None:
        self.close = close
        self.state = ConnectionState.STRANGER
        self.tenant: str | None = None  # the tenant of the last key shown
        self._groups = groups
        self._is_complete = False  # the current request
        for group in groups:
            group.entries[ConnectionState.STRANGER][self] = None
            group.total += 1

    def begin_request(self) -> None:
        """Note that a request's headers have arrived."""
        self._is_complete = False

    def complete_request(self) -> None:
        """Note that the whole request has arrived."""
        self._is_complete = True
        if self.state is ConnectionState.UPLOADING:
            self._move(ConnectionState.SERVING)

    def show_key(self, tenant: str) -> None:
        """Note that the current request has a valid key of this tenant."""
        self._belong(tenant)
        self._move(ConnectionState.SERVING if self._is_complete else ConnectionState.UPLOADING)

    def yield_place(self) -> None:
        """Note that the current request waits for its delayed refusal, which may be lost."""
        if self.state is not ConnectionState.STRANGER:  # else it keeps its turn
            self._move(ConnectionState.STRANGER)

    def complete_response(self) -> None:
        """Note that the request has been answered."""
        if self.tenant is not None:
            self._move(ConnectionState.IDLE)

    def remove(self) -> None:
        """Remove the connection, which has ended or is about to."""
        self._belong(None)
        for group in self._groups:
            del group.entries[self.state][self]
            group.total -= 1
        self._groups = ()
        self.close = _nothing  # breaks the reference cycle of connection and entry

    def _move(self, state: ConnectionState) -> None:
        for group in self._groups:
            del group.entries[self.state][self]
            group.entries[state][self] = None
        self.state = state

    def _belong(self, tenant: str | None) -> None:
        if tenant == self.tenant:
            return
        for group in self._groups:
            group.num_of[self.tenant] -= 1
            group.num_of[tenant] += 1
        self.tenant = tenant


class ConnectionTable:
    """Holds at most `limit` connections of a port, and at most `limit_per_peer` of each peer.

    Without `limit_per_peer` a peer may have half of `limit`, and this machine's own addresses all of it, since a proxy
    that forwards everybody's requests may run there.
    """

    def __init__(self, limit: int, limit_per_peer: int | None = None) -> None:
        self.num_evicted = [0 for _ in ConnectionState]  # by state
        self.num_refused = 0
        self._all = _Group(limit, "This server")
        self._limits_loopback = limit_per_peer is not None
        self._limit_per_peer = limit_per_peer or max(1, limit // 2)
        self._peers: dict[str, _Group] = {}

    def num(self, state: ConnectionState) -> int:
        """Returns how many connections are in this state."""
        return len(self._all.entries[state])

    def add(self, address: str, close: Callable[[], object]) -> ConnectionEntry:
        """Add a connection from an IP address, for which another may be evicted. Raises `ConnectionLimitReached`."""
        groups = tuple(self._groups(address))
        for group in groups:
            if group.total >= group.limit and not self._evict(group):
                self.num_refused += 1
                raise ConnectionLimitReached(
                    f"{group.whose} has its limit of {group.limit} connections, all of them in use."
                )
        return ConnectionEntry(groups, close)

    def evict(self) -> bool:
        """Evict the victim; returns False if there is none."""
        return self._evict(self._all)

    def _evict(self, group: "_Group") -> bool:
        victim = group.victim()
        if victim is None:
            return False
        self.num_evicted[victim.state] += 1
        close = victim.close
        victim.remove()
        close()
        return True

    def _groups(self, address: str) -> "Iterator[_Group]":
        peer, is_loopback = _peer(address)
        if self._limits_loopback or not is_loopback:
            yield self._of(peer)
        yield self._all

    def _of(self, peer: str) -> "_Group":
        group = self._peers.get(peer)
        if group is None:
            if len(self._peers) > 2 * self._all.limit:  # mostly peers without connections
                self._peers = {name: group for name, group in self._peers.items() if group.total}
            group = self._peers[peer] = _Group(self._limit_per_peer, f"Your address ({peer})")
        return group


class _Group:
    """All connections, or one peer's, by state, in the order of entering it."""

    def __init__(self, limit: int, whose: str) -> None:
        self.limit = limit
        self.whose = whose
        self.total = 0
        # ordered dicts: finding the first entry of a plain dict passes all deleted ones
        self.entries: list[OrderedDict[ConnectionEntry, None]] = [OrderedDict() for _ in ConnectionState]
        self.num_of = Counter[str | None]()  # by tenant

    def victim(self) -> ConnectionEntry | None:
        """The connection to evict, by the order above; None if none may be."""
        strangers = self.entries[ConnectionState.STRANGER]
        if len(strangers) * STRANGERS_DIVISOR > self.limit:
            return next(iter(strangers))
        return next(chain(self.entries[ConnectionState.IDLE], self._excessive_uploads(), strangers), None)

    def _excessive_uploads(self) -> Iterator[ConnectionEntry]:
        for entry in self.entries[ConnectionState.UPLOADING]:
            if 2 * self.num_of[entry.tenant] > self.limit:
                yield entry


def _peer(address: str) -> tuple[str, bool]:
    """The peer of an address, and True for an address of this machine."""
    peer = network_of(address)
    return peer, peer.startswith("127.") or address == "::1"


def _nothing() -> None:
    """Does nothing, in place of the `close` of a connection that has ended."""
