import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.core import CoreConfig
from admission.outcome import Outcome
from gateway.telemetry.metrics.labels import MAX_TENANTS
from gateway.telemetry.metrics.tenants import WINDOW_TICKS, FairnessMeter, fairness_of, jain_fairness_index
from gateway.telemetry.request_record import SequenceTimeline
from tests.gateway.telemetry.core_run import STEP
from tests.gateway.telemetry.metrics_rig import BLOCK_BYTES, Rig


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_the_index_lies_between_one_taker_and_equal_shares(shares: list[float]) -> None:
    assert 1 / len(shares) - 1e-9 <= fairness_of(shares) <= 1 + 1e-9


def test_the_index_knows_its_ends() -> None:
    assert fairness_of([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert fairness_of([3.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert fairness_of([0.0, 0.0]) == 1.0


def served(shares: FairnessMeter, rates: dict[str, float], waiting: set[str], ticks: int = WINDOW_TICKS + 1) -> float:
    for tick in range(ticks):
        shares.tick({name: 100 + tick * rate for name, rate in rates.items()}, waiting)
    return shares.index


def test_service_counts_for_its_weight() -> None:
    weights = {"a": 1.0, "b": 3.0}
    assert served(FairnessMeter(weights.__getitem__), {"a": 1, "b": 3}, {"a", "b"}) == pytest.approx(1)
    assert served(FairnessMeter(weights.__getitem__), {"a": 3, "b": 1}, {"a", "b"}) < 0.7


def test_satisfied_tenants_are_not_compared() -> None:
    assert served(FairnessMeter(lambda _: 1.0), {"a": 1, "b": 100}, {"a"}) == 1.0


def test_nothing_is_said_before_the_window_is_full() -> None:
    shares = FairnessMeter(lambda _: 1.0)
    assert served(shares, {"a": 1, "b": 0}, {"a", "b"}, ticks=WINDOW_TICKS) == 1.0
    shares.tick({"a": 120, "b": 100}, {"a", "b"})
    assert shares.index == pytest.approx(0.5)


TOTALS = ("sluice_tenant_service_seconds_total", "sluice_kv_byte_seconds_total", "sluice_tenant_tokens_total")
PER_TENANT = (
    *TOTALS, "sluice_running_sequences", "sluice_running_tokens", "sluice_waiting_sequences", "sluice_kv_bytes",
    "sluice_tenant_deficit_seconds", "sluice_tenant_requests_total", "sluice_drafted_tokens_total",
    "sluice_accepted_tokens_total",
)  # fmt: skip


def serve(rig: Rig, *timelines: SequenceTimeline) -> None:
    record = rig.record(*timelines)
    rig.run()
    rig.telemetry.ended(record, Outcome.COMPLETED)


def test_every_series_is_there_before_any_tenant_is(rig: Rig) -> None:
    page = rig.page()
    for name in PER_TENANT:
        assert page.labels(name, "tenant") == {"other"}
        assert page.value(name) == 0


def test_running_and_waiting_requests_are_told_apart(rig: Rig) -> None:
    rig.arrive("a", prompt=6, tenant="acme")
    rig.step()
    rig.arrive("b", tenant="zeta")
    page = rig.page()
    assert page.value("sluice_running_sequences", tenant="acme") == page.value("sluice_running_sequences") == 1
    assert page.value("sluice_running_tokens", tenant="acme") == 7
    assert page.value("sluice_waiting_sequences", tenant="zeta") == page.value("sluice_waiting_sequences") == 1
    assert page.value("sluice_kv_bytes", tenant="acme") == 2 * BLOCK_BYTES


def test_usage_counts_to_the_moment_and_never_goes_down(rig: Rig) -> None:
    timeline = rig.arrive("a", prompt=12, max_tokens=20)
    record = rig.record(timeline)
    seen = []
    while rig.step():
        seen.append([rig.value(name) for name in TOTALS])
    rig.telemetry.ended(record, Outcome.COMPLETED)
    seen.append([rig.value(name) for name in TOTALS])
    for values in zip(*seen, strict=True):
        assert list(values) == sorted(values)
    assert rig.value("sluice_tenant_tokens_total", tenant="acme", kind="prompt") == 12
    assert rig.value("sluice_tenant_tokens_total", tenant="acme", kind="output") == 20
    assert rig.value("sluice_kv_byte_seconds_total") == pytest.approx(
        timeline.sequence.block_table.block_seconds * BLOCK_BYTES
    )


def test_drafted_tokens_are_counted_as_those_of_an_answer() -> None:
    rig = Rig(speculate="lookup")
    timeline = rig.arrive("a", prompt=6, max_tokens=40)
    serve(rig, timeline)
    drafted, accepted = (rig.value(f"sluice_{kind}_tokens_total", tenant="acme") for kind in ("drafted", "accepted"))
    assert 10 < accepted == drafted < 40
    assert rig.value("sluice_prefill_tokens_total") == 6 and rig.value("sluice_prefill_chunks_total") == 1
    assert rig.value("sluice_decode_tokens_total") >= 39
    assert len(timeline.chunks) == 1 and timeline.num_jumped_tokens == 0
    assert rig.value("sluice_jump_forward_tokens_total") == 0


def test_prompt_tokens_that_were_told_stay_when_their_step_is_lost(rig: Rig) -> None:
    timeline = rig.arrive("a", prompt=12, max_tokens=2)
    record = rig.record(timeline)
    seen = []
    for pass_on in (lambda: rig.core.schedule(rig.now), lambda: rig.core.rollback(rig.now), rig.step, rig.run):
        pass_on()
        seen.append(rig.value("sluice_tenant_tokens_total", tenant="acme", kind="prompt"))
    rig.telemetry.ended(record, Outcome.COMPLETED)
    seen.append(rig.value("sluice_tenant_tokens_total", tenant="acme", kind="prompt"))
    assert seen == sorted(seen) and seen[0] == seen[1] > 0 and seen[-1] == 12


def test_service_is_what_steps_took(rig: Rig) -> None:
    for number in range(40):
        serve(rig, rig.arrive(str(number), prompt=12, max_tokens=20))
    page = rig.page()
    busy = page.value("sluice_device_busy_seconds_total")
    assert page.value("sluice_tenant_service_seconds_total", tenant="acme") == pytest.approx(busy, rel=0.01)
    credit = rig.core.credit("acme")
    assert page.value("sluice_tenant_deficit_seconds", tenant="acme") == pytest.approx(credit)


def test_another_order_has_service_too() -> None:
    rig = Rig(config=CoreConfig(order="fcfs"))
    serve(rig, rig.arrive("a"))
    assert rig.value("sluice_tenant_service_seconds_total", tenant="acme") > STEP / 10


def test_requests_of_a_tenant_are_counted_by_their_outcome(rig: Rig) -> None:
    for outcome in (Outcome.REFUSED, Outcome.REFUSED, Outcome.COMPLETED):
        rig.telemetry.ended(rig.record(), outcome)
    assert rig.value("sluice_tenant_requests_total", tenant="acme", outcome="refused") == 2
    assert rig.value("sluice_tenant_requests_total") == 3


def test_tenants_beyond_the_cap_are_added_up(rig: Rig) -> None:
    for number in range(MAX_TENANTS + 50):
        serve(rig, rig.arrive(str(number), prompt=4, max_tokens=2, tenant=f"tenant {number}"))
    page = rig.page()
    for name in PER_TENANT:
        assert len(page.labels(name, "tenant")) <= MAX_TENANTS + 1
    tokens = "sluice_tenant_tokens_total"
    assert page.value(tokens, tenant="other", kind="output") == 50 * 2
    assert page.value(tokens, kind="prompt") == page.value("vllm:prompt_tokens_total")


def test_fairness_is_measured_among_waiting_tenants(rig: Rig) -> None:
    tick = rig.metrics._tenants.tick
    for number in range(30):
        for tenant in ("acme", "zeta"):
            rig.arrive(f"{tenant} {number}", prompt=30, max_tokens=30, tenant=tenant)
    assert rig.value("sluice_jain_index") == 1
    for _ in range(11):
        tick()
        for _ in range(10):
            rig.step()
    assert rig.value("sluice_waiting_sequences", tenant="zeta") > 0
    assert 0.9 < rig.value("sluice_jain_index") <= 1


def test_jain_is_one_for_equals_and_one_in_n_for_a_monopoly() -> None:
    assert jain_fairness_index([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain_fairness_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_fairness_index([]) is None
