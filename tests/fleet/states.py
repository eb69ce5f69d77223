"""States of replicas, and the views that a router has of them."""

from dataclasses import replace
from typing import Any

from fleet.view import ReplicaAddress, ReplicaView
from gateway.replica.state import KVTokens, ReplicaState, StepCost, WaitingWork

IDLE = ReplicaState(
    instance="1",
    model="embedded",
    draining=False,
    running=0,
    seats=8,
    seat_seconds=0.0,
    step_seconds=0.0,
    prefill_seconds=0.0,
    token_seconds=0.001,
    bytes_per_token=4.0,
    work_seconds=0.0,
    replicas_wanted=0.0,
    step=StepCost((0.0,) * 7, 512, 0.1),
    kv=KVTokens(1000, 1000, 0),
)


def work(seconds: float, requests: int = 1) -> WaitingWork:
    """Requests that wait, half of whose time is their prompts'."""
    return WaitingWork(requests, seconds / 2, seconds)


def replica(name: str) -> ReplicaAddress:
    return ReplicaAddress(f"http://{name}:8000", f"http://{name}:8001")


def view(name: str, now: float = 0.0, **told: Any) -> ReplicaView:
    """A replica with an idle state at `now`, except for the given fields."""
    one = ReplicaView(replica(name))
    one.told(replace(IDLE, **told), now, now)
    return one
