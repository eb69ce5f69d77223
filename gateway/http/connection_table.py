"""Which connections a port holds, and which of them makes room for a newcomer when there are too many.

A newcomer cannot show a key before it is let in, so it is not turned away while another connection would lose less. At
the limit goes first

1. a stranger, on which no request has shown a valid key yet: the oldest, and no trickle of bytes makes one younger;
2. one that has shown a key and waits for its next request: the one that has waited longest;
3. an incomplete upload of a tenant that has more than half of all connections: the oldest.

Strangers are left a quarter of all places at the cost of 2 and 3: otherwise a flood of them would give nobody the time
to show a key. A request that has shown a key and is there with all of its body is never given up.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from enum import IntEnum
from ipaddress import IPv6Address, ip_network
from itertools import chain

STRANGERS_PART = 4  # they are left 1 / so many of all places
SITE_BITS = 64  # of an IPv6 address: who has one has all that begin with them


class Full(Exception):
    """Nobody can make room. The message says what there are too many of."""


class Standing(IntEnum):
    STRANGER = 0  # has not shown a valid key
    IDLE = 1  # has shown one, and waits for a request
    UPLOADING = 2  # of a request with a key, not all of the body is there
    SERVING = 3  # a request with a key is there and not yet answered


class Place:
    """One connection's place, from its acceptance to its end. `close` is called when it is given up."""

    __slots__ = ("_groups", "_is_complete", "close", "standing", "tenant")

    def __init__(self, groups: "tuple[_Group, ...]", close: Callable[[], object]) -> None:
        self.close = close
        self.standing = Standing.STRANGER
        self.tenant: str | None = None  # whose key was shown last
        self._groups = groups
        self._is_complete = False  # the request at hand
        for group in groups:
            group.places[Standing.STRANGER][self] = None
            group.total += 1

    def begin(self) -> None:
        """The headers of a request are there."""
        self._is_complete = False

    def complete(self) -> None:
        """All of the request is there."""
        self._is_complete = True
        if self.standing is Standing.UPLOADING:
            self._move(Standing.SERVING)

    def show_key(self, tenant: str) -> None:
        """The request at hand has a valid key, the tenant's."""
        self._belong(tenant)
        self._move(Standing.SERVING if self._is_complete else Standing.UPLOADING)

    def rest(self) -> None:
        """The request has been answered."""
        if self.tenant is not None:
            self._move(Standing.IDLE)

    def leave(self) -> None:
        """The connection has ended, or is about to."""
        self._belong(None)
        for group in self._groups:
            del group.places[self.standing][self]
            group.total -= 1
        self._groups = ()
        self.close = _nothing  # what it was leads to the connection, which leads here

    def _move(self, standing: Standing) -> None:
        for group in self._groups:
            del group.places[self.standing][self]
            group.places[standing][self] = None
        self.standing = standing

    def _belong(self, tenant: str | None) -> None:
        if tenant == self.tenant:
            return
        for group in self._groups:
            group.num_of[self.tenant] -= 1
            group.num_of[tenant] += 1
        self.tenant = tenant


class ConnectionTable:
    """Of a port: at most `limit` connections, and of each peer at most `limit_per_peer`.

    None: half of `limit` a peer, and all of it for this machine's own addresses, where a proxy may be that speaks for
    everybody.
    """

    def __init__(self, limit: int, limit_per_peer: int | None = None) -> None:
        self.num_given_up = [0 for _ in Standing]  # by what they were
        self.num_refused = 0
        self._all = _Group(limit, "This server")
        self._limits_loopback = limit_per_peer is not None
        self._limit_per_peer = limit_per_peer or max(1, limit // 2)
        self._peers: dict[str, _Group] = {}

    def num(self, standing: Standing) -> int:
        """How many of them there are."""
        return len(self._all.places[standing])

    def admit(self, address: str, close: Callable[[], object]) -> Place:
        """A place for a newcomer from that IP address, at whose cost it may be. Raises `Full`."""
        groups = tuple(self._groups(address))
        for group in groups:
            if group.total >= group.limit and not self._make_room(group):
                self.num_refused += 1
                raise Full(f"{group.whose} has its limit of {group.limit} connections, all of them in use.")
        return Place(groups, close)

    def make_room(self) -> bool:
        """Close the connection that loses least; False where none may be closed."""
        return self._make_room(self._all)

    def _make_room(self, group: "_Group") -> bool:
        victim = group.victim()
        if victim is None:
            return False
        self.num_given_up[victim.standing] += 1
        close = victim.close
        victim.leave()
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
            if len(self._peers) > 2 * self._all.limit:  # most of them have left
                self._peers = {name: group for name, group in self._peers.items() if group.total}
            group = self._peers[peer] = _Group(self._limit_per_peer, f"Your address ({peer})")
        return group


class _Group:
    """All connections, or one peer's. Those of a standing are in the order in which they came to it."""

    def __init__(self, limit: int, whose: str) -> None:
        self.limit = limit
        self.whose = whose
        self.total = 0
        # ordered dicts: the first of a plain one is behind all that have left it
        self.places: list[OrderedDict[Place, None]] = [OrderedDict() for _ in Standing]
        self.num_of = Counter[str | None]()  # by tenant

    def victim(self) -> Place | None:
        """Who makes room, by the order above; None: nobody may be asked to."""
        strangers = self.places[Standing.STRANGER]
        if len(strangers) * STRANGERS_PART > self.limit:
            return next(iter(strangers))
        return next(chain(self.places[Standing.IDLE], self._excessive_uploads(), strangers), None)

    def _excessive_uploads(self) -> Iterator[Place]:
        for place in self.places[Standing.UPLOADING]:
            if 2 * self.num_of[place.tenant] > self.limit:
                yield place


def _peer(address: str) -> tuple[str, bool]:
    """Whom an address belongs to, as far as it shows, and whether that is this machine."""
    if ":" not in address:
        return address, address.startswith("127.")
    parsed = IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return _peer(str(parsed.ipv4_mapped))
    return str(ip_network((parsed.packed, SITE_BITS), strict=False)), parsed.is_loopback


def _nothing() -> None:
    """Stands in for what is not there any more."""
