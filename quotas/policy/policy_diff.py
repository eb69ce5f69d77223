"""The difference between two policies, listed by the tenants and classes that it concerns."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import compress, groupby, islice
from operator import is_not
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quotas.policy.policy import Policy, TenantPolicy
from quotas.policy.policy_text import alias_fields, class_fields, sharing_groups, team_fields, tenant_fields

UNSET = "unset"
ONE_LIMIT = {"rate", "budget"}  # fields of a limit that is shown in one line
MAX_VALUE_CHARS, CUT_VALUE_CHARS = 80, 40  # of a value shown whole, and of a longer one's beginning


class Change(NamedTuple):
    """One changed field, or a tenant newly named, or no longer named, without further changes."""

    scope: str  # a path in a policy file: classes.batch, defaults, tenants.acme
    heading: str  # the same for people; empty for the order of classes
    field: str  # the rest of the path, such as limits.tokens; empty: only the heading
    before: str
    after: str

    @property
    def path(self) -> str:
        return f"{self.scope}.{self.field}" if self.scope and self.field else self.scope or self.field

    def __str__(self) -> str:
        return f"{self.field}: {self.before} -> {self.after}"


def changed_tenants(old: Policy | None, new: Policy) -> list[str]:
    """The names of the tenants whose policies differ, in order; tenants named by one policy alone included."""
    if old and old.version in new.changed_from:
        return new.changed_from[old.version]
    before, after = {} if old is None else old.tenants, new.tenants
    if [*before] == [*after]:  # unchanged tenants are the same objects
        others, gone = [*compress(after, map(is_not, before.values(), after.values()))], set[str]()
    else:
        others, gone = [*after], before.keys() - after.keys()
    changed = (name for name in others if name not in before or before[name].digest != after[name].digest)
    names = sorted([*gone, *changed])
    if old:
        new.changed_from[old.version] = names
    return names


class PolicyEdit(NamedTuple):
    """The edit from one policy to another: small if few tenants differ."""

    rest: Policy  # the later one, without tenants
    named: dict[str, TenantPolicy]  # changed and new ones
    removed: list[str]

    @staticmethod
    def between(old: Policy, new: Policy) -> "PolicyEdit":
        changed = changed_tenants(old, new)
        named = {name: new.tenants[name] for name in changed if name in new.tenants}
        return PolicyEdit(replace(new, tenants={}), named, [name for name in changed if name not in named])

    def of(self, old: Policy) -> Policy:
        """Return the later policy; `old` is the earlier one, or the later one already."""
        tenants = {**old.tenants, **self.named}
        for name in self.removed:
            tenants.pop(name, None)
        return replace(self.rest, tenants=tenants)


def policy_diff(old: Policy, new: Policy, most: int | None = None) -> list[str]:
    """The changes as lines of text, `most` of them: a heading for each tenant or class, and an indented line for each
    change.
    """
    return list(islice(_lines(policy_changes(old, new)), most))


def _lines(changes: Iterable[Change]) -> Iterator[str]:
    for heading, some in groupby(changes, key=lambda change: change.heading):
        if heading:
            yield heading
        yield from (f"  {change}" if heading else str(change) for change in some if change.field)


def policy_changes(old: Policy, new: Policy) -> Iterator[Change]:
    """Every changed field, defaults filled in: of classes first, then of teams, of unnamed tenants, of each named
    tenant, of sharing groups, and of aliases.
    """
    yield from _classes(old, new)
    for name in sorted({*old.teams, *new.teams}):
        before, after = (team_fields(policy.teams[name]) if name in policy.teams else {} for policy in (old, new))
        note = "" if before and after else " (new)" if after else " (removed)"
        yield from _section(f"team {name}{note}", f"teams.{name}", before, after)
    yield from _tenants(old, new)
    yield from _section("prefix_sharing", "prefix_sharing", sharing_groups(old), sharing_groups(new))
    yield from _section("aliases", "aliases", alias_fields(old), alias_fields(new))


def _classes(old: Policy, new: Policy) -> Iterator[Change]:
    before, after = ({entry.name: class_fields(entry) for entry in policy.classes} for policy in (old, new))
    if list(before) != list(after):
        yield Change("", "", "classes", ", ".join(before), ", ".join(after))
    for name in [*after, *(name for name in before if name not in after)]:
        note = "" if name in before and name in after else (" (new)" if name in after else " (removed)")
        yield from _section(f"class {name}{note}", f"classes.{name}", before.get(name, {}), after.get(name, {}))


def _tenants(old: Policy, new: Policy) -> Iterator[Change]:
    """A tenant named by one policy alone is compared with the other's defaults."""
    heading = "tenants that are not named"
    before, after = ({"unnamed_tenants": policy.unnamed_tenants} for policy in (old, new))
    yield from _section(heading, "", before, after)
    yield from _section(heading, "defaults", tenant_fields(old.default), tenant_fields(new.default))
    for name in changed_tenants(old, new):
        note = "" if name in old.tenants and name in new.tenants else _note(name in new.tenants)
        heading, scope = f"tenant {name}{note}", f"tenants.{name}"
        changes = list(_section(heading, scope, tenant_fields(old.tenant(name)), tenant_fields(new.tenant(name))))
        yield from changes or ([Change(scope, heading, "", "", "")] if note else [])


def _note(is_new: bool) -> str:
    return " (now named)" if is_new else " (no longer named: the defaults hold)"


def _section(heading: str, scope: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Change]:
    old, new = dict(_flat(before)), dict(_flat(after))
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            yield Change(scope, heading, name, old.get(name, UNSET), new.get(name, UNSET))


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and not ONE_LIMIT & value.keys():
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else name)
    else:
        yield path, _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if not isinstance(value, dict):
        return shortened(str(value))
    if "rate" in value:
        return f"{value['rate']} (burst {value['burst']})"
    alerts = ", ".join(f"{alert['at']} to {receiver(alert['url'])}" for alert in value["alerts"])
    return f"{value['budget']} ({'soft, ' if 'soft' in value else ''}alerts at {alerts})"


def receiver(url: str) -> str:
    """The host of an address, which may hold a secret besides, and a digest that tells it from others."""
    return f"{urlsplit(url).hostname} ({_digest(url)})"


def shortened(text: str) -> str:
    """A long text, such as a system prompt, shortened to its beginning, length and digest."""
    if len(text) <= MAX_VALUE_CHARS:
        return text
    return f"{text[:CUT_VALUE_CHARS]}… ({len(text):,} characters, {_digest(text)})"


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
