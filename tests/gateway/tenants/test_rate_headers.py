import pytest

from gateway.tenants.rate_headers import RateHeaders, go_duration
from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate, Resource
from quotas.reservation import LimitState

PER_MINUTE = Limit(Resource.TOKENS, 60_000, Rate(60, 60_000))
PER_DAY = Limit(Resource.TOKENS, 1_000_000, Budget(BudgetPeriod.DAY))
REQUESTS = Limit(Resource.REQUESTS, 600, Rate(60, 100))
RUNNING = Limit(Resource.CONCURRENT_REQUESTS, 8)


def rate_headers(states: list[LimitState]) -> dict[str, str]:
    return RateHeaders([state.limit for state in states]).of(states)


def test_nothing_is_said_where_nothing_is_limited_by_time() -> None:
    assert rate_headers([]) == rate_headers([LimitState(RUNNING, 7, 0)]) == {}


def test_of_several_limits_the_smallest_share_left_is_told() -> None:
    states = [LimitState(PER_MINUTE, 45_000, 15.0), LimitState(PER_DAY, 100_000, 3600.0), LimitState(REQUESTS, 99, 0.1)]
    headers = rate_headers(states)
    assert headers["x-ratelimit-limit-tokens"] == "1000000"
    assert headers["x-ratelimit-remaining-tokens"] == "100000"
    assert headers["x-ratelimit-reset-tokens"] == "1h0m0s"
    assert headers["x-ratelimit-limit-requests"] == "100"
    assert headers["x-ratelimit-reset-requests"] == "100ms"


def test_every_limit_with_a_window_has_its_name_in_the_ietf_headers() -> None:
    headers = rate_headers([LimitState(PER_MINUTE, 5000, 12.2), LimitState(REQUESTS, 99, 0.1)])
    assert headers["ratelimit-policy"] == '"tokens/min";q=60000;w=60, "requests/min";q=100;w=10'
    assert headers["ratelimit"] == '"tokens/min";r=5000;t=12, "requests/min";r=99;t=0'


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.012, "12ms"), (1.5, "1.5s"), (59.9994, "59.999s"), (360, "6m0s"), (3661, "1h1m1s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text
