"""What another policy changes, and for whom."""

from collections.abc import Iterator
from typing import Any

from quotas.policy import Policy
from quotas.policy_text import class_fields, tenant_fields

UNSET = "unset"


def policy_diff(old: Policy, new: Policy) -> list[str]:
    """Lines of text, a heading for everyone whom it concerns and an indented line for each change; none if none."""
    return [*_classes(old, new), *_tenants(old, new)]


def _classes(old: Policy, new: Policy) -> Iterator[str]:
    before, after = ({entry.name: class_fields(entry) for entry in policy.classes} for policy in (old, new))
    if list(before) != list(after):
        yield f"classes: {', '.join(before)} -> {', '.join(after)}"
    for name in [*after, *(name for name in before if name not in after)]:
        note = "" if name in before and name in after else (" (new)" if name in after else " (removed)")
        yield from _section(f"class {name}{note}", before.get(name, {}), after.get(name, {}))


def _tenants(old: Policy, new: Policy) -> Iterator[str]:
    """A tenant that only one of them names is compared with the defaults, which hold for it in the other."""
    yield from _section("tenants that are not named", _unnamed(old), _unnamed(new))
    for name in sorted({*old.tenants, *new.tenants}):
        note = "" if name in old.tenants and name in new.tenants else _note(name in new.tenants)
        heading = f"tenant {name}{note}"
        changes = list(_section(heading, tenant_fields(old.tenant(name)), tenant_fields(new.tenant(name))))
        yield from changes or ([heading] if note else [])


def _unnamed(policy: Policy) -> dict[str, Any]:
    return {"unnamed_tenants": policy.unnamed_tenants, **tenant_fields(policy.default)}


def _note(is_new: bool) -> str:
    return " (now named)" if is_new else " (no longer named: the defaults hold)"


def _section(heading: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    old, new = dict(_flat(before)), dict(_flat(after))
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if changed:
        yield heading
    for name in changed:
        yield f"  {name}: {old.get(name, UNSET)} -> {new.get(name, UNSET)}"


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and "rate" not in value:
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else name)
    else:
        yield path, _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value['rate']} (burst {value['burst']})" if isinstance(value, dict) else str(value)
