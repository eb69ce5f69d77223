"""Settings of API keys that are stored outside of policy files, in the words that a policy has for a key.

They narrow what the tenant and a policy's own entry for the key allow, and are read anew under each policy.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from quotas.policy.limit import Limit, Rate
from quotas.policy.parser import TenantReader
from quotas.policy.policy import ALL_MODELS, KeyPolicy, Policy
from quotas.policy.policy_file import PolicyError
from quotas.policy.policy_text import Plain, key_fields
from quotas.policy.problems import Mark, Problems, TooManyProblems
from quotas.policy.section import Section
from quotas.policy.yaml_nodes import Fields, Node, Unreadable, compose

STORED_APART = ("hmac", "expires", "scopes")  # fields of a policy's key that are none of its settings
WHERE = "the key's settings"


def read_key_settings(text: str, key_id: str, policy: Policy, tenant: str) -> KeyPolicy:
    """The settings of a tenant's key, from YAML or JSON such as `{limits: {cost: 50/month}}`. Raises `PolicyError`."""
    problems, read = Problems(), KeyPolicy(key_id)
    with suppress(TooManyProblems):
        node = _composed(text, problems)
        section = node and Section(Fields(Mark(WHERE), {}), "", problems).as_section(node, "")
        for name in STORED_APART:
            if section and name in section:
                section.wrong(name, "is none of a key's settings: it is set apart from them")
        if section:
            of_tenant = policy.tenant(tenant)
            reader = TenantReader(policy.classes, policy.teams, is_whole=True)
            read = reader.read_key(section, key_id, of_tenant)
            entry = of_tenant.key(key_id)
            if entry and entry.classes and read.classes and not set(entry.classes) & set(read.classes):
                allowed = ", ".join(entry.classes)
                section.wrong("classes", f"leaves the key none: the policy's own entry for it has {allowed}")
    if problems.found:
        raise PolicyError(problems.found)
    return read


def _composed(text: str, problems: Problems) -> Node | None:
    try:
        return compose(WHERE, text.encode("utf-8", "surrogatepass"), problems)
    except Unreadable as error:
        raise PolicyError([error.problem]) from None


def key_settings(key: KeyPolicy) -> Plain:
    """The settings of a key that differ from none; read back, they are the same."""
    fields, none = key_fields(key), key_fields(KeyPolicy(key.id))
    limits = {name: value for name, value in fields["limits"].items() if value != none["limits"][name]}
    settings = {name: value for name, value in fields.items() if name not in STORED_APART and value != none.get(name)}
    return settings | {"limits": limits} if limits else settings


def both(entry: KeyPolicy, own: KeyPolicy, policy: Policy) -> KeyPolicy:
    """The policy's entry for a key as the key's own settings narrow it."""
    models = entry.models if ALL_MODELS in own.models else own.models
    if ALL_MODELS not in (*entry.models, *own.models):
        models = tuple(model for model in own.models if model in entry.models)
    classes = entry.classes or own.classes
    if entry.classes and own.classes:
        classes = tuple(name for name in own.classes if name in entry.classes)  # never none: the reader refuses that
    highest = [name for name in (entry.highest_class, own.highest_class) if name is not None]
    return replace(
        entry,
        models=models,
        highest_class=max(highest, key=lambda name: policy.class_named(name).level, default=None),
        classes=classes,
        limits=lesser((*entry.limits, *own.limits)),
    )


def lesser(limits: Iterable[Limit]) -> tuple[Limit, ...]:
    """The limits of a key by several sources; of two for the same resource and window, the lesser amount and the lesser
    burst; a soft one bounds nothing, and gives way to any other.
    """
    found = dict[str, Limit]()
    for limit in limits:
        if (known := found.setdefault(limit.name, limit)) is limit:
            continue
        found[limit.name] = min(known, limit, key=lambda one: (one.is_soft, one.amount))
        if isinstance(known.window, Rate) and isinstance(limit.window, Rate):
            burst = min(known.window.burst, limit.window.burst)
            found[limit.name] = replace(found[limit.name], window=Rate(limit.window.seconds, burst))
    return tuple(found.values())
