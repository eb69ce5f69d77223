"""Reads the limits of tenants and keys from trees of text. Every mistake is noted, and the limit left out."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter

from quotas.policy import units, words
from quotas.policy.limit import (
    HELD,
    TENANT_ONLY,
    UTC_CALENDAR,
    WEEKDAYS,
    Alert,
    Budget,
    BudgetPeriod,
    Calendar,
    Limit,
    PerSession,
    Rate,
    Resource,
    TokenPrices,
    Window,
)
from quotas.policy.policy import Price, token_prices
from quotas.policy.problems import listed
from quotas.policy.schema import UNLIMITED, fields_of
from quotas.policy.section import Section
from quotas.policy.yaml_nodes import Fields, Items, Node, Scalar

MAX_ALERTS = 8  # of one budget
BUDGET_FIELDS = ("budget", "soft", "alerts")
ReadWindow = Callable[[str], tuple[int, Rate | Budget | PerSession]]
Amount = tuple[int, Window, tuple[Alert, ...], bool]
"""One limit of a resource as it is written: the amount, its window, a budget's alerts, and whether it is soft."""

_RESOURCES = {resource.value: resource for resource in Resource}
_RANKS = {resource: rank for rank, resource in enumerate(Resource)}


def read_limits(
    section: Section | None,
    key: str | None = None,
    inherited: tuple[Limit, ...] = (),
    calendar: Calendar = UTC_CALENDAR,
    team: str | None = None,
) -> tuple[Limit, ...]:
    """The limits of the section, in a canonical order; unnamed ones are inherited. Budgets follow the calendar."""
    if section is None:
        return _by_calendar(inherited, calendar)
    limits = [limit for limit in inherited if limit.resource not in section]
    for name in section.names:
        resource, node = _RESOURCES.get(name), section.node(name)
        if resource and node is not None and not (isinstance(node, Scalar) and node.text == UNLIMITED):
            read = _held(section, resource) if resource in HELD else _spent(section, node, resource)
            if (key or team) and any(isinstance(window, PerSession) for _, window, _, _ in read):
                section.wrong(resource, "is by the session, which is counted for tenants alone: set it for the tenant")
            limits += [
                Limit(resource, amount, window, key, None, team, alerts, is_soft)
                for amount, window, alerts, is_soft in read
            ]
    return _by_calendar(tuple(sorted(limits, key=_order)) if len(limits) > 1 else tuple(limits), calendar)


def _by_calendar(limits: tuple[Limit, ...], calendar: Calendar) -> tuple[Limit, ...]:
    if not [one for one in limits if isinstance(one.window, Budget) and one.window.calendar != calendar]:
        return limits  # most tenants share those of defaults
    return tuple(
        replace(limit, window=Budget(limit.window.period, calendar)) if isinstance(limit.window, Budget) else limit
        for limit in limits
    )


def _held(section: Section, resource: Resource) -> list[Amount]:
    amount = section.value(resource, _read_size if resource is Resource.KV_BYTES else _read_count, None)
    return [] if amount is None else [(amount, None, (), False)]


_read_size, _read_count = partial(units.size, least=0), partial(units.count, least=0)


def _spent(section: Section, node: Node, resource: Resource) -> list[Amount]:
    if isinstance(node, Items) and not node.nodes:
        section.wrong(resource, f"is an empty list: write {UNLIMITED} to lift a limit")
    found: dict[str, Amount] = {}
    path, read = f"{section.path}.{resource}", _money if resource is Resource.COST else _rate
    for item in node.nodes if isinstance(node, Items) else (node,):
        amount = _one_spent(section, item, path, read)
        if amount is None or (window := amount[1]) is None:
            continue
        if window.unit in found:
            section.note(item.mark, path, f"has two limits per {window.unit}: keep one")
        found[window.unit] = amount
    return list(found.values())


def _one_spent(section: Section, node: Node, path: str, read: ReadWindow) -> Amount | None:
    """Read a rate or a budget: `100k/min`, `{rate: 100k/min, burst: 20k}`, or a budget with its alerts."""
    detail = section.as_section(node, path) if isinstance(node, Fields) else None
    if detail is not None and "budget" in detail:
        return _budget(detail, read)
    windowed = _with_burst(detail) if detail is not None and read is _rate else section.convert(node, path, read, None)
    return None if windowed is None else (*windowed, (), False)


def _budget(detail: Section, read: ReadWindow) -> Amount | None:
    """Read `{budget: 50M/month, soft: true, alerts: [{at: 80%, url: https://example.com/alerts}]}`."""
    detail.refuse_unknown(BUDGET_FIELDS)
    windowed = detail.value("budget", read, None)
    alerts = tuple(_alert(one) for one in detail.sections_of("alerts", MAX_ALERTS))
    is_soft = detail.value("soft", _truth, default=False)
    if windowed is None:
        return None
    amount, window = windowed
    if not isinstance(window, Budget):
        detail.wrong("budget", f"is by the {window.unit}: alerts are of budgets by the {listed(BudgetPeriod)}")
        return None
    valid = [alert for alert in alerts if alert is not None]
    if len({*valid}) < len(valid):
        detail.wrong("alerts", "has an alert twice: name each share and address once")
    if is_soft and not alerts:
        detail.wrong("soft", "needs alerts: a soft budget refuses nothing")
    if not is_soft and any(alert.percent > 100 for alert in valid):
        detail.wrong("alerts", "are above 100%, which only a soft budget passes")
    return amount, window, tuple(valid), is_soft


def _alert(section: Section) -> Alert | None:
    section.refuse_unknown(("at", "url"))
    for name in ("at", "url"):
        if name not in section:
            section.note(section.mark, section.path, f"has no {name}")
    percent, url = section.value("at", units.percent, None), section.value("url", words.alert_url, None)
    return None if percent is None or url is None else Alert(percent, url)


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("is not true or false")
    return text == "true"


def priced(
    section: Section, given: Section | None, limits: tuple[Limit, ...], price: Price | None
) -> tuple[Limit, ...]:
    """The limits, those of cost with the prices of their tenant."""
    if Resource.COST not in map(attrgetter("resource"), limits):
        return limits
    problem = problem_with(price)
    if problem is not None:
        if given and Resource.COST in given:
            given.wrong(Resource.COST, problem)
        else:
            section.wrong("price", f"must fit limits.cost of defaults, which {problem}")
        return tuple(limit for limit in limits if limit.resource is not Resource.COST)
    assert price is not None
    return with_prices(limits, token_prices(price))


def with_prices(limits: tuple[Limit, ...], prices: TokenPrices | None) -> tuple[Limit, ...]:
    """The limits, those of cost with these prices."""
    return tuple(replace(limit, prices=prices) if limit.resource is Resource.COST else limit for limit in limits)


def problem_with(price: Price | None) -> str | None:
    """The end of a sentence about a limit of cost, which this price does not suffice for."""
    if price is None:
        return "needs a price of the tenant"
    for name, one in (("", price), *price.models):
        prices, of = token_prices(one), f" of {name}" if name else ""
        if prices is None:
            return f"needs prices{of} with three decimals per 1M at most"
        if token_prices(one.in_batches) is None:
            return f"needs prices{of} with three decimals per 1M at most, also times price.batch"
        if prices.cached_input > prices.input:  # requests reserve their input at the price of what is not cached
            return f"needs a price of cached_input{of} that is not above that of input"
    return None


def refuse_tenants_limits(limits: Section) -> None:
    """Note limits that are counted for tenants alone, and unknown ones."""
    for resource in sorted(TENANT_ONLY):
        if resource in limits:
            limits.wrong(resource, "is counted for tenants alone: set it for the tenant")
    limits.refuse_unknown(fields_of("limits"))


def read_calendar(section: Section, base: Calendar) -> Calendar:
    """The calendar of a section's budgets."""
    if "week_starts" not in section and "time_zone" not in section:
        return base
    starts = section.value("week_starts", words.weekday, WEEKDAYS[base.week_starts])
    return Calendar(section.value("time_zone", words.time_zone, base.time_zone), WEEKDAYS.index(starts))


def _with_burst(detail: Section) -> tuple[int, Rate | Budget | PerSession] | None:
    """Read an amount and a window: `{rate: 100k/min, burst: 20k}`."""
    detail.refuse_unknown(("rate", "burst"))
    if "rate" not in detail:
        detail.note(detail.mark, detail.path, "has no rate")
    read, burst = detail.value("rate", _rate, None), detail.value("burst", units.burst, None)
    if read is None or burst is None:
        return read
    amount, window = read
    if not isinstance(window, Rate):
        detail.wrong("burst", f"a budget has no burst: what is left of this {window.unit} may be spent at once")
        return read
    return amount, replace(window, burst=burst)


def _window(read: ReadWindow, text: str) -> tuple[int, Rate | Budget | PerSession]:
    if text == UNLIMITED:
        raise ValueError("cannot be one of several limits")
    return read(text)


_rate, _money = partial(_window, units.rate), partial(_window, units.budget_of_money)


def _order(limit: Limit) -> tuple[int, bool, int, str]:
    window = limit.window
    rank = _RANKS[limit.resource]
    if isinstance(window, Rate):
        return rank, False, window.seconds, ""
    return rank, window is not None, 0, window.unit if window is not None else ""
