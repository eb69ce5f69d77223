"""Periods of budgets begin where the calendar of their zone has them, in the store's scripts as in Python."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from quotas.policy.limit import QUARTER_MICROSECONDS, Budget, BudgetPeriod, Calendar, Limit, Resource
from quotas.store.account import QuotaAccount
from quotas.store.scripts import LUA, ScriptRunner
from quotas.store.zone_offsets import offsets_between
from tests.examples import examples
from tests.quotas.store_model import stretch

ZONES = (
    *("UTC", "Europe/Berlin", "America/New_York", "America/Havana", "America/Sao_Paulo", "Australia/Lord_Howe"),
    *("Asia/Kathmandu", "Asia/Beirut", "Africa/Cairo", "Pacific/Chatham", "America/Scoresbysund", "Africa/Casablanca"),
)  # among them some whose clocks change at midnight, by half an hour, or twice around Ramadan
QUARTERS_PER_YEAR = 35_064
FIRST, LAST = 50 * QUARTERS_PER_YEAR, 62 * QUARTERS_PER_YEAR  # 2020 to 2031
FIRST_DAY = "\n".join([(LUA / "level.lua").read_text(), "return {int(first_day(ARGV[1], tonumber(ARGV[2])))}"])

budgets = st.builds(
    Budget, st.sampled_from(BudgetPeriod), st.builds(Calendar, st.sampled_from(ZONES), st.integers(0, 6))
)


@st.composite
def quarters_near_changes(draw: st.DrawFn) -> tuple[Budget, int]:
    """A budget, and a quarter of an hour within two days of a change of its clocks."""
    budget = draw(budgets)
    words = offsets_between(budget.calendar.time_zone, FIRST // 96, LAST // 96).split(",")
    moments = [int(word.partition(":")[0]) for word in words[1:]] or [(FIRST + LAST) // 2]
    return budget, draw(st.sampled_from(moments)) + draw(st.integers(-200, 200))


def of_any_time(one: Budget) -> st.SearchStrategy[tuple[Budget, int]]:
    return st.tuples(st.just(one), st.integers(FIRST, LAST))


near_or_far = quarters_near_changes() | budgets.flatmap(of_any_time)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(near_or_far)
async def test_the_scripts_begin_periods_where_the_calendar_does(
    runner: ScriptRunner, when: tuple[Budget, int]
) -> None:
    budget, quarter = when
    account = QuotaAccount("t", None, (Limit(Resource.TOKENS, 1, budget),), "0", 30.0)
    (_, _, (window,), *_) = account._columns()
    assert isinstance(window, str)
    answer = await runner.client.execute(b"EVAL", FIRST_DAY.encode(), b"0", window.encode(), b"%d" % quarter)
    assert int(answer[0]) == budget.first_day(quarter)


@settings(max_examples=examples(150), deadline=None)
@given(near_or_far)
def test_a_period_ends_at_the_first_moment_of_the_next_one(when: tuple[Budget, int]) -> None:
    budget, quarter = when
    now = quarter * QUARTER_MICROSECONDS
    end = round(budget.end(now) * 1e6)
    assert end > now
    assert stretch(budget, end - 1) == stretch(budget, now) != stretch(budget, end)
    assert budget.first_day(end // QUARTER_MICROSECONDS - 1) == budget.first_day(quarter)
    assert budget.first_day(end // QUARTER_MICROSECONDS) > budget.first_day(quarter)
    began = budget.first_day(quarter)
    assert datetime.fromtimestamp(began * 86_400, UTC).weekday() == budget.calendar.week_starts or (
        budget.period is not BudgetPeriod.WEEK
    )


def test_each_change_of_a_zones_clocks_has_its_quarter_of_an_hour() -> None:
    first, last = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) // 86_400 for year in (2026, 2027))
    spring, autumn = (int(datetime(2026, *when, tzinfo=UTC).timestamp()) // 900 for when in ((3, 8, 7), (11, 1, 6)))
    assert offsets_between("America/New_York", first, last) == f"-20,{spring}:-16,{autumn}:-20"
    spring, autumn = (int(datetime(2026, *when, tzinfo=UTC).timestamp()) // 900 for when in ((3, 29, 1), (10, 25, 1)))
    assert offsets_between("Europe/London", first, last) == f"0,{spring}:4,{autumn}:0"
    assert offsets_between("Asia/Kathmandu", first, last) == "23"


def test_days_of_23_and_25_hours() -> None:
    day = Budget(BudgetPeriod.DAY, Calendar("Europe/Berlin"))
    for local, hours in (("2026-03-29", 23), ("2026-10-25", 25), ("2026-07-01", 24)):
        start = datetime.fromisoformat(local).replace(tzinfo=ZoneInfo("Europe/Berlin"))
        begin = round(start.timestamp() * 1e6)
        assert day.end(begin) - start.timestamp() == hours * 3600
        assert day.end(begin - 1) == start.timestamp()


@given(st.integers(FIRST, LAST), st.integers(0, 6))
def test_a_week_has_seven_days_from_its_first_weekday_on(quarter: int, week_starts: int) -> None:
    budget = Budget(BudgetPeriod.WEEK, Calendar("UTC", week_starts))
    first = datetime.fromtimestamp(budget.first_day(quarter) * 86_400, UTC)
    now = datetime.fromtimestamp(quarter * 900, UTC)
    assume(now.year < 2032)
    assert first.weekday() == week_starts and timedelta() <= now - first < timedelta(7)
