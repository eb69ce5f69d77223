"""A tenant of a policy file, its price and its keys; and the `defaults:`, which are a tenant without a name."""

from dataclasses import replace

from quotas import units, words
from quotas.limit import TENANT_ONLY
from quotas.limit_fields import read_limits
from quotas.policy import ALL_MODELS, SCOPES, ClassPolicy, KeyPolicy, Price, TenantPolicy
from quotas.policy_schema import NO_PRICE, fields_of
from quotas.problems import Mark, Problems, listed, quoted
from quotas.section import Section, one_of
from quotas.yaml_nodes import Fields, Text


class TenantReader:
    """Reads tenants, whose keys must differ in their ids across all of them."""

    def __init__(self, classes: tuple[ClassPolicy, ...], is_whole: bool) -> None:
        self._levels = {entry.name: entry.level for entry in classes}
        self._first = classes[0].name
        self._class = one_of(list(self._levels), "a class") if is_whole else lambda _: classes[0].name
        self._keys: dict[str, Mark] = {}

    def read(self, section: Section | None, name: str, base: TenantPolicy) -> TenantPolicy:
        """`base` has what the section leaves out."""
        section = section or Section(Fields(Mark(""), {}), "", Problems())
        section.refuse_strangers(fields_of("tenant" if name else "defaults"))
        highest = section.value("highest_class", self._class, self._known(base.highest_class, self._first))
        limits = section.section("limits")
        if limits:
            limits.refuse_strangers(fields_of("limits"))
        tenant = TenantPolicy(
            name=name,
            highest_class=highest,
            default_class=self._read_default_class(section, highest, base),
            weight=section.value("weight", words.weight, base.weight),
            models=section.values("models", words.model, base.models),
            limits=read_limits(limits, None, base.limits),
            on_store_outage=section.value("on_store_outage", words.outage, base.on_store_outage),
            price=_read_price(section, base.price),
        )
        keys = section.section("keys") if name else None
        return replace(tenant, keys=self._read_keys(keys, tenant)) if keys else tenant

    def _known(self, name: str, otherwise: str) -> str:
        return name if name in self._levels else otherwise

    def _read_default_class(self, section: Section, highest: str, base: TenantPolicy) -> str:
        """An inherited one gives way to `highest`; one that is written here must not be above it."""
        default = section.value("default_class", self._class, self._known(base.default_class, highest))
        if self._levels[default] >= self._levels[highest]:
            return default
        if "default_class" in section:
            section.wrong("default_class", f"{quoted(default)} is more urgent than the highest class, {highest}")
        return highest

    def _read_keys(self, section: Section, tenant: TenantPolicy) -> dict[str, KeyPolicy]:
        keys: dict[str, KeyPolicy] = {}
        for key_id, mark, fields in section.sections(words.key_id):
            if first := self._keys.get(key_id):
                fields.note(mark, fields.path, f"is a key already at {first}: an id is of one key")
            self._keys[key_id] = mark
            keys[key_id] = self._read_key(fields, key_id, tenant)
        return keys

    def _read_key(self, section: Section, key_id: str, tenant: TenantPolicy) -> KeyPolicy:
        section.refuse_strangers(fields_of("key"))
        limits = section.section("limits")
        if limits:
            _refuse_tenants_limits(limits)
        highest = section.value("highest_class", self._class, None)
        if highest and self._levels[highest] < self._levels[tenant.highest_class]:
            section.wrong("highest_class", f"is above its tenant's, {tenant.highest_class}: a key can only narrow")
        models = section.values("models", words.model, (ALL_MODELS,))
        strangers = sorted({*models} - {*tenant.models, ALL_MODELS})
        if strangers and ALL_MODELS not in tenant.models:
            section.wrong("models", f"{quoted(strangers[0])} is not among its tenant's models: a key can only narrow")
        return KeyPolicy(
            id=key_id,
            hmac=section.value("hmac", words.hmac, None),
            expires=section.value("expires", words.expires, None),
            scopes=tuple(sorted(section.values("scopes", words.scope, SCOPES))),
            models=models,
            highest_class=highest,
            limits=read_limits(limits, key_id),
        )


def _refuse_tenants_limits(limits: Section) -> None:
    for resource in sorted(TENANT_ONLY):
        if resource in limits:
            limits.wrong(resource, "is counted for tenants, not for keys: set it for the tenant")
    limits.refuse_strangers(fields_of("limits"))


def _read_price(section: Section, base: Price | None) -> Price | None:
    node = section.node("price")
    if node is None or (isinstance(node, Text) and node.text == NO_PRICE):
        return base if node is None else None
    fields = section.section("price")
    if fields is None:
        return base
    fields.refuse_strangers(("input", "output", "cached_input", "currency"))
    missing = [name for name in ("input", "output", "currency") if name not in fields]
    if missing:
        section.wrong("price", f"has no {listed(missing)}")
    given = fields.value("input", units.price, None)
    output = fields.value("output", units.price, None)
    cached = fields.value("cached_input", units.price, given)
    currency = fields.value("currency", words.currency, None)
    if given is None or output is None or cached is None or currency is None:
        return base
    return Price(input=given, output=output, cached_input=cached, currency=currency)
