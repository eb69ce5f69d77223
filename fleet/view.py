"""A router's view of one replica: its last state, and the requests sent there since."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from urllib.parse import urlsplit

from fleet.prediction import NO_REPLICA_BACKLOG, ReplicaBacklog, add_work
from fleet.retries import Ejection
from gateway.replica.state import ReplicaState, WaitingWork

SILENCE_SECONDS = 2.0  # without a state, after which a replica counts as lost
NOBODY: Mapping[str, WaitingWork] = {}


class Condition(StrEnum):
    """The availability of a replica to new requests, with the reason."""

    SERVING = "serving"
    DRAINING = "draining"  # it refuses new requests
    EJECTED = "ejected"  # its requests failed
    SILENT = "silent"  # no recent state


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """The addresses of one replica; the first's host and port are its name."""

    url: str  # of its API
    admin: str  # of its admin port

    @property
    def name(self) -> str:
        return urlsplit(self.url).netloc


@dataclass(eq=False)
class OpenRequest:
    """A request sent to a replica and not answered to the end."""

    tenant: str
    work: WaitingWork
    at: float
    give_up: Callable[[], object] | None = None  # called when the replica is lost before an answer began


@dataclass(eq=False)
class ReplicaView:
    """The router's view of one replica; moments are in seconds of any one clock."""

    replica: ReplicaAddress
    state: ReplicaState | None = None
    heard: float = -inf  # moment of the last state, -inf for a lost replica
    last_heard: float | None = None  # moment of the last state; None: there was none
    problem: str = ""  # why the last poll failed
    ejection: Ejection = field(default_factory=Ejection)
    attempts: int = 0  # requests sent there
    retried: int = 0  # attempts followed by one at another replica
    next_event: int = 0  # next change of its cached beginnings
    backlog: ReplicaBacklog = NO_REPLICA_BACKLOG  # of its state
    open: set[OpenRequest] = field(default_factory=set)  # unfinished requests
    on_way: set[OpenRequest] = field(default_factory=set)  # unfinished requests perhaps not yet in its state

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def load(self) -> int:
        """The known number of its open requests."""
        told = self.state.running + self.backlog.requests if self.state else 0
        return max(told + len(self.on_way), len(self.open))

    @property
    def waiting(self) -> Mapping[str, WaitingWork]:
        told = self.state.waiting if self.state else NOBODY
        return add_work(told, self.work_on_way) if self.on_way else told

    @property
    def work_on_way(self) -> list[tuple[str, WaitingWork]]:
        """The work on its way there, with its tenants."""
        return [(one.tenant, one.work) for one in self.on_way]

    @property
    def prefill_seconds(self) -> float:
        """The predicted seconds of all uncomputed prompts there or on their way."""
        computing = self.state.prefill_seconds if self.state else 0.0
        return computing + self.backlog.prefill_seconds + sum(one.work.prefill_seconds for one in self.on_way)

    def is_silent(self, now: float) -> bool:
        return now - self.heard >= SILENCE_SECONDS

    @property
    def takes_requests(self) -> bool:
        """True if its last state accepts new requests."""
        return self.state is not None and not self.state.draining

    def condition(self, now: float) -> Condition:
        """The gravest reason against new requests there, or that it is available."""
        if self.state is None or self.is_silent(now):
            return Condition.SILENT
        if self.state.draining:
            return Condition.DRAINING
        return Condition.EJECTED if self.ejection.is_out(now) else Condition.SERVING

    def is_available(self, now: float) -> bool:
        """True if new requests should go there."""
        return self.condition(now) is Condition.SERVING

    def told(
        self, state: ReplicaState, asked: float, now: float, weight: Callable[[str], float] = lambda _: 1.0
    ) -> bool:
        """Take a state polled at the moment `asked`; returns True if the replica has restarted since the last one.
        `weight` is a tenant's.
        """
        restarted = self.state is not None and self.state.instance != state.instance
        self.state, self.heard, self.last_heard, self.problem = state, now, now, ""
        self.backlog = ReplicaBacklog(state.waiting, weight)
        self.on_way = {one for one in self.on_way if one.at >= asked}
        return restarted

    def lost(self) -> None:
        """Record that the replica is unreachable: it gets no requests before its next state, and its attempts without
        an answer are given up.
        """
        self.state, self.heard, self.next_event, self.backlog = None, -inf, 0, NO_REPLICA_BACKLOG
        for give_up in [one.give_up for one in self.open if one.give_up is not None]:
            give_up()

    def sent(self, tenant: str, work: WaitingWork, now: float) -> OpenRequest:
        """Record a request being sent; `ended` has to follow."""
        one = OpenRequest(tenant, work, now)
        self.open.add(one)
        self.on_way.add(one)
        return one

    def ended(self, one: OpenRequest) -> None:
        self.open.discard(one)
        self.on_way.discard(one)
