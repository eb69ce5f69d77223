"""What is counted of requests when they end."""

from typing import Any

import pytest

from admission.outcome import Outcome
from gateway.errors import ApiError, BadRequest, DeadlineUnmeetable, InternalError, Overloaded, RateLimited
from gateway.telemetry.metrics.buckets import REQUEST_DURATION
from gateway.telemetry.metrics.requests import LatencyTarget
from gateway.telemetry.request_record import RequestRecord
from tests.gateway.telemetry.metrics_rig import Page, Rig
from tests.gateway.telemetry.records import a_record, a_sequence, a_timeline

DURATION = "gen_ai_server_request_duration_seconds"
TTFT = "gen_ai_server_time_to_first_token_seconds"
INTERVAL = "gen_ai_server_time_per_output_token_seconds"


@pytest.fixture
def rig() -> Rig:
    return Rig()


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
    assert rig.page().value("sluice_refusals_total", **labels) == 0
    page = end(rig, **refused(error))
    assert page.value("sluice_refusals_total", **labels) == 1
    assert page.samples.keys() - rig.page().samples.keys() == set()
    assert "secret" not in rig.metrics.prometheus_text().decode()


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


def test_goodput_counts_who_met_every_target(rig: Rig) -> None:
    late = a_sequence()
    late.first_token_target = 0.001
    end(rig)
    page = end(rig, timelines=[a_timeline(), a_timeline(sequence=late)])
    assert page.value("sluice_goodput_requests_total", **{"class": "standard"}) == 1
    assert page.value("sluice_slo_misses_total", target=LatencyTarget.TTFT, **{"class": "standard"}) == 1


def test_who_expired_missed_and_who_was_cancelled_is_not_judged(rig: Rig) -> None:
    late = a_sequence(output=0)
    late.first_token_by = 100.02
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
    """Metrics among them: whatever a story lacks, it is counted."""
    bare = RequestRecord("r", "POST", "/v1/completions", a_record().trace, 100.0, 0, operation="chat")
    rig.telemetry.ended(bare, Outcome.INVALID)
    page = rig.page()
    assert page.value("sluice_requests_total", outcome="invalid") == 1
    assert page.value(f"{DURATION}_count", error_type="invalid") == 1
