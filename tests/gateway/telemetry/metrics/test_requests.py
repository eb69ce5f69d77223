from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.outcome import Outcome
from gateway.errors import ApiError, BadRequest, DeadlineUnmeetable, InternalError, Overloaded, RateLimited
from gateway.telemetry.metrics.requests import (
    MAX_CLIENTS,
    MAX_MOMENTS,
    REQUEST_DURATION,
    LatencyTarget,
    RetryMemory,
    mean_interval,
    missed,
)
from gateway.telemetry.request_record import RequestRecord
from tests.gateway.telemetry.metrics_rig import Page, Rig
from tests.gateway.telemetry.records import a_record, a_sequence, a_timeline


def test_a_client_is_known_to_keep_to_what_it_was_told_or_not() -> None:
    memory = RetryMemory()
    memory.refused("k", 0, due=10.0)
    memory.refused("k", 0, due=20.0)
    assert memory.returned("k", 1, 12.0) is True
    assert memory.returned("k", 1, 13.0) is False
    assert memory.returned("k", 1, 14.0) is None, "both have come back"


def test_attempts_of_other_keys_and_other_numbers_are_others() -> None:
    memory = RetryMemory()
    memory.refused("k", 1, due=10.0)
    assert memory.returned("other", 2, 11.0) is None
    assert memory.returned("k", 1, 11.0) is None
    assert memory.returned("k", 2, 11.0) is True


def test_of_several_refusals_the_last_due_one_counts() -> None:
    memory = RetryMemory()
    for due in (10.0, 20.0, 30.0):
        memory.refused("k", 0, due)
    assert memory.returned("k", 1, 25.0) is True
    assert memory.returned("k", 1, 15.0) is True
    assert memory.returned("k", 1, 25.0) is False


@given(st.lists(st.tuples(st.integers(0, 9000), st.floats(0, 100)), max_size=300))
def test_it_is_bounded(told: list[tuple[int, float]]) -> None:
    memory = RetryMemory()
    for number, due in told:
        memory.refused("one", 0, due)
        memory.refused(str(number), 0, due)
    assert len(memory._due) <= MAX_CLIENTS
    assert all(len(moments) <= MAX_MOMENTS for moments in memory._due.values())


def test_the_client_told_longest_ago_is_forgotten() -> None:
    memory = RetryMemory()
    for number in range(MAX_CLIENTS + 1):
        memory.refused(str(number), 0, 0.0)
    assert memory.returned("0", 1, 1.0) is None
    assert memory.returned("1", 1, 1.0) is True


def missed_targets(
    first_token: float | None = 100.030, ended: float | None = 100.070, **targets: Any
) -> set[LatencyTarget]:
    """What it missed; it was queued at 100.004 and has 4 tokens."""
    sequence = a_sequence(**targets)
    return set(missed(a_timeline(sequence=sequence, first_token=first_token, ended=ended)))


def test_without_targets_nothing_is_missed() -> None:
    assert missed_targets() == missed_targets(first_token=None) == set()


@pytest.mark.parametrize(("target", "expected"), [(0.03, set()), (0.02, {LatencyTarget.TTFT})])
def test_the_first_token_counts_from_the_arrival(target: float, expected: set[LatencyTarget]) -> None:
    assert missed_targets(first_token_target=target) == expected


@pytest.mark.parametrize(("interval", "expected"), [(0.014, set()), (0.013, {LatencyTarget.TIME_PER_OUTPUT_TOKEN})])
def test_the_mean_gap_is_held_against_the_interval(interval: float, expected: set[LatencyTarget]) -> None:
    assert missed_targets(token_interval=interval) == expected


@pytest.mark.parametrize(
    ("deadline", "expected"),
    [
        ({"first_token_by": 100.04}, set()),
        ({"first_token_by": 100.02}, {LatencyTarget.DEADLINE}),
        ({"done_by": 100.08}, set()),
        ({"done_by": 100.06}, {LatencyTarget.DEADLINE}),
    ],
)
def test_deadlines_are_moments(deadline: dict[str, float], expected: set[LatencyTarget]) -> None:
    assert missed_targets(**deadline) == expected


def test_a_token_that_never_came_is_late() -> None:
    assert missed_targets(first_token=None, first_token_target=60.0, first_token_by=200.0) == {
        LatencyTarget.TTFT,
        LatencyTarget.DEADLINE,
    }


def test_one_token_has_no_interval() -> None:
    assert mean_interval(a_timeline(sequence=a_sequence(output=1))) is None
    assert mean_interval(a_timeline()) == pytest.approx(0.04 / 3)


DURATION = "gen_ai_server_request_duration_seconds"
TTFT = "gen_ai_server_time_to_first_token_seconds"
INTERVAL = "gen_ai_server_time_per_output_token_seconds"


def end(rig: Rig, **changes: Any) -> Page:
    rig.tell(a_record(**changes))
    return rig.page()


def refused(error: ApiError, **changes: Any) -> dict[str, Any]:
    return {"error": error, "outcome": error.outcome, "timelines": [], "first_byte": 100.0, **changes}


def test_every_outcome_is_shown_from_the_start_and_counted_with_its_class(rig: Rig) -> None:
    before = rig.page()
    assert all(before.value("sluice_requests_total", outcome=outcome) == 0 for outcome in Outcome)
    end(rig)
    page = end(rig, outcome=Outcome.FAILED, service_class=None)
    assert page.value("sluice_requests_total", outcome="completed", **{"class": "standard"}) == 1
    assert page.value("sluice_requests_total", outcome="failed") == 1


def test_requests_that_generate_nothing_are_not_counted(rig: Rig) -> None:
    assert of_requests(end(rig, operation=None, timelines=[])) == of_requests(Rig().page())


def of_requests(page: Page) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All but what the process takes of its machine, which is never twice the same."""
    return {series: value for series, value in page.samples.items() if not series[0].startswith("process_")}


@pytest.mark.parametrize(
    ("error", "labels"),
    [
        (RateLimited("", retry_after=1), {"reason": "rate", "code": "rate_limit_exceeded"}),
        (DeadlineUnmeetable("", 1, 1), {"reason": "deadline", "code": "deadline_unmeetable"}),
        (BadRequest("the secret prompt", "secret"), {"reason": "invalid", "code": "bad_request"}),
        (InternalError(""), {"reason": "error", "code": "internal_error"}),
    ],
)
def test_refusals_are_counted_by_words_that_are_there_from_the_start(
    rig: Rig, error: ApiError, labels: dict[str, str]
) -> None:
    assert rig.value("sluice_refusals_total", **labels) == 0
    page = end(rig, **refused(error))
    assert page.value("sluice_refusals_total", **labels) == 1
    assert page.samples.keys() - rig.page().samples.keys() == set()
    assert not any("secret" in value for _, pairs in rig.page().samples for _, value in pairs)


def test_the_genai_histograms_have_the_conventions_buckets_and_attributes(rig: Rig) -> None:
    assert REQUEST_DURATION[:3] == (0.01, 0.02, 0.04) and REQUEST_DURATION[-1] == 81.92
    page = end(rig)
    labels = {
        "gen_ai_operation_name": "text_completion",
        "gen_ai_request_model": "embedded",
        "gen_ai_provider_name": "sluice",
    }
    assert page.value(f"{DURATION}_sum", **labels) == pytest.approx(0.08)
    assert page.value(f"{TTFT}_sum", **labels) == pytest.approx(0.03)
    assert page.value(f"{INTERVAL}_sum", **labels) == pytest.approx(0.04 / 3)
    assert page.labels(f"{DURATION}_count", "error_type") == set(), "what ends well has no error"


def test_a_failure_has_its_type_and_only_a_duration(rig: Rig) -> None:
    page = end(rig, **refused(Overloaded("", retry_after=2)))
    page = end(rig, outcome=Outcome.DISCONNECTED)
    assert page.labels(f"{DURATION}_count", "error_type") == {"server_is_overloaded", "disconnected"}
    assert page.value(f"{TTFT}_count") == page.value(f"{INTERVAL}_count") == 0


def test_a_model_that_a_client_made_up_makes_no_series(rig: Rig) -> None:
    for number in range(5):
        page = end(rig, model=f"made-up-{number}", outcome=Outcome.INVALID)
    assert page.labels(f"{DURATION}_count", "gen_ai_request_model") == {"embedded", "_OTHER"}


def test_goodput_counts_requests_that_met_every_target(rig: Rig) -> None:
    late = a_sequence(first_token_target=0.001)
    end(rig)
    page = end(rig, timelines=[a_timeline(), a_timeline(sequence=late)])
    assert page.value("sluice_goodput_requests_total", **{"class": "standard"}) == 1
    assert page.value("sluice_slo_misses_total", target=LatencyTarget.TTFT, **{"class": "standard"}) == 1


def test_an_expired_request_missed_and_a_cancelled_one_is_not_judged(rig: Rig) -> None:
    late = a_sequence(output=0, first_token_by=100.02)
    waited = [a_timeline(sequence=late, first_token=None)]
    end(rig, timelines=waited, outcome=Outcome.DISCONNECTED)
    page = end(rig, timelines=waited, outcome=Outcome.EXPIRED)
    assert page.value("sluice_slo_misses_total", target=LatencyTarget.DEADLINE) == 1
    assert page.value("sluice_goodput_requests_total") == 0


@pytest.mark.parametrize(("began", "honoured"), [(105.0, "true"), (104.9, "false")])
def test_retries_are_held_against_what_the_client_was_told(rig: Rig, began: float, honoured: str) -> None:
    page = end(rig, **refused(RateLimited("", retry_after=5)))
    assert page.value("sluice_retry_after_seconds_sum") == 5
    page = end(rig, began=began, ended=began + 0.1, num_retries=1)
    assert page.value("sluice_retries_total", honoured=honoured) == 1
    assert page.value("sluice_retries_total") == 1


def test_a_listener_that_fails_leaves_the_others_alone(rig: Rig) -> None:
    """Metrics among them: an incomplete story is counted too."""
    bare = RequestRecord("r", "POST", "/v1/completions", a_record().trace, 100.0, 0, operation="chat")
    rig.telemetry.ended(bare, Outcome.INVALID)
    assert rig.value("sluice_requests_total", outcome="invalid") == 1
    assert rig.value(f"{DURATION}_count", error_type="invalid") == 1
