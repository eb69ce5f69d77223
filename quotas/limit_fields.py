"""The `limits:` of a policy file."""

from dataclasses import replace

from quotas import units
from quotas.limit import Budget, Limit, Rate, Resource
from quotas.policy_schema import UNLIMITED
from quotas.section import Section
from quotas.yaml_nodes import Fields, Items, Node, Text

_RESOURCES = list(Resource)


def read_limits(
    section: Section | None, key: str | None = None, inherited: tuple[Limit, ...] = ()
) -> tuple[Limit, ...]:
    """The limits under `limits:`; of a resource that is not named there, the inherited ones. In a canonical order."""
    limits = list(inherited) if section is None else _read(section, key, inherited)
    return tuple(sorted(limits, key=_order))


def _read(section: Section, key: str | None, inherited: tuple[Limit, ...]) -> list[Limit]:
    limits: list[Limit] = []
    for resource in Resource:
        node = section.node(resource)
        if node is None:
            limits += [limit for limit in inherited if limit.resource is resource]
        elif not (isinstance(node, Text) and node.text == UNLIMITED):
            limits += _held(section, resource, key) if resource.is_held else _spent(section, node, resource, key)
    return limits


def _held(section: Section, resource: Resource, key: str | None) -> list[Limit]:
    amount = section.value(resource, _size if resource is Resource.KV_BYTES else _count, None)
    return [] if amount is None else [Limit(resource, amount, None, key)]


def _spent(section: Section, node: Node, resource: Resource, key: str | None) -> list[Limit]:
    if isinstance(node, Items) and not node.nodes:
        section.wrong(resource, f"is an empty list: write {UNLIMITED} to lift a limit")
    found: dict[str, Limit] = {}
    for item in node.nodes if isinstance(node, Items) else (node,):
        read = _windowed(section, item, f"{section.path}.{resource}")
        if read is None:
            continue
        limit = Limit(resource, *read, key)
        if limit.name in found:
            section.note(item.mark, f"{section.path}.{resource}", f"has two limits per {read[1].unit}: keep one")
        found[limit.name] = limit
    return list(found.values())


def _windowed(section: Section, node: Node, path: str) -> tuple[int, Rate | Budget] | None:
    """`100k/min`, or `{rate: 100k/min, burst: 20k}`."""
    if not isinstance(node, Fields):
        return section.convert(node, path, _rate, None)
    detail = section.as_section(node, path)
    assert detail is not None
    detail.refuse_strangers(("rate", "burst"))
    if "rate" not in detail:
        section.note(node.mark, path, "has no rate")
    read, burst = detail.value("rate", _rate, None), detail.value("burst", _burst, None)
    if read is None or burst is None:
        return read
    amount, window = read
    if isinstance(window, Budget):
        detail.wrong("burst", f"a budget has no burst: what is left of this {window.period} may be spent at once")
        return read
    return amount, replace(window, burst=burst)


def _rate(text: str) -> tuple[int, Rate | Budget]:
    if text == UNLIMITED:
        raise ValueError("cannot be one of several limits")
    return units.rate(text)


def _count(text: str) -> int:
    return units.count(text, least=0)


def _size(text: str) -> int:
    return units.size(text, least=0)


def _burst(text: str) -> int:
    return units.burst(text)


def _order(limit: Limit) -> tuple[int, bool, int, str]:
    is_budget = isinstance(limit.window, Budget)
    seconds = limit.window.seconds if isinstance(limit.window, Rate) else 0
    return _RESOURCES.index(limit.resource), is_budget, seconds, limit.name
