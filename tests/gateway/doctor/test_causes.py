from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.doctor.causes import EXPLAINS, ranked
from gateway.doctor.finding import Finding, Severity
from gateway.doctor.findings import _JUDGES, findings
from tests.gateway.doctor.snapshots import BEFORE, HEALTHY, snapshot


def found(name: str, serious: bool = False, replicas: str = "") -> Finding:
    severity = Severity.SERIOUS if serious else Severity.WARNING
    return Finding(name, f"{name} it is", "seen", "mend it", severity, tuple(replicas))


def told(*those: Finding) -> list[tuple[str, str]]:
    return [(finding.name, finding.cause) for finding in ranked(those)]


def test_consequences_of_full_memory_stand_behind_it() -> None:
    assert told(
        found("slow_planning"),
        found("above_target_standard"),
        found("small_batches"),
        found("preemptions"),
        found("thrashing"),
        found("late_loop"),
        found("promises_broken"),
    ) == [
        ("small_batches", ""),
        ("above_target_standard", "small_batches"),
        ("preemptions", "small_batches"),
        ("thrashing", "small_batches"),
        ("promises_broken", "small_batches"),
        ("late_loop", ""),
        ("slow_planning", "late_loop"),
    ]


def test_the_cause_of_a_cause_explains_what_that_explains() -> None:
    assert told(found("above_target_batch"), found("small_batches"), found("starving_floor")) == [
        ("starving_floor", ""), ("above_target_batch", "starving_floor"), ("small_batches", "starving_floor"),
    ]  # fmt: skip


def test_a_warning_that_explains_what_is_serious_comes_before_warnings_alone() -> None:
    assert told(found("draining"), found("flooding_tenant"), found("above_target_batch", serious=True)) == [
        ("flooding_tenant", ""), ("above_target_batch", "flooding_tenant"), ("draining", ""),
    ]  # fmt: skip


def test_of_classes_that_wait_too_long_one_stands_for_all() -> None:
    assert told(found("above_target_a"), found("above_target_b", serious=True), found("promises_broken")) == [
        ("above_target_b", ""), ("above_target_a", "above_target_b"), ("promises_broken", "above_target_b"),
    ]  # fmt: skip


def test_a_trouble_of_one_replica_explains_none_of_another() -> None:
    late, off, drift = (
        found("late_loop", False, "ab"),
        found("promises_broken", False, "bc"),
        found("prices_off", False, "c"),
    )
    assert told(late, off, drift) == [("late_loop", ""), ("promises_broken", "late_loop"), ("prices_off", "")]


NAMES = [*EXPLAINS, "above_target_a", "prices_off"]
FOUND = st.builds(found, st.sampled_from(NAMES), st.booleans(), st.sampled_from(["a", "b", "ab"]))


@given(st.lists(FOUND, unique=True, max_size=8))
def test_each_finding_is_told_once_and_behind_its_cause(those: list[Finding]) -> None:
    told = ranked(those)
    assert ranked(told) == told
    assert sorted(map(str, those)) == sorted(str(replace(finding, cause="")) for finding in told)
    root = ""
    for finding in told:
        root = root if finding.cause else finding.name
        assert finding.cause in ("", root)


@pytest.mark.parametrize(("refused", "cause"), [("acme", "flooding_tenant"), ("bolt", "")])
def test_a_flood_of_one_tenant_explains_no_refusals_of_another(refused: str, cause: str) -> None:
    flood = replace(found("flooding_tenant"), tenant="acme")
    refusals = replace(found("refused_tenant"), tenant=refused)
    assert told(flood, refusals) == [("flooding_tenant", ""), ("refused_tenant", cause)]


def test_troubles_that_have_nothing_to_do_with_each_other_stay_apart() -> None:
    assert told(found("lost_telemetry"), found("invalid_policy", serious=True), found("slow_clients")) == [
        ("invalid_policy", ""), ("lost_telemetry", ""), ("slow_clients", ""),
    ]  # fmt: skip


def test_nothing_explains_what_explains_it() -> None:
    kinds = list(EXPLAINS)
    for rank, (kind, explained) in enumerate(EXPLAINS.items()):
        for other in explained:
            assert other not in kinds[:rank], f"{kind} explains {other}, which stands above it"


def test_a_cause_explains_only_existing_findings() -> None:
    """By the names of the functions that find them, but for a few that are called otherwise."""
    names = {judge.__name__ for judge in _JUDGES}
    otherwise = {"device_stalled": "stalled", "flooding_tenant": "flood_of_work", "refused_tenant": "flood_of_refusals"}
    known = {*EXPLAINS, *(name for explained in EXPLAINS.values() for name in explained)} - {"above_target"}
    assert {otherwise.get(name, name) for name in known} <= names


@pytest.mark.parametrize("cause", ["", "small_batches"])
def test_a_finding_is_told_and_read_with_its_cause(cause: str) -> None:
    one = Finding("preemptions", "it is", "seen", "mend it", Severity.WARNING, ("a",), cause, cause and "acme")
    assert Finding.of(one.to_json()) == one


def test_findings_of_a_gateway_are_ranked() -> None:
    late = HEALTHY | {"sluice_loop_late_seconds_total": 3.0, "sluice_price_drift_ratio": 0.9}
    before = snapshot(1.0, BEFORE | {"sluice_price_drift_ratio": 0.9})
    assert [(one.name, one.cause) for one in findings(before, snapshot(6.0, late))] == [
        ("late_loop", ""), ("prices_off", "late_loop"),
    ]  # fmt: skip
