from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.admin.findings import Answers, FleetWindow, Look, fleet_findings
from fleet.admin.summary import ReplicaSummary, ToldSummary
from fleet.view import Condition
from gateway.doctor.finding import Finding, Severity

TOLD = ToldSummary(
    instance="1",
    model="embedded",
    version="1.0",
    policy="p1",
    running=0,
    seats=8,
    waiting=0,
    work_seconds=0.0,
    kv_share=0.0,
    kv_tokens=1000,
    hit_share=None,
)
SLOW_STORE = Finding("store_slow", "the store is slow", "9 of 9 calls", "move it")


def seen(
    name: str, condition: Condition = Condition.SERVING, told: ToldSummary | None = TOLD, **fields: Any
) -> ReplicaSummary:
    healthy = ReplicaSummary(
        name=name,
        url=f"http://{name}",
        admin=f"http://{name}",
        condition=condition,
        problem="",
        silent_seconds=0.1,
        left_out_seconds=0.0,
        ejections=0,
        attempts=10,
        retried=0,
        open_requests=0,
        on_the_way=0,
        told=told,
    )
    return replace(healthy, **fields)


def works(name: str, seconds: float) -> ReplicaSummary:
    return seen(name, told=replace(TOLD, work_seconds=seconds))


def look(*replicas: ReplicaSummary, retries_left: bool = True, available: int | None = None) -> Look:
    serving = sum(one.condition is Condition.SERVING for one in replicas)
    return Look(1.0, replicas, serving if available is None else available, retries_left)


def diagnosed(
    after: Look,
    before: Look | None = None,
    own: Mapping[str, Sequence[Finding]] = {},
    problems: Mapping[str, str] = {},
) -> list[Finding]:
    """What is found, where the fleet was the same before if nothing is said of that."""
    return fleet_findings(FleetWindow(before or after, after), Answers(own, problems))


def only(found: list[Finding]) -> Finding:
    (finding,) = found
    return finding


def test_nothing_is_found_of_a_fleet_that_is_well() -> None:
    assert diagnosed(look(seen("a"), seen("b")), own={"a": [], "b": []}) == []


def test_no_replica_is_serious_and_says_what_they_do_instead() -> None:
    silent, draining = (seen("a", Condition.SILENT, None), seen("b", Condition.DRAINING))
    first, *others = diagnosed(look(silent, draining))
    assert (first.name, first.severity) == ("no_replica", Severity.SERIOUS)
    assert first.evidence == "of 2 replicas: 1 draining, 1 silent"
    assert [one.name for one in others] == ["replica_silent", "replica_draining"]
    assert only(diagnosed(look())).evidence == "the router knows of no replica"
    assert diagnosed(look(seen("a")), before=look()) == [], "it has come meanwhile"


def test_a_silent_replica_is_named_with_why_it_tells_nothing() -> None:
    silent = seen("b", Condition.SILENT, None, silent_seconds=14.2, problem="its admin port answers 401: no")
    finding = only(diagnosed(look(seen("a"), silent), problems={"b": "no answer"}))
    assert (finding.name, finding.replicas) == ("replica_silent", ("b",))
    assert finding.evidence == "told it 14.2 s ago (its admin port answers 401: no)"
    never = seen("c", Condition.SILENT, None, silent_seconds=None)
    assert only(diagnosed(look(seen("a"), silent, never))).evidence.endswith("; c: never told it")


def test_where_all_are_silent_and_requests_go_on_it_is_the_router() -> None:
    finding = only(diagnosed(look(seen("a", Condition.SILENT), seen("b", Condition.SILENT), available=2)))
    assert (finding.name, finding.severity) == ("all_silent", Severity.SERIOUS)


def test_a_replica_ejected_in_between_is_named_too() -> None:
    ejected = seen("b", Condition.EJECTED, ejections=2, left_out_seconds=3.4)
    finding = only(diagnosed(look(seen("a"), ejected)))
    assert (finding.name, finding.replicas) == ("replica_ejected", ("b",))
    assert finding.evidence == "3.4 s more, 2 times so far"
    back = replace(ejected, condition=Condition.SERVING)
    assert diagnosed(look(seen("a"), back)) == []
    assert only(diagnosed(look(seen("a"), back), look(seen("a"), seen("b")))).name == "replica_ejected"
    assert diagnosed(look(seen("a"), back), look(seen("a"))) == [], "it was not seen before"


def test_a_draining_replica_reports_its_rest_and_its_own_finding_is_not_repeated() -> None:
    draining = seen("b", Condition.DRAINING, replace(TOLD, running=2, waiting=1))
    own = {"b": [Finding("draining", "it drains", "", "")]}
    finding = only(diagnosed(look(seen("a"), draining), own=own))
    assert (finding.name, finding.evidence) == ("replica_draining", "3 requests left")


def test_more_work_than_the_others_at_both_looks_is_an_imbalance() -> None:
    uneven = look(works("a", 30.0), works("b", 2.0), works("c", 4.0))
    finding = only(diagnosed(uneven))
    assert (finding.name, finding.replicas) == ("imbalance", ("a",))
    assert finding.evidence == "30.0 s of work, where the other 2 have 3.0 s on average"
    even = look(works("a", 3.0), works("b", 2.0), works("c", 4.0))
    assert diagnosed(uneven, before=even) == []


@pytest.mark.parametrize(
    "replicas",
    [
        (works("a", 4.9), works("b", 0.0)),  # one long prompt
        (works("a", 30.0), works("b", 11.0)),
        (works("a", 30.0),),
        (works("a", 30.0), seen("b", Condition.DRAINING)),
    ],
)
def test_no_imbalance_is_found_among_these_replicas(replicas: tuple[ReplicaSummary, ...]) -> None:
    assert "imbalance" not in {one.name for one in diagnosed(look(*replicas))}


def test_replicas_that_are_not_alike_are_named_against_what_most_are() -> None:
    odd = seen("c", told=replace(TOLD, model="other", version="0.9", policy="p2"))
    found = diagnosed(look(seen("a"), seen("b"), odd))
    assert [(one.name, one.evidence) for one in found] == [
        ("models_differ", "other; 2 have embedded"),
        ("policies_differ", "p2; 2 have p1"),
        ("versions_differ", "0.9; 2 have 1.0"),
    ]
    assert {one.replicas for one in found} == {("c",)}
    assert [one.severity for one in found] == [Severity.SERIOUS, Severity.WARNING, Severity.WARNING]


def test_an_edit_of_the_policy_that_is_on_its_way_is_no_difference() -> None:
    edited = look(seen("a"), seen("b", told=replace(TOLD, policy="p2")))
    assert diagnosed(edited, before=look(seen("a"), seen("b"))) == []


def test_a_field_that_an_old_replica_lacks_is_no_difference() -> None:
    assert diagnosed(look(seen("a"), seen("b", told=replace(TOLD, version="", policy="")))) == []


def test_second_attempts_that_are_used_up_all_the_time() -> None:
    spent = look(seen("a", retried=3), seen("b"), retries_left=False)
    finding = only(diagnosed(spent))
    assert (finding.name, finding.evidence) == ("retries_spent", "tried again elsewhere: 3 of 10 at a")
    assert diagnosed(spent, before=look(seen("a"), seen("b"))) == []


def test_findings_of_replicas_come_with_their_names_and_shared_ones_once() -> None:
    local = Finding("fairness_local", "it does not know", "4.0 s ago", "see Redis")
    own = {"a": [SLOW_STORE, local], "b": [replace(SLOW_STORE, evidence="8 of 9", severity=Severity.SERIOUS)], "c": []}
    store, fairness = diagnosed(look(seen("a"), seen("b"), seen("c")), own=own)
    assert (store.replicas, store.severity) == (("a", "b"), Severity.SERIOUS)
    assert store.evidence == "a: 9 of 9 calls; b: 8 of 9"
    assert (fairness.name, fairness.replicas, fairness.evidence) == ("fairness_local", ("a",), "4.0 s ago")


def test_of_many_replicas_the_first_ones_are_told() -> None:
    names = "abcdef"
    finding = only(diagnosed(look(*map(seen, names)), own={name: [SLOW_STORE] for name in names}))
    assert finding.replicas == tuple(names)
    assert finding.evidence.endswith("c: 9 of 9 calls; and 3 more")


def test_a_replica_with_a_state_and_without_a_diagnosis() -> None:
    finding = only(diagnosed(look(seen("a"), seen("b")), own={"a": []}, problems={"b": "no answer within 8 s"}))
    assert (finding.name, finding.replicas, finding.evidence) == (
        "replica_undiagnosed",
        ("b",),
        "no answer within 8 s",
    )


def test_a_replica_that_left_the_fleet_is_not_reported() -> None:
    assert diagnosed(look(seen("a")), own={"a": [], "gone": [SLOW_STORE]}) == []
