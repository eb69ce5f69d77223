from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.prediction import NO_REPLICA_BACKLOG, NOTHING, ReplicaBacklog, RoutedRequest, add_work, first_token_seconds
from gateway.replica.state import WaitingWork
from tests.fleet.states import IDLE, work

TENANTS = ["a", "b", "c", "d"]
seconds = st.floats(0, 100, allow_nan=False)
works = st.builds(WaitingWork, st.integers(0, 50), seconds, seconds)
waitings = st.dictionaries(st.sampled_from(TENANTS), works)
weights = st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 2.0]) for name in TENANTS})


def equal(_: str) -> float:
    return 1.0


@given(waitings, weights, seconds)
def test_at_most_all_that_waits_is_ahead_and_at_least_what_is_ones_own(
    waiting: dict[str, WaitingWork], weight: dict[str, float], own: float
) -> None:
    requests, prefill, ahead = ReplicaBacklog(waiting, weight.__getitem__).ahead("a", own)
    mine = waiting.get("a", WaitingWork(0, 0.0, 0.0))
    assert mine.requests - 1e-9 <= requests <= sum(one.requests for one in waiting.values()) + 1e-9
    assert mine.prefill_seconds - 1e-9 <= prefill <= sum(one.prefill_seconds for one in waiting.values()) + 1e-9
    assert mine.seconds - 1e-9 <= ahead <= sum(one.seconds for one in waiting.values()) + 1e-9


@given(waitings, weights, seconds, st.lists(st.tuples(st.sampled_from(TENANTS), works), max_size=5))
def test_sums_say_what_a_look_at_each_tenant_says(
    waiting: dict[str, WaitingWork], weight: dict[str, float], own: float, more: list[tuple[str, WaitingWork]]
) -> None:
    queued = add_work(waiting, more)
    mine = queued.pop("a", NOTHING)
    found = [float(mine.requests), mine.prefill_seconds, mine.seconds]
    turn = (mine.seconds + own) / weight["a"]
    for name, one in queued.items():
        if one.requests:
            share = min(1.0, turn * weight[name] / one.seconds) if one.seconds else 1.0
            found = [known + share * of for known, of in zip(found, figures(one), strict=True)]
    assert ReplicaBacklog(waiting, weight.__getitem__).ahead("a", own, more) == pytest.approx(found, abs=1e-6)


def figures(work: WaitingWork) -> tuple[float, float, float]:
    return work.requests, work.prefill_seconds, work.seconds


@given(waitings, weights, seconds, st.sampled_from(TENANTS), works)
def test_more_work_never_predicts_less_time(
    waiting: dict[str, WaitingWork], weight: dict[str, float], own: float, tenant: str, more: WaitingWork
) -> None:
    before = ReplicaBacklog(waiting, weight.__getitem__).ahead("a", own)[2]
    after = ReplicaBacklog(waiting, weight.__getitem__).ahead("a", own, [(tenant, more)])[2]
    assert after >= before * (1 - 1e-9)


@given(weights, st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_flood_counts_for_others_only_as_far_as_it_is_served_with_them(
    weight: dict[str, float], mine: float, own: float
) -> None:
    waiting = {"a": work(mine), "b": work(1e6, 1000)}
    ahead = ReplicaBacklog(waiting, weight.__getitem__).ahead("a", own)[2]
    assert ahead == pytest.approx(mine + (mine + own) * weight["b"] / weight["a"])


def test_a_request_waits_for_a_seat_only_where_none_is_left() -> None:
    request = RoutedRequest("a", 400)
    busy = replace(IDLE, running=7, prefill_seconds=0.2, step_seconds=0.01)
    assert first_token_seconds(request, busy, NO_REPLICA_BACKLOG, 0.0) == pytest.approx(0.01 + 0.2 + 0.1)
    full = replace(busy, running=8, seat_seconds=3.0)
    assert first_token_seconds(request, full, NO_REPLICA_BACKLOG, 0.0) == pytest.approx(0.01 + 3.0 + 0.1)
    assert first_token_seconds(request, full, ReplicaBacklog({"a": work(2.0)}, equal), 0.0) == pytest.approx(
        0.01 + 5.0 + 0.1
    )


def test_cached_tokens_are_not_computed_except_the_last() -> None:
    request = RoutedRequest("a", 4000)
    assert first_token_seconds(request, IDLE, NO_REPLICA_BACKLOG, 0.0) == pytest.approx(1.0)
    assert first_token_seconds(request, IDLE, NO_REPLICA_BACKLOG, 0.9) == pytest.approx(0.1)
    assert first_token_seconds(request, IDLE, NO_REPLICA_BACKLOG, 1.0) == pytest.approx(0.001)
