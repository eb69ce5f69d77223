"""The view that a router has of one replica: the state that it told last, and what was sent there since."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from fleet.prediction import add_work
from fleet.replicas import ReplicaAddress
from fleet.retries import Ejection
from gateway.replica.state import ReplicaState, WaitingWork

SILENCE_SECONDS = 2.0  # without a state, after which a replica counts as gone
NOBODY: Mapping[str, WaitingWork] = {}


class Condition(StrEnum):
    """Whether new requests go to a replica, and why not."""

    SERVING = "serving"
    DRAINING = "draining"  # it says that it takes no more
    EJECTED = "ejected"  # it is left out for a while, because its requests failed
    SILENT = "silent"  # it has not told its state lately, or never


@dataclass(eq=False)
class OpenRequest:
    """A request that was sent to a replica and has not been answered to the end."""

    tenant: str
    work: WaitingWork
    at: float
    give_up: Callable[[], object] | None = None  # called when the replica is lost, as long as no answer has begun


@dataclass(eq=False)
class ReplicaView:
    """One replica as the router sees it; moments are in seconds of any one clock."""

    replica: ReplicaAddress
    state: ReplicaState | None = None
    heard: float = -inf  # when that was
    last_heard: float | None = None  # the same, but for a replica that is lost; None: it never told its state
    problem: str = ""  # why it did not tell its state when it was asked last
    ejection: Ejection = field(default_factory=Ejection)
    next_event: int = 0  # of its cached beginnings
    open: set[OpenRequest] = field(default_factory=set)  # what it has not answered to the end
    on_way: set[OpenRequest] = field(default_factory=set)  # those of them of which its state may not tell yet

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def load(self) -> int:
        """The requests that it has to answer, as far as the router knows."""
        told = self.state.running + sum(one.requests for one in self.state.waiting.values()) if self.state else 0
        return max(told + len(self.on_way), len(self.open))

    @property
    def waiting(self) -> Mapping[str, WaitingWork]:
        told = self.state.waiting if self.state else NOBODY
        return add_work(told, [(one.tenant, one.work) for one in self.on_way]) if self.on_way else told

    @property
    def prefill_seconds(self) -> float:
        """The predicted seconds of all prompts that are to be computed there, or on their way."""
        computing = self.state.prefill_seconds if self.state else 0.0
        return computing + sum(work.prefill_seconds for work in self.waiting.values())

    def is_silent(self, now: float) -> bool:
        return now - self.heard >= SILENCE_SECONDS

    @property
    def takes_requests(self) -> bool:
        """True if it said so when it told its state last."""
        return self.state is not None and not self.state.draining

    def condition(self, now: float) -> Condition:
        """Return why new requests should not go there, the gravest reason, or that they should."""
        if self.state is None or self.is_silent(now):
            return Condition.SILENT
        if self.state.draining:
            return Condition.DRAINING
        return Condition.EJECTED if self.ejection.is_out(now) else Condition.SERVING

    def is_available(self, now: float) -> bool:
        """Return whether new requests should go there."""
        return self.condition(now) is Condition.SERVING

    def told(self, state: ReplicaState, asked: float, now: float) -> bool:
        """Take a state that was asked for at a moment; return whether the replica has started since the last one."""
        restarted = self.state is not None and self.state.instance != state.instance
        self.state, self.heard, self.last_heard, self.problem = state, now, now, ""
        self.on_way = {one for one in self.on_way if one.at >= asked}
        return restarted

    def lost(self) -> None:
        """Note that the replica cannot be reached: nothing goes there before it tells its state again, and attempts
        that it has not begun to answer are given up.
        """
        self.state, self.heard, self.next_event = None, -inf, 0
        for give_up in [one.give_up for one in self.open if one.give_up is not None]:
            give_up()

    def sent(self, tenant: str, work: WaitingWork, now: float) -> OpenRequest:
        """Note a request that is being sent; `ended` has to follow."""
        one = OpenRequest(tenant, work, now)
        self.open.add(one)
        self.on_way.add(one)
        return one

    def ended(self, one: OpenRequest) -> None:
        self.open.discard(one)
        self.on_way.discard(one)
