"""Reads policies from trees of text. Every mistake is noted, and a sensible value takes its place."""

import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from quotas.policy import units, words
from quotas.policy.limit_parser import priced, read_calendar, read_limits, refuse_tenants_limits
from quotas.policy.policy import (
    AGING_STEP_SECONDS,
    ALL_MODELS,
    CLASSES,
    DEFAULTS,
    MAX_BACKGROUND_RESPONSES,
    MAX_BATCH_LINES,
    MAX_GUARDRAIL_HOLD_CHARS,
    MAX_N,
    MAX_OPEN_BATCHES,
    MAX_SCHEMA_BYTES,
    MAX_TAGS,
    MAX_TOP_LOGPROBS,
    MAX_USAGE_PARTS,
    MAX_USAGE_ROWS,
    SCOPES,
    SPARE_CLASS_NAME,
    AliasedModel,
    BatchLimits,
    CacheLimits,
    ClassPolicy,
    GuardrailPolicy,
    KeyPolicy,
    Lateness,
    Policy,
    Price,
    QueueLimits,
    StoredResponseLimits,
    TeamPolicy,
    TenantPolicy,
    Unnamed,
    UsageDetail,
)
from quotas.policy.problems import Mark, Problems, TooManyProblems, did_you_mean, listed, quoted
from quotas.policy.schema import (
    GUARDRAIL_STAGES,
    MAX_CLASSES,
    MAX_PINNED_PROMPTS,
    NO_ADAPTER,
    NO_GUARDRAIL,
    NO_PINS,
    NO_PRICE,
    NO_TEAM,
    UNLIMITED,
    WEIGHT_MARK,
    fields_of,
)
from quotas.policy.section import Section, one_of
from quotas.policy.team_parser import limits_of_team, read_teams
from quotas.policy.tenant_texts import Form, Indivisible, TenantTexts, form_of, name_and_body, words_of
from quotas.policy.yaml_nodes import MAX_NODES, Fields, Items, Scalar


def read_classes(section: Section | None) -> tuple[ClassPolicy, ...]:
    if section is None:
        return CLASSES
    if not 1 <= len(section.names) <= MAX_CLASSES:
        section.note(section.mark, section.path, f"has {len(section.names)} classes, not 1 to {MAX_CLASSES}")
        return CLASSES
    classes: list[ClassPolicy] = []
    for name, _, fields in section.sections(words.class_name):
        classes.append(_read_class(fields, name, classes))
    return tuple(classes) or CLASSES


def _read_class(section: Section, name: str, above: list[ClassPolicy]) -> ClassPolicy:
    section.refuse_unknown(fields_of("class"))
    if name == SPARE_CLASS_NAME:
        section.note(section.mark, section.path, "is the class of the lines of batches: choose another name")
    tiers = section.values("service_tiers", words.service_tier, ())
    for other in above:
        for tier in set(tiers) & set(other.service_tiers):
            section.wrong("service_tiers", f"{quoted(tier)} asks for class {other.name} already")
    return ClassPolicy(
        name=name,
        level=len(above),
        service_tiers=tuple(sorted(tiers)),
        ttft=section.value("ttft", units.positive_duration, None),
        time_per_output_token=section.value("time_per_output_token", units.positive_duration, None),
        aging=_read_aging(section, above),
        queue=_read_queue(section.section("queue")),
        when_late=_read_lateness(section),
        max_reasoning_tokens=section.value("max_reasoning_tokens", units.count, None),
    )


def _read_lateness(section: Section) -> Lateness:
    default: Lateness = "wait"
    lateness = section.value("when_late", words.lateness, default)
    if lateness == "refuse" and "ttft" not in section.names:
        section.wrong("when_late", "needs a ttft: without a target nothing is late")
    return lateness


def _read_aging(section: Section, above: list[ClassPolicy]) -> float:
    aging = section.value("aging", units.duration, above[-1].aging + AGING_STEP_SECONDS if above else 0.0)
    if not above and aging:
        section.wrong("aging", "no class is due before the first: leave it out")
    if above and aging < above[-1].aging:
        section.wrong("aging", f"is shorter than that of {above[-1].name}, which is more urgent")
    return aging


def _read_queue(section: Section | None) -> QueueLimits:
    if section is None:
        return QueueLimits()
    section.refuse_unknown(fields_of("class", "queue"))
    return QueueLimits(
        requests=section.value("requests", units.count, None),
        tokens=section.value("tokens", units.count, None),
        bytes=section.value("bytes", units.size, None),
        seconds=section.value("seconds", units.positive_duration, None),
    )


class TenantReader:
    """Reads tenants. The ids of their keys must differ across all of them."""

    def __init__(self, classes: tuple[ClassPolicy, ...], teams: Mapping[str, TeamPolicy], is_whole: bool) -> None:
        self._teams = teams
        self._team = one_of([NO_TEAM, *teams], "a team of this policy") if is_whole else words.team_name
        self._levels = {entry.name: entry.level for entry in classes}
        self._first = classes[0].name
        self._class = one_of(list(self._levels), "a class") if is_whole else lambda _: classes[0].name
        self._keys: dict[str, Mark | None] = {}  # with their places, of newly read tenants

    def read(self, section: Section | None, name: str, base: TenantPolicy) -> TenantPolicy:
        """The policy of a tenant; missing fields come from `base`."""
        section = section or Section(Fields(Mark(""), {}), "", Problems())
        section.refuse_unknown(fields_of("tenant" if name else "defaults"))
        highest = section.value("highest_class", self._class, self._known(base.highest_class, self._first))
        limits = section.section("limits")
        if limits:
            limits.refuse_unknown(fields_of("limits"))
        price, calendar = _read_price(section, base.price), read_calendar(section, base.calendar)
        named = section.value("team", self._team, base.team or NO_TEAM)
        team, shared = None if named == NO_TEAM else named, self._teams.get(named)
        tenant = TenantPolicy(
            name=name,
            highest_class=highest,
            default_class=self._read_default_class(section, highest, base),
            weight=section.value("weight", words.weight, base.weight),
            models=section.values("models", words.model, base.models),
            default_adapter=_read_default_adapter(section, base.default_adapter),
            limits=priced(section, limits, read_limits(limits, None, base.limits, calendar), price),
            on_store_outage=section.value("on_store_outage", words.outage, base.on_store_outage),
            price=price,
            prefix_cache=_read_cache_limits(section.section("prefix_cache"), base.prefix_cache),
            stored_responses=_read_stored(section.section("stored_responses"), base.stored_responses),
            batches=_read_batches(section.section("batches"), base.batches),
            usage=_read_usage(section.section("usage"), base.usage),
            guardrail=_read_guardrail(section, base.guardrail),
            log_texts=section.value("log_texts", words.log_texts, base.log_texts),
            max_n=_read_bound(section, "max_n", base.max_n, 1, MAX_N),
            max_schema_bytes=_read_bound(section, "max_schema_bytes", base.max_schema_bytes, 0, MAX_SCHEMA_BYTES),
            max_top_logprobs=_read_bound(section, "max_top_logprobs", base.max_top_logprobs, 0, MAX_TOP_LOGPROBS),
            calendar=calendar,
            team=team,
            team_limits=limits_of_team(section, shared, price) if shared else (),
        )
        keys = section.section("keys") if name else None
        return replace(tenant, keys=self._read_keys(keys, tenant)) if keys else tenant

    def claim(self, keys: Mapping[str, None]) -> bool:
        """Claim these key ids; returns False if another tenant has one of them."""
        num_keys = len(self._keys)
        self._keys |= keys
        return len(self._keys) == num_keys + len(keys)

    def _known(self, name: str, otherwise: str) -> str:
        return name if name in self._levels else otherwise

    def _read_default_class(self, section: Section, highest: str, base: TenantPolicy) -> str:
        """Return the default class. An inherited one gives way to `highest`; one written here must not be above it."""
        default = section.value("default_class", self._class, self._known(base.default_class, highest))
        if self._levels[default] >= self._levels[highest]:
            return default
        if "default_class" in section:
            section.wrong("default_class", f"{quoted(default)} is more urgent than the highest class, {highest}")
        return highest

    def _read_keys(self, section: Section, tenant: TenantPolicy) -> dict[str, KeyPolicy]:
        keys: dict[str, KeyPolicy] = {}
        for key_id, mark, fields in section.sections(words.key_id):
            if key_id in self._keys:
                first = self._keys[key_id]
                if first is None:
                    raise Indivisible
                fields.note(mark, fields.path, f"is a key already at {first}: an id is of one key")
            self._keys[key_id] = mark
            keys[key_id] = self.read_key(fields, key_id, tenant)
        return keys

    def read_key(self, section: Section, key_id: str, tenant: TenantPolicy) -> KeyPolicy:
        """The restrictions of a tenant's key."""
        section.refuse_unknown(fields_of("key"))
        limits = section.section("limits")
        if limits:
            refuse_tenants_limits(limits)
        highest = section.value("highest_class", self._class, None)
        if highest and self._levels[highest] < self._levels[tenant.highest_class]:
            section.wrong("highest_class", f"is above its tenant's, {tenant.highest_class}: a key can only narrow")
        classes = section.values("classes", self._class, ())
        most = max(self._levels[tenant.highest_class], self._levels[highest] if highest else 0)
        if above := next((name for name in classes if self._levels[name] < most), None):
            section.wrong(
                "classes", f"{above} is above the highest class, {highest or tenant.highest_class}: leave it out"
            )
        models = section.values("models", words.model, (ALL_MODELS,))
        others = sorted({*models} - {*tenant.models, ALL_MODELS})
        if others and ALL_MODELS not in tenant.models:
            section.wrong("models", f"{quoted(others[0])} is not among its tenant's models: a key can only narrow")
        return KeyPolicy(
            id=key_id,
            hmac=section.value("hmac", words.hmac, None),
            expires=section.value("expires", words.expires, None),
            scopes=tuple(sorted(section.values("scopes", words.scope, SCOPES))),
            models=models,
            highest_class=highest,
            classes=tuple(sorted(classes, key=self._levels.__getitem__)),
            limits=priced(section, limits, read_limits(limits, key_id, (), tenant.calendar), tenant.price),
            tags=_read_tags(section.section("tags")),
        )


def _read_default_adapter(section: Section, base: str | None) -> str | None:
    name = section.value("default_adapter", words.model, base or NO_ADAPTER)
    return None if name == NO_ADAPTER else name


def _read_bound(section: Section, name: str, base: int, least: int, most: int) -> int:
    """A bound of one request, at most the server's own."""
    return section.value(name, partial(units.count, least=least, most=most), base) if name in section else base


def _read_price(section: Section, base: Price | None) -> Price | None:
    node = section.node("price")
    if node is None or (isinstance(node, Scalar) and node.text == NO_PRICE):
        return base if node is None else None
    fields = section.section("price")
    if fields is None:
        return base
    fields.refuse_unknown(("input", "output", "cached_input", "reasoning", "currency", "batch", "models"))
    missing = [name for name in ("input", "output", "currency") if name not in fields]
    if missing:
        section.wrong("price", f"has no {listed(missing)}")
    given = fields.value("input", units.price, None)
    output = fields.value("output", units.price, None)
    cached = fields.value("cached_input", units.price, given)
    reasoning = fields.value("reasoning", units.price, output)
    currency = fields.value("currency", words.currency, None)
    if given is None or output is None or cached is None or reasoning is None or currency is None:
        return base
    price = Price(given, output, cached, reasoning, currency, fields.value("batch", units.share, Decimal(1)))
    models = fields.section("models")
    of_models = models.sections(words.model) if models else ()
    priced = {name: _read_price_of_model(one, price) for name, _, one in of_models}
    return replace(price, models=tuple(sorted(priced.items(), key=itemgetter(0))))


def _read_price_of_model(section: Section, base: Price) -> Price:
    """A model's price; what it leaves out is as for all others."""
    section.refuse_unknown(("input", "output", "cached_input", "reasoning", "batch"))
    given = section.value("input", units.price, base.input)
    cached = section.value("cached_input", units.price, given if "input" in section else base.cached_input)
    output = section.value("output", units.price, base.output)
    reasoning = section.value("reasoning", units.price, output if "output" in section else base.reasoning)
    return Price(given, output, cached, reasoning, base.currency, section.value("batch", units.share, base.batch))


def _read_cache_limits(section: Section | None, base: CacheLimits) -> CacheLimits:
    if section is None:
        return base
    section.refuse_unknown(fields_of("prefix_cache"))
    pinned = _read_pinned(section, base.pinned)
    floor = section.value("floor", partial(units.size, least=0), base.floor)
    ceiling = section.value("ceiling", _ceiling, base.ceiling)
    if ceiling is None or floor <= ceiling:
        return CacheLimits(floor, ceiling, pinned)
    if "floor" in section:
        section.wrong("floor", f"is above the ceiling, {units.show_size(ceiling)}: lower it, or raise the ceiling")
    else:
        section.wrong("ceiling", f"is below the floor of defaults, {units.show_size(floor)}: raise it, or lower floor")
    return base


def _read_stored(section: Section | None, base: StoredResponseLimits) -> StoredResponseLimits:
    if section is None:
        return base
    section.refuse_unknown(fields_of("stored_responses"))
    return StoredResponseLimits(
        section.value("bytes", partial(units.size, least=0), base.bytes),
        section.value("retention", units.positive_duration, base.retention),
        _read_bound(section, "background", base.background, 0, MAX_BACKGROUND_RESPONSES),
    )


def _read_batches(section: Section | None, base: BatchLimits) -> BatchLimits:
    if section is None:
        return base
    section.refuse_unknown(fields_of("batches"))
    return BatchLimits(
        section.value("file_bytes", partial(units.size, least=0), base.file_bytes),
        section.value("retention", units.positive_duration, base.retention),
        _read_bound(section, "lines", base.lines, 1, MAX_BATCH_LINES),
        _read_bound(section, "open", base.open, 1, MAX_OPEN_BATCHES),
    )


def _read_usage(section: Section | None, base: UsageDetail) -> UsageDetail:
    if section is None:
        return base
    section.refuse_unknown(fields_of("usage"))
    by = tuple(sorted(section.values("by", words.usage_part, base.by)))
    if len(by) > MAX_USAGE_PARTS:
        section.wrong("by", f"has {len(by)} parts: at most {MAX_USAGE_PARTS} are told apart")
    return UsageDetail(by, _read_bound(section, "rows", base.rows, 0, MAX_USAGE_ROWS))


def _read_tags(section: Section | None) -> tuple[tuple[str, str], ...]:
    """The tags of a key, by name."""
    if section is None:
        return ()
    if len(section.names) > MAX_TAGS:
        section.note(section.mark, section.path, f"has {len(section.names)} tags: at most {MAX_TAGS} are allowed")
    for name in section.names:
        section.convert(Scalar(section.mark, name, is_plain=False), section.path, words.tag_name, "")
    return tuple((name, section.value(name, words.tag_value, "")) for name in sorted(section.names))


def _read_guardrail(section: Section, base: GuardrailPolicy | None) -> GuardrailPolicy | None:
    node = section.node("guardrail")
    if node is None or (isinstance(node, Scalar) and node.text == NO_GUARDRAIL):
        return base if node is None else None
    fields = section.section("guardrail")
    if fields is None:
        return base
    fields.refuse_unknown(fields_of("guardrail"))
    if base is None and "url" not in fields:
        section.wrong("guardrail", "has no url: name the address that is asked")
    known = base or GuardrailPolicy("")
    stages = fields.values("stages", words.guardrail_stage, known.stages)
    return GuardrailPolicy(
        fields.value("url", words.guardrail_url, known.url),
        tuple(stage for stage in GUARDRAIL_STAGES if stage in stages),
        fields.value("deadline", words.guardrail_deadline, known.deadline),
        fields.value("on_failure", words.guardrail_failure, known.on_failure),
        _read_bound(fields, "hold", known.hold, 1, MAX_GUARDRAIL_HOLD_CHARS),
    )


def _read_pinned(section: Section, base: tuple[str, ...]) -> tuple[str, ...]:
    """The pinned system prompts, without duplicates."""
    node = section.node("pinned")
    if isinstance(node, Scalar) and node.text == NO_PINS:
        return ()
    pinned = section.values("pinned", words.system_prompt, base)
    if len(pinned) > MAX_PINNED_PROMPTS:
        section.wrong(
            "pinned",
            f"has {len(pinned)} system prompts: at most {MAX_PINNED_PROMPTS} of a tenant stay, keep those asked most",
        )
    return pinned


def _ceiling(text: str) -> int | None:
    return None if text == UNLIMITED else units.size(text, least=0)


def _read_sharing(section: Section | None, tenants: Collection[str], is_whole: bool) -> dict[str, tuple[str, ...]]:
    """The groups of two tenants and more, with their tenants in order."""
    groups: dict[str, tuple[str, ...]] = {}
    group_of: dict[str, str] = {}

    def member(group: str, text: str) -> str:
        tenant = words.tenant_name(text)
        if is_whole and tenant not in tenants:
            raise ValueError(f"is no tenant of this policy: name it under tenants{did_you_mean(tenant, tenants)}")
        if group_of.setdefault(tenant, group) != group:
            raise ValueError(
                f"is in group {group_of[tenant]} already: a tenant shares with one group, leave it out here"
            )
        return tenant

    for group, members in section.lists(words.group_name, member) if section else ():
        groups[group] = tuple(sorted(members))
        node = section.node(group) if section else None
        if section and isinstance(node, Items) and len(node.nodes) == 1:
            section.wrong(group, "has a single tenant: name two or more, or leave the group out")
    return groups


def _read_aliases(section: Section | None) -> dict[str, tuple[AliasedModel, ...]]:
    """The models of each alias: in order, or with weights for all of them."""
    aliases: dict[str, tuple[AliasedModel, ...]] = {}
    if section is None:
        return aliases

    def aliased(alias: str, text: str) -> AliasedModel:
        name, _, weight = text.rpartition(WEIGHT_MARK)
        has_weight = bool(name) and weight.replace(".", "", 1).isdigit()
        model = words.model(name if has_weight else text)
        if model == alias:
            raise ValueError("is the alias itself: name models of the server")
        return AliasedModel(model, words.weight(weight) if has_weight else None)

    for alias, models in section.lists(words.model, aliased):
        aliases[alias] = models
        if len({one.weight is None for one in models}) > 1:
            section.wrong(alias, "gives some models a weight: give one to each, or to none for the order of the list")
        if len({one.model for one in models}) < len(models):
            section.wrong(alias, "names a model twice: name each once")
    for alias, models in aliases.items():
        if other := next((one.model for one in models if one.model in aliases), None):
            section.wrong(alias, f"{quoted(other)} is an alias, too: name models of the server")
    return aliases


class PolicyFile(NamedTuple):
    """A file as a tree, without the tenants if they are read as texts."""

    name: str
    digest: bytes  # of its content
    tree: Fields
    num_nodes: int
    tenants: TenantTexts | None = None


class KnownTenant(NamedTuple):
    policy: TenantPolicy
    num_nodes: int


class KnownFile(NamedTuple):
    file: PolicyFile
    tenants: dict[bytes, KnownTenant]  # by text, without mistakes
    policies: dict[str, TenantPolicy]  # of these, by name
    keys: dict[str, None]  # of these, by id


class KnownTenants:
    """The parsed texts of tenants, valid for unchanged classes and defaults."""

    def __init__(self) -> None:
        self.files: dict[str, KnownFile] = {}
        self.by_body: dict[bytes, KnownTenant] = {}  # of tenants without keys
        self.forms: dict[tuple[str, ...], Form | None] = {}  # by the text around words; None: no form
        self.num_read = 0  # newly read tenants in all
        self._inherited: object = None

    def inheriting(self, *inherited: object) -> None:
        if inherited != self._inherited:
            self._inherited, self.files, self.by_body = inherited, {}, {}

    def keep(self, files: dict[str, KnownFile]) -> None:
        """Forget all other files, and shared bodies if they hardly repeat."""
        self.files = files
        num_tenants = sum(len(known.tenants) for known in files.values())
        if len(self.by_body) > num_tenants / 2:
            self.by_body = {}
        if len(self.forms) > num_tenants:
            self.forms = {}


class _Tenants:
    """The tenants of one policy, each named once."""

    def __init__(self, reader: TenantReader, default: TenantPolicy, known: KnownTenants) -> None:
        self.found: dict[str, TenantPolicy] = {}
        self._places: dict[str, Mark] = {}  # of newly read tenants
        self._reader = reader
        self._default = default
        self._known = known

    def add_section(self, section: Section) -> None:
        for name, mark, fields in section.sections(words.tenant_name):
            first = self._places.get(name)
            if first is not None and first.file != mark.file:
                fields.note(mark, fields.path, f"is a second time here, after {first}")
            elif name in self.found:
                raise Indivisible
            else:
                self.found[name] = self._reader.read(fields, name, self._default)
                self._places[name] = mark
                self._known.num_read += 1

    def add_texts(self, file: PolicyFile, texts: TenantTexts, problems: Problems) -> KnownFile:
        """Add the tenants of a file, and return those without a mistake."""
        before = self._known.files.get(file.name, KnownFile(file, {}, {}, {}))
        if before.file is file and len(before.tenants) == len(texts.texts):
            self._add_known(before.policies, before.keys)
            return before
        by_text, by_body, num_nodes = before.tenants, self._known.by_body, file.num_nodes
        names, sound = set[str](), dict[bytes, KnownTenant]()
        policies, keys = dict[str, TenantPolicy](), dict[str, None]()  # of these
        for some, trees in texts.trees(self._is_known(by_text)):
            if trees is None:
                known = {text: by_text.get(text) or self._alike(text) for text in some}
                named, claimed = _by_name(known)
                self._add_known(named, claimed)
                names |= named.keys()
                num_nodes += sum(one.num_nodes for one in known.values())
                sound |= known
                policies |= named
                keys |= claimed
                continue
            for text, tree in zip(some, trees, strict=True):
                names.add(unicodedata.normalize("NFKC", tree.name))
                num_problems = len(problems.found)
                self.add_section(Section(Fields(tree.mark, {tree.name: (tree.mark, tree.node)}), "tenants", problems))
                num_nodes += tree.num_nodes
                if len(problems.found) == num_problems:
                    policy = self.found[tree.name]
                    sound[text], policies[policy.name] = KnownTenant(policy, tree.num_nodes), policy
                    keys |= dict.fromkeys(policy.keys)
                    if not policy.keys and (parts := name_and_body(text)):
                        by_body[parts[1]] = sound[text]
        if len(names) < len(texts.texts) or num_nodes > MAX_NODES:
            raise Indivisible
        return KnownFile(file, sound, policies, keys)

    def _is_known(self, by_text: Mapping[bytes, KnownTenant]) -> Callable[[bytes], bool]:
        """A function that tells, in the order of the texts, whether a text is known."""
        by_body, coming = self._known.by_body, set[bytes]()  # bodies
        shapes = set[tuple[str, ...]]()  # seen

        def is_known(text: bytes) -> bool:
            if text in by_text:
                return True
            name, body = name_and_body(text) or ("", b"")
            if not name or body in by_body or body in coming:
                return bool(name)
            around, values = words_of(body)
            if around in shapes and (tenant := self._formed(name, around, values)):
                by_body[body] = tenant
                return True
            shapes.add(around)
            coming.add(body)
            return False

        return is_known

    def _formed(self, name: str, around: tuple[str, ...], values: list[str]) -> KnownTenant | None:
        """A tenant parsed from the words of its text alone, if its form is known and it has no mistake."""
        forms = self._known.forms
        if around not in forms:
            forms[around] = form_of(around)
        if (form := forms[around]) is None:
            return None
        try:
            section = Section(Fields(Mark(""), {}), "", problems := Problems()).as_section(form.of(values), name)
            policy = self._reader.read(section, name, self._default)
        except TooManyProblems:
            return None
        if problems.found:
            return None
        self._known.num_read += 1
        return KnownTenant(policy, form.num_nodes)

    def _alike(self, text: bytes) -> KnownTenant:
        """The tenant of a text that differs from a known one in its name alone."""
        name, body = name_and_body(text) or ("", b"")
        known = self._known.by_body.get(body)
        if known is None:
            raise Indivisible
        return known if known.policy.name == name else KnownTenant(replace(known.policy, name=name), known.num_nodes)

    def _add_known(self, policies: Mapping[str, TenantPolicy], keys: Mapping[str, None]) -> None:
        num_found = len(self.found) + len(policies)
        self.found.update(policies)
        if len(self.found) < num_found or not self._reader.claim(keys):
            raise Indivisible


def _by_name(known: Mapping[bytes, KnownTenant]) -> tuple[dict[str, TenantPolicy], dict[str, None]]:
    """Return the policies of tenants by name, and the ids of their keys."""
    policies = {one.policy.name: one.policy for one in known.values()}
    return policies, {key: None for one in policies.values() for key in one.keys}


def parse_files(files: Iterable[PolicyFile], problems: Problems, is_whole: bool, known: KnownTenants) -> Policy:
    """The policy of the files.

    If `is_whole`, no file is missing, so that an undefined name is a mistake. Raises `Indivisible` for a mistake that
    only several texts of tenants make together.
    """
    tops = [(Section(file.tree, "", problems), file) for file in files]
    sections = [top for top, _ in tops]
    for top in sections:
        top.refuse_unknown(fields_of(""))
    classes = read_classes(_only(sections, "classes"))
    teams = read_teams(_only(sections, "teams"))
    reader = TenantReader(classes, teams, is_whole)
    default = reader.read(_only(sections, "defaults"), "", DEFAULTS)
    known.inheriting(classes, teams, default, is_whole)
    tenants, sound = _Tenants(reader, default, known), dict[str, KnownFile]()
    for top, file in tops:
        if section := top.section("tenants"):
            tenants.add_section(section)
        if file.tenants:
            sound[file.name] = tenants.add_texts(file, file.tenants, problems)
    known.keep(sound)
    having = _holder(sections, "unnamed_tenants")
    allow: Unnamed = "allow"
    unnamed = having.value("unnamed_tenants", words.unnamed, allow) if having else allow
    sharing = _read_sharing(_only(sections, "prefix_sharing"), tenants.found, is_whole)
    aliases = _read_aliases(_only(sections, "aliases"))
    return Policy.of(classes, default, tenants.found, unnamed, sharing, teams, aliases)


def _only(tops: list[Section], name: str) -> Section | None:
    """Return the one section of this name among the files."""
    holder = _holder(tops, name)
    return holder.section(name) if holder else None


def _holder(tops: list[Section], name: str) -> Section | None:
    """Return the one file that has this field."""
    having = [top for top in tops if name in top]
    for other in having[1:]:
        other.wrong(name, f"is in {having[0].mark.file} already: one file of a policy has it")
    return having[0] if having else None
