import json

import pytest

from admission.outcome import DeadlineInfeasible, Outcome
from backend.errors import DeviceError
from gateway import errors
from gateway.api.refusals import name_in_log, refusal_of
from gateway.errors import ApiError
from quotas.errors import (
    ConnectionLost,
    LimitExceeded,
    NeverFits,
    NotSent,
    QuotaError,
    QuotaRefused,
    StoreUnavailable,
)
from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate, Resource

TOKENS = Limit(Resource.TOKENS, 1000, Rate(60, 1000), key="ab12")
MONTH = Limit(Resource.TOKENS, 5000, Budget(BudgetPeriod.MONTH))
RUNNING = Limit(Resource.CONCURRENT_REQUESTS, 8)
KV = Limit(Resource.KV_BYTES, 2**20)


def told(error: QuotaError) -> tuple[ApiError, dict[str, object]]:
    refusal = refusal_of(error)
    return refusal, json.loads(refusal.to_body())["error"]


@pytest.mark.parametrize(
    ("estimate", "slack", "told"),
    [
        (0.0314, 0.001, "is expected in 31.4 ms and must come in 1 ms."),
        (0.0314, 7.79e-5, "is expected in 31.4 ms and must come in 0.0779 ms."),
        (4000.0, 1800.0, "is expected in 4,000 s and must come in 1,800 s."),
        (0.0314, 0.0, "is expected in 31.4 ms, and its deadline has passed."),
        (0.0314, -2e8, "is expected in 31.4 ms, and its deadline has passed."),
    ],
)
def test_a_deadline_is_told_in_units_in_which_it_is_not_none(estimate: float, slack: float, told: str) -> None:
    message = refusal_of(DeadlineInfeasible("first", estimate, slack, False, 1.0)).message
    assert message == f"The deadline cannot be met: the first token {told}"


def test_a_wait_of_an_hour_is_no_power_of_ten() -> None:
    limit = Limit(Resource.REQUESTS, 1, Rate(3600, 1))
    error = LimitExceeded(limit, 1, 0, 3600.0)
    assert str(error).endswith("it suffices in 3,600 s")
    assert "e+" not in refusal_of(error).message


@pytest.mark.parametrize(("limit", "code"), [(RUNNING, "concurrency_exceeded"), (KV, "kv_quota_exceeded")])
def test_a_limit_on_requests_in_use_is_worth_a_retry(limit: Limit, code: str) -> None:
    refusal, body = told(LimitExceeded(limit, 1, 0, None))
    assert (refusal.status, body["code"]) == (429, code)
    assert float(refusal.headers()["retry-after-ms"]) >= 1000


def test_sizes_are_told_as_policies_write_them() -> None:
    for error in (LimitExceeded(KV, 2**30, 2**16, None), NeverFits(KV, 2**30)):
        message = refusal_of(error).message
        assert "is 1MiB: this request asks for 1GiB" in message and "1048576" not in message


def test_a_limit_of_zero_is_not_blamed_on_the_length_of_the_request() -> None:
    _, body = told(NeverFits(Limit(Resource.CONCURRENT_REQUESTS, 0), 1))
    assert str(body["message"]).endswith("(0): have the limit raised.")


def test_a_store_that_cannot_tell_is_ours_to_mend() -> None:
    refusal, body = told(StoreUnavailable("redis://:secret@10.0.0.1 timed out"))
    assert (refusal.status, body["code"]) == (503, "quota_unverifiable")
    assert "secret" not in str(body)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (errors.RateLimited("m"), Outcome.REFUSED),
        (errors.QuotaUnverifiable("m"), Outcome.REFUSED),
        (errors.DeadlineUnmeetable("m", 100, 1), Outcome.REFUSED),
        (errors.DeadlineExceeded("m"), Outcome.EXPIRED),
        (errors.Preempted(), Outcome.FAILED),
        (errors.RequestTimedOut("m"), Outcome.INVALID),
        (DeviceError("m"), Outcome.FAILED),
        (ZeroDivisionError("m"), Outcome.FAILED),
    ],
)
def test_a_request_counts_by_its_error_in_every_way_of_answering(error: Exception, outcome: Outcome) -> None:
    assert refusal_of(error).outcome is outcome


def test_each_refusal_of_a_quota_has_a_name_for_the_event_log() -> None:
    assert name_in_log(LimitExceeded(MONTH, 300, 120, 10.8)) == name_in_log(NeverFits(MONTH, 5001)) == "tokens/month"
    assert name_in_log(ConnectionLost("it broke")) == "ConnectionLost"
    assert name_in_log(NotSent("nothing is connected")) == "StoreUnavailable"
    failures = [kind for kind in _below(QuotaError) if not issubclass(kind, QuotaRefused)]
    assert all(name_in_log(kind("it failed")) for kind in failures if kind.__module__ == QuotaError.__module__)


def _below(kind: type[QuotaError]) -> list[type[QuotaError]]:
    return [found for child in kind.__subclasses__() for found in (child, *_below(child))]
