"""The replicas of a fleet side by side, in comparable figures. Reading them changes nothing."""

from dataclasses import dataclass

from fleet.fleet import Fleet
from fleet.view import Condition, ReplicaView
from gateway.replica.state import ReplicaState


@dataclass(frozen=True, slots=True)
class ToldSummary:
    """Figures of a replica's last state."""

    instance: str  # changes with each start
    model: str
    version: str  # of Sluice; empty from an old replica
    policy: str  # version in force; empty from an old replica
    running: int
    seats: int  # most sequences at once
    waiting: int
    work_seconds: float  # of running and queued requests
    kv_share: float  # of its KV memory, held by requests
    kv_tokens: int  # capacity of its KV memory
    hit_share: float | None  # of its prompt tokens since its start; None without any


@dataclass(frozen=True, slots=True)
class ReplicaSummary:
    """The router's view of one replica at one moment."""

    name: str
    url: str
    admin: str
    condition: Condition
    problem: str  # why the last poll failed; empty: it did not
    silent_seconds: float | None  # since its last state; None: there was none
    left_out_seconds: float  # until its ejection ends
    ejections: int  # in all
    attempts: int  # requests sent there since the router knows it
    retried: int  # attempts followed by one at another replica
    open_requests: int  # not answered to the end
    on_the_way: int  # open requests not yet in its state
    told: ToldSummary | None  # None without a recent state


def summarized(fleet: Fleet, view: ReplicaView) -> ReplicaSummary:
    """The present view of one of the fleet's replicas."""
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
        attempts=view.attempts,
        retried=view.retried,
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
