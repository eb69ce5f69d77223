"""Numbers as people write them in policies (100k/min, 2GiB, 30s, 0.5/1M), read exactly and written back shortest.

The readers raise `ValueError` with the end of a sentence that begins with the text: `is not a rate such as ...`.
Numbers are plain decimals. Signs, exponents, leading zeros, hexadecimal and sexagesimal forms are refused, because
YAML dialects disagree on what they mean.
"""

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from difflib import get_close_matches
from functools import lru_cache

from quotas.policy.limit import (
    MAX_AMOUNT,
    MAX_RATE,
    NANOS,
    PER_SESSION,
    RATE_UNITS,
    Budget,
    BudgetPeriod,
    Limit,
    PerSession,
    Rate,
    Resource,
)
from quotas.policy.problems import listed, quoted

COUNTS = {"": Decimal(1), "k": Decimal(10**3), "M": Decimal(10**6), "B": Decimal(10**9)}
SIZES = {name: Decimal(1000**power) for power, name in enumerate(("B", "kB", "MB", "GB", "TB"))} | {
    name: Decimal(1024**power) for power, name in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1)
}
DURATIONS = {"ms": Decimal("0.001"), "s": Decimal(1), "min": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
PER_TOKENS = {"/1k": Decimal("1e-3"), "/1M": Decimal("1e-6")}
WINDOWS = (*RATE_UNITS, *(period.value for period in BudgetPeriod), PER_SESSION.unit)

_CACHED_TEXTS = 4096  # texts of each kind: those of thousands of tenants are mostly alike
MAX_SECONDS = 366 * 86_400
MAX_PRICE = 1000  # of one token, in any currency

NUMBER = r"(?:0|[1-9][0-9]{0,15})(?:\.[0-9]{1,9})?"  # fits a Decimal of 28 digits with every unit


def _pattern(units: Iterable[str]) -> str:
    return f"{NUMBER}(?:{'|'.join(sorted(units, key=len, reverse=True))})"


COUNT = _pattern(COUNTS)
SIZE = _pattern(SIZES)
DURATION = _pattern(DURATIONS)
RATE = f"{COUNT}/(?:{'|'.join(WINDOWS)})"
_RATE = re.compile(RATE)
_WITH_UNIT = re.compile(f"({NUMBER})(.*)")
_BUDGETS: dict[str, Budget | PerSession] = {period.value: Budget(period) for period in BudgetPeriod}
_BUDGETS[PER_SESSION.unit] = PER_SESSION
PRICE = _pattern(PER_TOKENS)
PERCENT = "[1-9][0-9]{0,2}%"
SHARE = r"0(?:\.[0-9]{1,4})?|1(?:\.0{1,4})?"
MONEY = {unit: NANOS * scale for unit, scale in COUNTS.items() if unit != "B"}
MONEY_BUDGET = f"{_pattern(MONEY)}/(?:{'|'.join(_BUDGETS)})"
_MONEY = re.compile(MONEY_BUDGET)

_NOT_A_COUNT = "is not a whole number such as 256, 20k or 1.5M"
_NOT_A_SIZE = "is not a size such as 512MiB or 2GiB"
_NOT_A_DURATION = "is not a duration such as 250ms, 30s or 5min"
_NOT_A_RATE = "is not a rate such as 100k/min or 50M/month"
_NOT_MONEY = "is not an amount of money such as 100/month or 12.50/day"
_NOT_A_PRICE = "is not a price such as 0.5/1M or 0.002/1k"

_LENIENT = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([^0-9].*)?", re.DOTALL)
_LENIENT_RATE = re.compile(r"([^/]*?)\s*(?:(?:/|\bper\b)\s*(.*))?", re.DOTALL)
_SYNONYMS = (
    {"s", "sec", "secs", "second", "seconds"},
    {"min", "m", "mn", "mins", "minute", "minutes"},
    {"h", "hr", "hrs", "hour", "hours"},
    {"d", "day", "days", "daily"},
    {"week", "w", "wk", "weeks", "weekly"},
    {"month", "mo", "months", "monthly"},
    {"k", "thousand", "t"},
    {"m", "million", "mio"},
    {"b", "billion", "bn", "g"},
)


@lru_cache(_CACHED_TEXTS)
def number(text: str) -> float:
    if not re.fullmatch(NUMBER, text):
        raise ValueError(f"is not a number such as 1 or 2.5{_too_long(text)}")
    return float(text)


@lru_cache(_CACHED_TEXTS)
def count(text: str, least: int = 1, most: int = MAX_AMOUNT) -> int:
    return _whole(text, COUNTS, _NOT_A_COUNT, least, most)


@lru_cache(_CACHED_TEXTS)
def size(text: str, least: int = 1) -> int:
    """Read a size in bytes, such as 2GiB."""
    return _whole(text, SIZES, _NOT_A_SIZE, least)


@lru_cache(_CACHED_TEXTS)
def duration(text: str) -> float:
    """Read a duration in seconds; zero needs a unit, as 0s."""
    seconds = _scaled(text, DURATIONS, _NOT_A_DURATION)
    if seconds > MAX_SECONDS:
        raise ValueError(f"is above the longest duration, {MAX_SECONDS // 86_400}d")
    return float(seconds)


def positive_duration(text: str) -> float:
    seconds = duration(text)
    if not seconds:
        raise ValueError("must be above zero")
    return seconds


@lru_cache(_CACHED_TEXTS)
def rate(text: str) -> tuple[int, Rate | Budget | PerSession]:
    """Read an amount and its window. The burst of a rate is the amount itself."""
    if not _RATE.fullmatch(text):
        raise ValueError(f"{_NOT_A_RATE}{_too_long(text) or _near_rate(text)}")
    amount_text, _, unit = text.partition("/")
    if unit in RATE_UNITS:
        amount = burst(amount_text)
        return amount, Rate(RATE_UNITS[unit], amount)
    return count(amount_text), _BUDGETS[unit]


@lru_cache(_CACHED_TEXTS)
def budget_of_money(text: str) -> tuple[int, Budget | PerSession]:
    """Read an amount of money in billionths, and its period."""
    if not _MONEY.fullmatch(text):
        raise ValueError(f"{_NOT_MONEY}{_too_long(text)}")
    amount_text, _, unit = text.partition("/")
    amount = int(_scaled(amount_text, MONEY, _NOT_MONEY))  # `NUMBER` has nine decimals at most
    if not 1 <= amount <= MAX_AMOUNT:
        raise ValueError(f"is not within {show_money(1)} and {show_money(MAX_AMOUNT)}")
    return amount, _BUDGETS[unit]


@lru_cache(_CACHED_TEXTS)
def percent(text: str) -> int:
    """Read a share such as 80%, which may be above the whole."""
    if not re.fullmatch(PERCENT, text):
        raise ValueError("is not a share such as 80%, from 1% to 999%")
    return int(text[:-1])


def burst(text: str) -> int:
    """Read the burst of a rate, or its amount, which has the same bound."""
    return _whole(text, COUNTS, _NOT_A_COUNT, least=1, most=MAX_RATE)


@lru_cache(_CACHED_TEXTS)
def price(text: str) -> Decimal:
    """Read the price of one token."""
    amount = _scaled(text, PER_TOKENS, _NOT_A_PRICE)
    if amount > MAX_PRICE:
        raise ValueError(f"is above the highest price, {MAX_PRICE}M/1M")
    return amount.normalize()


def share(text: str) -> Decimal:
    """Read a share of a price."""
    if not re.fullmatch(SHARE, text):
        raise ValueError("is no share, such as 0.5: a number from 0 to 1 with four decimals at most")
    return Decimal(text).normalize()


def show_share(share: Decimal) -> str:
    return f"{share:f}"


def show_number(value: float) -> str:
    return f"{value!r}".removesuffix(".0")


def show_count(amount: int) -> str:
    """Write a count with at most one decimal, such as 1.5M, 20k or 1234."""
    fitting = (unit for unit in ("B", "M", "k") if amount >= COUNTS[unit] and amount * 10 % COUNTS[unit] == 0)
    unit = next(fitting, "")
    return f"{_plain(amount / COUNTS[unit])}{unit}"


def show_money(amount: int) -> str:
    """Write an amount in billionths, with at least cents where it is no whole number: 100, 12.50, 0.000001."""
    whole, _, digits = _plain(Decimal(amount) / NANOS).partition(".")
    return f"{whole}.{digits:0<2}" if digits else whole


def show_amount(limit: Limit, amount: int) -> str:
    """Write an amount of a limit with its unit, if it has one."""
    match limit.resource:
        case Resource.KV_BYTES:
            return show_size(amount)
        case Resource.COST:
            return f"{show_money(amount)} {limit.currency}"
    return str(amount)


def counted(number: int, noun: str) -> str:
    """Write a number with its noun in the right form: 1 key, 2,000 keys, 3 classes."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def show_size(amount: int) -> str:
    return min((f"{amount // int(scale)}{unit}" for unit, scale in _dividing(amount, SIZES)), key=len)


def show_duration(seconds: float) -> str:
    exact = Decimal(repr(seconds))
    whole = [f"{_plain(exact / scale)}{unit}" for unit, scale in _dividing(exact, DURATIONS)]
    fractions = [f"{_plain(exact)}s", f"{_plain(exact * 1000)}ms"]
    return min([*whole, *fractions], key=lambda text: ("." in text, len(text)))


def show_wait(seconds: float) -> str:
    """Write a measured duration with three digits: 31.4 ms, 12 s, 3,600 s."""
    value, unit = (seconds, "s") if seconds >= 0.9995 else (1000 * seconds, "ms")
    return f"{float(f'{value:.3g}'):,.15g} {unit}"


def show_price(amount: Decimal) -> str:
    return f"{_plain(amount * 1_000_000)}/1M"


def _whole(text: str, units: Mapping[str, Decimal], complaint: str, least: int, most: int = MAX_AMOUNT) -> int:
    amount = _scaled(text, units, complaint)
    whole = int(amount)
    if amount != whole:
        raise ValueError(complaint)
    if not least <= whole <= most:
        show = show_count if units is COUNTS else show_size
        raise ValueError(f"is not within {show(least)} and {show(most)}")
    return whole


def _scaled(text: str, units: Mapping[str, Decimal], complaint: str) -> Decimal:
    match = _WITH_UNIT.fullmatch(text)
    if not match or match[2] not in units:
        raise ValueError(f"{complaint}{_too_long(text) or _near(text, units)}")
    return Decimal(match[1]) * units[match[2]]


def _too_long(text: str) -> str:
    """The end of a sentence about a number with too many digits, else an empty text."""
    too_long = re.search(r"[0-9]{17}|\.[0-9]{10}", text)
    return "; it has too many digits: at most 16 before the point and 9 after it" if too_long else ""


def _near(text: str, units: Iterable[str]) -> str:
    match = _LENIENT.fullmatch(text.strip()[:80])
    if match and not match[2] and "" not in units:
        return f"; it has no unit: {listed(units)}"
    meant = _meant(text, units)
    return f"; did you mean {quoted(meant)}?" if meant and meant != text else ""


def _near_rate(text: str) -> str:
    match = _LENIENT_RATE.fullmatch(text.strip()[:80])
    if not match:
        return ""
    amount, unit = _meant(match[1], COUNTS), _nearest(match[2] or "min", WINDOWS)
    is_meant = amount and unit and _scaled(amount, COUNTS, "")  # zero is no rate either
    return f"; did you mean {quoted(f'{amount}/{unit}')}?" if is_meant else ""


def _meant(text: str, units: Iterable[str]) -> str | None:
    """The number with one of these units that the text is probably a typing error for, or None."""
    match = _LENIENT.fullmatch(text.strip()[:80])
    unit = _nearest((match[2] or "").strip(), units) if match else None
    meant = f"{re.sub(r'[_,]|^0+(?=[0-9])', '', match[1])}{unit}" if match and unit is not None else ""
    return meant if re.fullmatch(_pattern(units), meant) else None


def _nearest(unit: str, units: Iterable[str]) -> str | None:
    """The unit that this one resembles: another case, another word, a missing B, or a typing error."""
    folded = {name.lower(): name for name in units}
    words = [unit.lower(), f"{unit.lower()}b", *(word for same in _SYNONYMS if unit.lower() in same for word in same)]
    for word in words if unit else [""]:
        if word in folded:
            return folded[word]
    near = get_close_matches(unit.lower(), list(filter(None, folded)), n=1)
    return folded[near[0]] if near else None


def _dividing(amount: int | Decimal, units: Mapping[str, Decimal]) -> list[tuple[str, Decimal]]:
    return [(unit, scale) for unit, scale in units.items() if amount % scale == 0]


def _plain(amount: Decimal) -> str:
    text = f"{amount:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
