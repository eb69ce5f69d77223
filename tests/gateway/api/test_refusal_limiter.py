import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.refusal_limiter import (
    BURST_SECONDS,
    KEY_RATES_PER_TENANT,
    MAX_BODY_COST_SECONDS,
    MAX_DELAY_SECONDS,
    RefusalLimiter,
)
from gateway.errors import BadRequest, InvalidApiKey, Overloaded, RateLimited, TooManyRefused

RATE = 10.0
BURST = round(BURST_SECONDS * RATE)
BAD, SPENT, STRANGER = BadRequest("no."), RateLimited("wait."), InvalidApiKey("who?")


class Site:
    def __init__(self) -> None:
        self.now = 0.0
        self.rate = RefusalLimiter(RATE, lambda: self.now)

    def is_read(self, key: str = "k", tenant: str = "t") -> bool:
        try:
            self.rate.check(tenant, key)
        except TooManyRefused:
            return False
        return True

    def bad(self, key: str = "k", num_bytes: int = 0) -> bool:
        """Send a bad request; whether it was looked at."""
        if not self.is_read(key):
            return False
        self.rate.count(BAD, "t", key, "", num_bytes)
        return True


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_key_that_sends_too_many_bad_requests_is_read_again_when_time_has_paid_for_them(site: Site) -> None:
    assert [site.bad() for _ in range(BURST + 2)] == [True] * (BURST + 1) + [False]
    with pytest.raises(TooManyRefused, match=r"of your API key .* one more for 64KiB read") as refusal:
        site.rate.check("t", "k")
    assert {"retry-after", "x-sluice-dropped-reason"} <= refusal.value.headers().keys()
    assert site.is_read("other") and site.is_read(tenant="other")
    site.now += 1 / RATE
    assert site.is_read()


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2**22)), max_size=300))
def test_examined_requests_are_bounded_by_the_rate_in_any_interval(arrivals: list[tuple[float, int]]) -> None:
    site, cost = Site(), 0.0
    for pause, size in arrivals:
        site.now += pause
        before = cost
        if site.bad(num_bytes=size):
            cost += 1 + size // 65_536
        assert before <= BURST + RATE * site.now + 65


def test_no_single_key_of_a_tenant_keeps_the_others_out(site: Site) -> None:
    for _ in range(1000):
        site.bad("k")
        site.now += 0.01
    assert not site.bad("k") or not site.bad("k")
    assert site.is_read("other")


@pytest.mark.parametrize("num_keys", [3, 30])
def test_keys_of_a_tenant_that_do_nothing_else_share_its_rate_and_keep_no_other_out(site: Site, num_keys: int) -> None:
    seconds, num_read = 60, 0
    for _ in range(10 * seconds):
        num_read += sum(site.bad(f"bad-{number}") for number in range(num_keys) for _ in range(2))
        site.now += 0.1
    assert num_read <= 1.2 * KEY_RATES_PER_TENANT * RATE * seconds + BURST * num_keys
    assert site.is_read("good")
    assert site.rate.count(BAD, "t", "good", "", 0) < 1, "its own refusal is not held back by those of others for long"


def test_one_refusal_costs_what_was_read_and_no_more_than_its_part_of_the_longest_delay(site: Site) -> None:
    site.bad(num_bytes=170)
    assert site.is_read()
    site.bad(num_bytes=10**12)
    site.now += MAX_BODY_COST_SECONDS
    assert site.is_read()


def test_spent_quotas_and_our_own_faults_keep_no_key_out(site: Site) -> None:
    for _ in range(1000):
        site.rate.count(SPENT, "t", "k", "", 0)
        assert site.rate.count(Overloaded("busy."), "t", "k", "", 0) == 0
    assert site.is_read()


@pytest.mark.parametrize(("error", "tenant", "rate"), [(SPENT, "t", 2 * RATE), (STRANGER, None, RATE)])
def test_answers_that_refuse_leave_at_their_rate(
    site: Site, error: RateLimited, tenant: str | None, rate: float
) -> None:
    waits = [site.rate.count(error, tenant, "k", "10.0.0.1", 0) for _ in range(100_000)]
    burst = round(BURST_SECONDS * rate)
    assert waits[:burst] == [0.0] * burst
    assert waits[burst + 7] == pytest.approx(8 / rate)
    assert max(waits) == pytest.approx(MAX_DELAY_SECONDS)


@pytest.mark.parametrize(("error", "tenant", "rate"), [(SPENT, "t", 2 * RATE), (STRANGER, None, RATE)])
def test_a_large_body_holds_back_the_answers_after_its_own(
    site: Site, error: RateLimited, tenant: str | None, rate: float
) -> None:
    num_blocks, burst = round(10 * rate), BURST_SECONDS * rate
    waits = [site.rate.count(error, tenant, "k", "10.0.0.1", num_blocks * 65_536) for _ in range(100)]
    assert waits[0] == 0
    assert waits[1] == pytest.approx((num_blocks + 2 - burst) / rate)
    assert waits[2] == pytest.approx((2 * num_blocks + 3 - burst) / rate)
    assert waits[-1] == pytest.approx(MAX_DELAY_SECONDS)


def test_an_address_is_counted_by_itself_and_ipv6_by_its_network(site: Site) -> None:
    for number in range(1000):
        site.rate.count(STRANGER, None, None, f"2001:db8::{number:x}", 0)
    assert site.rate.count(STRANGER, None, None, "2001:db8::ffff", 0) > 1
    for _ in range(1000):
        site.rate.count(STRANGER, None, None, "::ffff:192.0.2.1", 0)
    assert site.rate.count(STRANGER, None, None, "192.0.2.1", 0) > 1
    for peer in ("2001:db8:0:1::1", "10.0.0.1", "::ffff:10.0.0.2", "fe80::1%eth0", ""):
        assert site.rate.count(STRANGER, None, None, peer, 0) == 0
    assert site.is_read()  # another client behind the same address


def test_a_million_addresses_are_not_remembered(site: Site) -> None:
    for number in range(40_000):
        site.rate.count(STRANGER, None, None, f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 0)
    assert len(site.rate._addresses._buckets) <= 16_384


def test_a_tenant_is_suspect_once_everyone_was_told(site: Site) -> None:
    told: list[str] = []

    def fail(_: str) -> None:
        raise BrokenPipeError

    site.rate.on_suspect += [fail]
    with pytest.raises(BrokenPipeError):
        site.bad()
    assert not site.rate.refused_tenants, "it is told again at the next fault"
    site.rate.on_suspect[:] = [told.append]
    site.bad()
    site.bad()
    assert told == ["t"] and site.rate.refused_tenants == {"t"}
