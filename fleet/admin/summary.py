"""The replicas of a fleet side by side, in the figures by which they are compared. Reading them changes nothing."""

from dataclasses import dataclass

from fleet.fleet import Fleet
from fleet.view import Condition, ReplicaView
from gateway.replica.state import ReplicaState


@dataclass(frozen=True, slots=True)
class ToldSummary:
    """The figures of the state that a replica told last."""

    instance: str  # another one after each start
    model: str
    version: str  # of Sluice; empty: it is too old to tell
    policy: str  # the version in force; empty likewise
    running: int
    seats: int  # most sequences at once
    waiting: int
    work_seconds: float  # of all that runs and waits
    kv_share: float  # of its KV memory, what requests hold
    kv_tokens: int  # for which that has room
    hit_share: float | None  # of its prompts' tokens since its start, those found in its cache; None: it had no prompt


@dataclass(frozen=True, slots=True)
class ReplicaSummary:
    """One replica as the router sees it at one moment."""

    name: str
    url: str
    admin: str
    condition: Condition
    problem: str  # why it did not tell its state when it was asked last; empty: it did
    silent_seconds: float | None  # since it told its state last; None: it never did
    left_out_seconds: float  # until it is asked again, where its requests have failed
    ejections: int  # times it was left out, since the router knows it
    attempts: int  # requests that were sent there, since the router's start
    retried: int  # those of them after which another replica was asked
    open_requests: int  # not answered to the end
    on_the_way: int  # those of them of which its state does not tell yet
    told: ToldSummary | None  # None: it has not told its state lately


def summarized(fleet: Fleet, view: ReplicaView) -> ReplicaSummary:
    """Return one of the fleet's replicas as it is seen now."""
    now, name = fleet.clock(), view.name
    return ReplicaSummary(
        name=name,
        url=view.replica.url,
        admin=view.replica.admin,
        condition=view.condition(now),
        problem=view.problem,
        silent_seconds=None if view.last_heard is None else now - view.last_heard,
        left_out_seconds=max(0.0, view.ejection.until - now),
        ejections=view.ejection.times,
        attempts=fleet.picks[name],
        retried=fleet.retried[name],
        open_requests=len(view.open),
        on_the_way=len(view.on_way),
        told=None if view.state is None else _told(view.state),
    )


def _told(state: ReplicaState) -> ToldSummary:
    kv = state.kv
    return ToldSummary(
        instance=state.instance,
        model=state.model,
        version=state.version,
        policy=state.policy,
        running=state.running,
        seats=state.seats,
        waiting=sum(one.requests for one in state.waiting.values()),
        work_seconds=state.work_seconds,
        kv_share=(kv.total - kv.free - kv.cached) / max(kv.total, 1),
        kv_tokens=kv.total,
        hit_share=kv.found / kv.looked_for if kv.looked_for else None,
    )
