from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.outcome import Outcome
from gateway.errors import RateLimited
from gateway.telemetry.request_record import RequestRecord, TraceContext, trace_context
from gateway.telemetry.tracing.sampler import (
    BURST_SECONDS,
    MAX_TENANTS,
    TENANT_SHARE,
    SamplingReason,
    TraceSampler,
    longest_wait,
)
from tests.gateway.telemetry.records import a_record, a_sequence, a_timeline

OWN = TraceContext(2**127, 1)
SAMPLED = TraceContext(2**127, 1, parent_id=2, client_samples=True)
UNSAMPLED = TraceContext(2**127, 1, parent_id=2, client_samples=False)


def sampler(ratio: float = 0.0, most: float = 1000.0) -> TraceSampler:
    return TraceSampler(ratio, slow_seconds=2.0, most_per_second=most)


def at(moment: float, **changes: Any) -> RequestRecord:
    """A story that ended then and took as long as any."""
    return a_record(began=moment - 0.08, ended=moment, timelines=[], **changes)


@pytest.mark.parametrize(("trace", "reason"), [(OWN, None), (UNSAMPLED, None), (SAMPLED, SamplingReason.CLIENT)])
def test_a_client_decides_for_its_own_trace(trace: TraceContext, reason: SamplingReason | None) -> None:
    assert sampler().reason_to_trace(a_record(trace=trace)) is reason


def test_the_ratio_decides_where_no_client_did() -> None:
    half = sampler(0.5)
    assert half.reason_to_trace(a_record(trace=replace(OWN, trace_id=2**63 - 1))) is SamplingReason.RATIO
    assert half.reason_to_trace(a_record(trace=replace(OWN, trace_id=2**63))) is None
    assert half.reason_to_trace(a_record(trace=replace(UNSAMPLED, trace_id=1))) is None


def test_every_request_is_traced_at_a_ratio_of_one() -> None:
    everything = sampler(1.0)
    assert all(everything.reason_to_trace(a_record(trace=trace_context(None, None))) for _ in range(100))


@pytest.mark.parametrize("trace", [OWN, UNSAMPLED])
def test_errors_are_traced_against_the_clients_decision(trace: TraceContext) -> None:
    refused = a_record(trace=trace, status=429, outcome=Outcome.REFUSED, error=RateLimited("no"))
    assert sampler().reason_to_trace(refused) is SamplingReason.ERROR
    assert sampler().reason_to_trace(a_record(trace=trace, outcome=Outcome.FAILED)) is SamplingReason.ERROR
    assert sampler().reason_to_trace(a_record(trace=trace, outcome=Outcome.DISCONNECTED)) is None


def test_a_late_first_token_is_slow_and_a_long_answer_is_not() -> None:
    late = a_timeline(first_token=102.1, ended=102.2)
    assert sampler().reason_to_trace(a_record(trace=UNSAMPLED, timelines=[late], ended=102.2)) is SamplingReason.SLOW
    long = a_timeline(first_token=100.1, ended=130.0)
    assert sampler().reason_to_trace(a_record(trace=UNSAMPLED, timelines=[long], ended=130.0)) is None


def test_waits_for_memory_and_for_the_client_are_waits() -> None:
    assert longest_wait(a_record()) == pytest.approx(0.03)
    preempted = a_timeline(preempted=[100.04, 101.0], resumed=[100.05, 104.0], ended=105.0)
    assert longest_wait(a_record(timelines=[preempted], ended=105.0)) == pytest.approx(3.0)
    never_back = a_timeline(preempted=[100.04], resumed=[], ended=105.0)
    assert longest_wait(a_record(timelines=[never_back], ended=105.0)) == pytest.approx(4.96)
    assert longest_wait(a_record(timelines=[a_timeline(ended=101.0)], ended=107.0)) == pytest.approx(6.0)
    assert longest_wait(a_record(timelines=[], ended=109.0)) == pytest.approx(9.0)


def test_traces_that_are_not_made_for_the_cap_are_counted() -> None:
    capped = sampler(most=4)
    taken = sum(capped.reason_to_trace(at(1.0, trace=SAMPLED)) is not None for _ in range(10))
    assert taken + capped.num_capped == 10 and capped.num_capped > 0


def test_one_tenant_cannot_use_up_what_others_may_have() -> None:
    capped = sampler(most=40)
    for _ in range(1000):
        capped.reason_to_trace(at(1.0, tenant="noisy", trace=SAMPLED))
    assert capped.reason_to_trace(at(1.0, tenant="quiet", trace=SAMPLED)) is SamplingReason.CLIENT


def test_failures_are_traced_while_clients_ask_for_more_than_they_get() -> None:
    capped = sampler(most=40)
    for tenth in range(100):
        for _ in range(20):
            capped.reason_to_trace(at(tenth / 10, tenant=f"t{tenth % 7}", trace=SAMPLED))
        failed = at(tenth / 10, tenant=f"t{tenth % 7}", outcome=Outcome.FAILED)
        assert capped.reason_to_trace(failed) is SamplingReason.ERROR


def test_probes_are_not_traced() -> None:
    assert sampler(1.0).reason_to_trace(a_record(tenant=None, path="/livez", timelines=[])) is None


def test_tenants_without_number_are_not_remembered() -> None:
    capped = sampler(most=1e6)
    for number in range(MAX_TENANTS + 100):
        capped.reason_to_trace(at(1.0, tenant=str(number), trace=SAMPLED))
    assert len(capped._tenants) <= MAX_TENANTS


def test_a_spent_allowance_is_not_forgotten_for_refilled_ones() -> None:
    capped = sampler(most=40)
    for number in range(MAX_TENANTS):
        capped.reason_to_trace(at(number, tenant=str(number), trace=SAMPLED))
    while capped.reason_to_trace(at(MAX_TENANTS, tenant="0", outcome=Outcome.FAILED)):
        pass
    assert capped.reason_to_trace(at(MAX_TENANTS, tenant="new", outcome=Outcome.FAILED)) is SamplingReason.ERROR
    assert capped.reason_to_trace(at(MAX_TENANTS, tenant="0", outcome=Outcome.FAILED)) is None


moments = st.lists(st.floats(0, 3), min_size=1, max_size=300).map(sorted)
kinds = st.sampled_from([Outcome.COMPLETED, Outcome.FAILED])


@given(moments, st.floats(0.5, 50), st.data())
def test_no_stretch_of_time_has_more_traces_than_its_allowance(
    ends: list[float], most: float, data: st.DataObject
) -> None:
    capped = sampler(1.0, most)
    taken: list[tuple[float, str]] = []
    for end in ends:
        tenant = data.draw(st.sampled_from("ab"))
        record = at(end, tenant=tenant, trace=SAMPLED, outcome=data.draw(kinds))
        if capped.reason_to_trace(record):
            taken.append((end, tenant))
    for index, (since, _) in enumerate(taken):
        for until_index, (until, tenant) in enumerate(taken[index:], index):
            stretch = taken[index : until_index + 1]
            assert len(stretch) <= max(1.0, most * BURST_SECONDS) + most * (until - since) + 1e-6
            rate = most * TENANT_SHARE
            of_tenant = sum(name == tenant for _, name in stretch)
            assert of_tenant <= max(1.0, rate * BURST_SECONDS) + rate * (until - since) + 1e-6


def test_the_decision_holds_no_sequence_to_be_there() -> None:
    assert (
        sampler().reason_to_trace(a_record(timelines=[a_timeline(sequence=a_sequence(), first_token=None)], trace=OWN))
        is None
    )
