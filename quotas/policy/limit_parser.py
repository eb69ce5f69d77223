"""Reads the limits of tenants and keys from trees of text. Every mistake is noted, and the limit left out."""

from dataclasses import replace
from functools import partial

from quotas.policy import units
from quotas.policy.limit import Budget, Limit, Rate, Resource
from quotas.policy.policy import Price, token_prices
from quotas.policy.schema import UNLIMITED
from quotas.policy.section import Section
from quotas.policy.yaml_nodes import Fields, Items, Node, Scalar

_RESOURCES = {resource.value: resource for resource in Resource}
_RANKS = {resource: rank for rank, resource in enumerate(Resource)}


def read_limits(
    section: Section | None, key: str | None = None, inherited: tuple[Limit, ...] = ()
) -> tuple[Limit, ...]:
    """The limits of the section, in a canonical order; unnamed ones are inherited."""
    if section is None:
        return inherited
    limits = [limit for limit in inherited if limit.resource not in section]
    for name in section.names:
        resource, node = _RESOURCES.get(name), section.node(name)
        if resource and node is not None and not (isinstance(node, Scalar) and node.text == UNLIMITED):
            limits += _held(section, resource, key) if resource.is_held else _spent(section, node, resource, key)
    return tuple(sorted(limits, key=_order)) if len(limits) > 1 else tuple(limits)


def _held(section: Section, resource: Resource, key: str | None) -> list[Limit]:
    read = _read_size if resource is Resource.KV_BYTES else _read_count
    amount = section.value(resource, read, None)
    return [] if amount is None else [Limit(resource, amount, None, key)]


_read_size, _read_count = partial(units.size, least=0), partial(units.count, least=0)


def _spent(section: Section, node: Node, resource: Resource, key: str | None) -> list[Limit]:
    if isinstance(node, Items) and not node.nodes:
        section.wrong(resource, f"is an empty list: write {UNLIMITED} to lift a limit")
    found: dict[str, Limit] = {}
    for item in node.nodes if isinstance(node, Items) else (node,):
        path = f"{section.path}.{resource}"
        is_cost = resource is Resource.COST
        read = section.convert(item, path, _money, None) if is_cost else _windowed(section, item, path)
        if read is None:
            continue
        amount, window = read
        if window.unit in found:
            section.note(item.mark, f"{section.path}.{resource}", f"has two limits per {window.unit}: keep one")
        found[window.unit] = Limit(resource, amount, window, key)
    return list(found.values())


def priced(
    section: Section, given: Section | None, limits: tuple[Limit, ...], price: Price | None
) -> tuple[Limit, ...]:
    """The limits, those of cost with the prices of their tenant."""
    if all(limit.resource is not Resource.COST for limit in limits):
        return limits
    prices = None if price is None else token_prices(price)
    in_batches = None if price is None else token_prices(price.in_batches)
    problem = None
    if price is None:
        problem = "needs a price of the tenant"
    elif prices is None:
        problem = "needs prices with three decimals per 1M at most"
    elif in_batches is None:
        problem = "needs prices with three decimals per 1M at most, also times price.batch"
    elif prices.cached_input > prices.input:  # requests reserve their input at the price of what is not cached
        problem = "needs a price of cached_input that is not above that of input"
    if problem is not None:
        if given and Resource.COST in given:
            given.wrong(Resource.COST, problem)
        else:
            section.wrong("price", f"must fit limits.cost of defaults, which {problem}")
        return tuple(limit for limit in limits if limit.resource is not Resource.COST)
    return tuple(replace(limit, prices=prices) if limit.resource is Resource.COST else limit for limit in limits)


def _windowed(section: Section, node: Node, path: str) -> tuple[int, Rate | Budget] | None:
    """Read an amount and a window: `100k/min`, or `{rate: 100k/min, burst: 20k}`."""
    if not isinstance(node, Fields):
        return section.convert(node, path, _rate, None)
    detail = section.as_section(node, path)
    assert detail is not None
    detail.refuse_unknown(("rate", "burst"))
    if "rate" not in detail:
        section.note(node.mark, path, "has no rate")
    read, burst = detail.value("rate", _rate, None), detail.value("burst", units.burst, None)
    if read is None or burst is None:
        return read
    amount, window = read
    if isinstance(window, Budget):
        detail.wrong("burst", f"a budget has no burst: what is left of this {window.period} may be spent at once")
        return read
    return amount, replace(window, burst=burst)


def _rate(text: str) -> tuple[int, Rate | Budget]:
    _refuse_unlimited(text)
    return units.rate(text)


def _money(text: str) -> tuple[int, Rate | Budget]:
    _refuse_unlimited(text)
    return units.budget_of_money(text)


def _refuse_unlimited(text: str) -> None:
    if text == UNLIMITED:
        raise ValueError("cannot be one of several limits")


def _order(limit: Limit) -> tuple[int, bool, int, str]:
    window = limit.window
    rank = _RANKS[limit.resource]
    if isinstance(window, Rate):
        return rank, False, window.seconds, ""
    return rank, window is not None, 0, window.unit if window is not None else ""
