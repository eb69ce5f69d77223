from random import Random

import pytest

from admission.promise import Promise
from backend.scheduler.sequence import FinishReason
from gateway.telemetry.metrics.estimates import MIN_ESTIMATES, HeldWindows
from tests.gateway.telemetry.metrics_rig import Rig
from tests.gateway.telemetry.records import a_record, a_sequence, a_timeline

BY_CLASS, BY_TENANT = "sluice_estimate_recent_coverage_ratio", "sluice_tenant_estimate_coverage_ratio"


def test_estimates_are_held_against_what_came(rig: Rig) -> None:
    promise = Promise(0.016, 0.076)  # they came after 0.026 and 0.066
    rig.tell(a_record(timelines=[a_timeline(promise=promise), a_timeline()]))
    page = rig.page()
    assert page.value("sluice_estimate_error_seconds_sum", token="first", side="late") == pytest.approx(0.01)
    assert page.value("sluice_estimate_error_seconds_sum", token="last", side="early") == pytest.approx(0.01)
    assert page.value("sluice_estimate_error_seconds_count") == 2
    assert page.labels("sluice_estimate_coverage_ratio", "token") == {"first", "last"}


def tell(rig: Rig, told: float, count: int, tenant: str = "acme", **timeline: object) -> None:
    """Requests end whose first token came 0.026 s after they were queued, if it did."""
    reason = timeline.pop("finish_reason", FinishReason.STOP)
    for _ in range(count):
        sequence = a_sequence(tenant, priority_class=1)
        sequence.finish_reason = reason
        rig.tell(a_record(tenant=tenant, timelines=[a_timeline(sequence=sequence, promise=Promise(told), **timeline)]))


def test_the_newest_estimates_are_told_by_class_and_tenant(rig: Rig) -> None:
    page = rig.page()
    assert page.labels(BY_CLASS, "class") == {"interactive", "standard", "batch"}
    assert page.labels(BY_CLASS, "window") == page.labels(BY_TENANT, "window") == {"100", "300"}
    assert page.labels(BY_TENANT, "tenant") == {"other"}
    tell(rig, 0.03, MIN_ESTIMATES - 1)
    tell(rig, 0.03, 200, "bolt")
    tell(rig, 0.01, 50, "bolt")
    page, first = rig.page(), {"token": "first"}
    assert page.value(BY_TENANT, tenant="bolt", window="100", **first) == 0.5
    assert page.value(BY_TENANT, tenant="bolt", window="300", **first) == 0.8
    assert page.value(BY_TENANT, tenant="acme", window="100", **first) == 1, "too few are known"
    assert page.value(BY_CLASS, window="100", **{"class": "standard"}, **first) == 0.5
    assert page.value(BY_CLASS, window="100", **{"class": "batch"}, **first) == 1


@pytest.mark.parametrize(
    ("told", "reason", "share"),
    [
        (0.1, FinishReason.EXPIRED, 0.5),  # before its time, and never to come
        (0.05, FinishReason.CANCELLED, 0.5),  # it had waited for 0.066 s
        (0.1, FinishReason.CANCELLED, 1.0),  # it might have come in time
    ],
)
def test_a_token_that_never_came_broke_what_was_told_unless_that_is_open(
    rig: Rig, told: float, reason: FinishReason, share: float
) -> None:
    tell(rig, 0.03, MIN_ESTIMATES)
    tell(rig, told, MIN_ESTIMATES, finish_reason=reason, first_token=None)
    assert rig.page().value(BY_TENANT, tenant="acme", token="first", window="100") == share


def test_a_window_is_that_of_the_newest() -> None:
    random, held, window = Random(1), [], HeldWindows()
    for _ in range(1000):
        held.append(random.random() < 0.9)
        window.add(held[-1])
        for size in (100, 300):
            newest = held[-size:]
            assert window.share(size) == (sum(newest) / len(newest) if len(newest) >= MIN_ESTIMATES else 1)
