import re
from collections.abc import Callable
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quotas.policy import units
from quotas.policy.limit import MAX_AMOUNT, Budget, BudgetPeriod, Rate
from tests.examples import examples
from tests.quotas import policies

READERS: dict[str, Callable[[str], object]] = {
    units.COUNT: units.count,
    units.SIZE: units.size,
    units.DURATION: units.duration,
    units.RATE: units.rate,
    units.PRICE: units.price,
    units.NUMBER: units.number,
}
TRAPS = (
    "", " ", "1e400", "1e3", "nan", "NaN", ".inf", "inf", "-1", "+1", "0x10", "0o17", "017", "1:30", "yes", "true",
    "null", "~", "1_000", "1,000", "1 000", ".5", "5.", "٣", "1\n", "1\x00", "9" * 400, "k", "/min", "100k/", "1/1/min",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "amount"), [("1", 1), ("256", 256), ("20k", 20_000), ("1.5M", 1_500_000), ("2B", 2 * 10**9), ("0.5k", 500)]
)
def test_a_count_may_be_in_thousands_millions_or_billions(text: str, amount: int) -> None:
    assert units.count(text) == amount


@pytest.mark.parametrize(
    ("text", "amount"),
    [("512B", 512), ("1kB", 1000), ("2GiB", 2 * 1024**3), ("1.5MiB", 3 * 2**19), ("4TB", 4 * 10**12), ("64MiB", 2**26)],
)
def test_a_size_is_decimal_or_binary_by_its_unit(text: str, amount: int) -> None:
    assert units.size(text) == amount


@pytest.mark.parametrize(
    ("text", "seconds"), [("250ms", 0.25), ("30s", 30), ("1.5min", 90), ("2h", 7200), ("366d", 366 * 86_400), ("0s", 0)]
)
def test_a_duration_is_seconds(text: str, seconds: float) -> None:
    assert units.duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "amount", "window"),
    [
        ("600/min", 600, Rate(60, 600)),
        ("10/s", 10, Rate(1, 10)),
        ("1.5M/h", 1_500_000, Rate(3600, 1_500_000)),
        ("20k/day", 20_000, Budget(BudgetPeriod.DAY)),
        ("2B/week", 2 * 10**9, Budget(BudgetPeriod.WEEK)),
        ("50M/month", 50_000_000, Budget(BudgetPeriod.MONTH)),
    ],
)
def test_short_windows_are_rates_and_long_ones_budgets(text: str, amount: int, window: object) -> None:
    assert units.rate(text) == (amount, window)


@given(st.floats(1e-6, 1e9))
@settings(max_examples=examples(100))
def test_a_wait_is_written_with_three_digits_and_never_as_none(seconds: float) -> None:
    text, unit = units.show_wait(seconds).split(" ")
    shown = float(text.replace(",", "")) * {"s": 1, "ms": 0.001}[unit]
    assert shown == pytest.approx(seconds, rel=0.006) and "e" not in text
    assert (unit == "ms") is (seconds < 0.9995)


def test_waits_have_the_unit_that_people_read() -> None:
    waits = [7.79e-5, 0.001, 0.0314, 0.1, 0.9996, 1.0, 12.34, 30, 3600, 345_678]
    written = ["0.0779 ms", "1 ms", "31.4 ms", "100 ms", "1 s", "1 s", "12.3 s", "30 s", "3,600 s", "346,000 s"]
    assert [units.show_wait(seconds) for seconds in waits] == written


def test_a_price_of_tokens_is_exact() -> None:
    assert units.price("0.3/1M") * 10_000_000 == 3
    assert units.price("0.002/1k") == units.price("2/1M") == Decimal("0.000002")


@pytest.mark.parametrize("reader", [*READERS.values(), units.positive_duration])
@pytest.mark.parametrize("text", TRAPS)
def test_a_text_on_which_yaml_dialects_disagree_is_no_number(reader: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r"^is not "):
        reader(text)


@pytest.mark.parametrize(
    ("reader", "text", "near"),
    [
        (units.rate, "100k/mn", "100k/min"),
        (units.rate, "600/minute", "600/min"),
        (units.rate, "600 per hour", "600/h"),
        (units.rate, "600", "600/min"),
        (units.rate, "100K/min", "100k/min"),
        (units.rate, "1,000/d", "1000/day"),
        (units.rate, "5/moth", "5/month"),
        (units.count, "20K", "20k"),
        (units.count, "1_000", "1000"),
        (units.count, "007", "7"),
        (units.count, "3 million", "3M"),
        (units.size, "2Gi", "2GiB"),
        (units.size, "2gib", "2GiB"),
        (units.size, "64 MiB", "64MiB"),
        (units.duration, "30sec", "30s"),
        (units.duration, "5m", "5min"),
        (units.duration, "2 hours", "2h"),
        (units.price, "0.5/M", "0.5/1M"),
    ],
)
def test_the_near_miss_is_suggested(reader: Callable[[str], object], text: str, near: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f'did you mean "{near}"?')):
        reader(text)
    reader(near)


@pytest.mark.parametrize("text", ["0.3333333333", "1" * 17, f"{'1' * 17}.5"])
@pytest.mark.parametrize(("reader", "unit"), [(units.number, ""), (units.count, "k"), (units.rate, "/min")])
def test_too_many_digits_are_named(reader: Callable[[str], object], unit: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"too many digits: at most 16 before the point and 9 after it$"):
        reader(f"{text}{unit}")


@pytest.mark.parametrize(("reader", "text"), [(units.size, "1024"), (units.duration, "30"), (units.price, "0.5")])
def test_a_missing_unit_is_named_and_not_guessed(reader: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match="it has no unit: "):
        reader(text)


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (units.count, "0"),
        (units.count, "1.5"),
        (units.count, "2000000B"),
        (units.rate, "0/min"),
        (units.size, "1.5B"),
        (units.duration, "367d"),
        (units.positive_duration, "0ms"),
        (units.price, "2000000000/1M"),
    ],
)
def test_numbers_out_of_bounds_are_refused(reader: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r"^(is|must) "):
        reader(text)


@settings(deadline=None)
@given(st.text(max_size=20) | st.from_regex(r"[0-9]{1,3}(\.[0-9])? ?[kKmMgG/a-z]{0,6}", fullmatch=True))
def test_a_reader_takes_only_what_its_pattern_says(text: str) -> None:
    for pattern, reader in READERS.items():
        try:
            reader(text)
        except ValueError:
            continue
        assert re.fullmatch(pattern, text, re.ASCII)


@settings(deadline=None)
@given(st.integers(1, MAX_AMOUNT))
def test_counts_and_sizes_are_shown_exactly(amount: int) -> None:
    assert units.count(units.show_count(amount)) == amount
    assert units.size(units.show_size(amount)) == amount


@settings(deadline=None)
@given(policies.seconds)
def test_durations_are_shown_exactly(seconds: float) -> None:
    assert units.duration(units.show_duration(seconds)) == seconds


@settings(deadline=None)
@given(policies.prices)
def test_prices_are_shown_exactly(amount: Decimal) -> None:
    assert units.price(units.show_price(amount)) == amount


def test_numbers_are_shown_in_their_shortest_unit() -> None:
    assert [units.show_count(amount) for amount in (0, 999, 20_000, 1_500_000, 12_345)] == [
        "0", "999", "20k", "1.5M", "12345",
    ]  # fmt: skip
    assert [units.show_size(amount) for amount in (0, 1000, 1024, 2**31, 1500)] == [
        "0B",
        "1kB",
        "1KiB",
        "2GiB",
        "1500B",
    ]
    assert [units.show_duration(seconds) for seconds in (0.0, 0.5, 30.0, 3600.0, 0.0005)] == [
        "0s", "500ms", "30s", "1h", "0.5ms",
    ]  # fmt: skip


def test_a_number_has_its_noun_in_the_right_form() -> None:
    assert [units.counted(number, "key") for number in (0, 1, 2000)] == ["0 keys", "1 key", "2,000 keys"]
    assert [units.counted(number, "class") for number in (1, 3)] == ["1 class", "3 classes"]
