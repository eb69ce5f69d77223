"""Names each part of an edit that a simulation of the given requests cannot show, line by line."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from labs.simulation.arrival import Arrival
from labs.simulation.recording import TraceFacts
from labs.simulation.summary import Summary
from quotas.policy.limit import Budget, Limit, PerSession
from quotas.policy.policy import Policy
from quotas.policy.policy_diff import Change
from quotas.policy.problems import Mark

MOST_LINES = 60
NEVER = {  # fields of a tenant without effect in a simulation
    "on_store_outage": "the quota store never fails in a simulation",
    "default_adapter": "a simulation has one model, and no adapters",
    "log_texts": "what is logged changes nothing for requests",
    "max_n": "a trace says nothing of requests that were refused for what they are",
    "max_schema_bytes": "a trace does not say what answers have to match",
    "max_top_logprobs": "a trace does not say what is told of tokens",
    "stored_responses.bytes": "a trace does not say what is stored",
    "stored_responses.retention": "a trace does not say what is stored",
    **dict.fromkeys(
        ("guardrail", *(f"guardrail.{one}" for one in ("url", "stages", "deadline", "on_failure", "hold"))),
        "a trace does not say what a guardrail would refuse",
    ),
    "batches.file_bytes": "a trace does not say what files hold",
    "batches.retention": "a trace does not say what files hold",
    "batches.lines": "a trace does not say which batch a line is of",
    "batches.open": "a trace does not say which batch a line is of",
    "usage.by": "how finely use is told apart changes nothing for requests",
    "usage.rows": "how finely use is told apart changes nothing for requests",
    "prefix_cache.pinned": "a trace says how long prompts are and what they share, and not what they begin with",
    "price.reasoning": "the trace does not say which tokens were reasoning",
}
FOLLOWING = {"price.cached_input": "price.input", "price.reasoning": "price.output"}
NO_CONTENTS = "the trace does not say what prompts share: nothing is found in the prefix cache"

Places = Mapping[str, Mark]
"""The place of each field of a policy, from `quotas.policy.policy_file.field_places`."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The data by which a run could distinguish policies."""

    facts: TraceFacts
    sources: frozenset[str]  # origins of requests: tenants.acme, tenants.acme.keys.9f2c41d7
    has_unnamed: bool  # there are requests of unnamed tenants
    classes: frozenset[str]  # names of classes with requests under any policy
    knows_kv_bytes: bool
    sharing: frozenset[frozenset[str]] = frozenset()  # tenants with common beginnings of prompts

    @staticmethod
    def of(
        arrivals: Iterable[Arrival],
        facts: TraceFacts,
        policies: Iterable[Policy],
        summaries: Iterable[Summary],
        knows_kv_bytes: bool,
    ) -> "Seen":
        arrivals = list(arrivals)
        who = {(arrival.tenant, arrival.key) for arrival in arrivals}
        tenants = {tenant for tenant, _ in who}
        return Seen(
            facts=facts,
            sources=frozenset(source for pair in who for source in _sources(*pair)),
            has_unnamed=any(tenants - policy.tenants.keys() for policy in policies),
            classes=frozenset(level.name for summary in summaries for level in summary.classes),
            knows_kv_bytes=knows_kv_bytes,
            sharing=_sharing(arrivals),
        )


def _sharing(arrivals: Iterable[Arrival]) -> frozenset[frozenset[str]]:
    """The tenants with a common first unit of content."""
    tenants: defaultdict[int, set[str]] = defaultdict(set)
    for arrival in arrivals:
        for content in (arrival.content, *arrival.more_contents):
            if content is not None:
                tenants[content.ids[0]].add(arrival.tenant)
    return frozenset(frozenset(names) for names in tenants.values() if len(names) > 1)


def unsimulated(changes: Iterable[Change], seen: Seen, *places: Places) -> list[str]:
    """A sentence for each change without effect, for lack of data or because a simulation leaves it out.

    It names the line by the first of `places` that has the field: the edit's, then the edited policy's.
    """
    changes = list(changes)
    followed = _followed(changes, seen)
    lines = [
        f"not simulated: {change.path}{_place(change, places)}: {reason}"
        for change in changes
        if change not in followed and (reason := _reason(change, seen)) is not None
    ]
    more = len(lines) - MOST_LINES
    return [*lines[:MOST_LINES], f"not simulated: {more} more changes, for like reasons"] if more > 0 else lines


def _followed(changes: Iterable[Change], seen: Seen) -> set[Change]:
    """The changes that another change shows: a default that a tenant inherits, or a price of cached or reasoning tokens
    that follows the others'.
    """
    inherited = {change.field for change in changes if change.scope in seen.sources}
    prices = {(change.scope, change.field, change.after) for change in changes}
    return {
        change
        for change in changes
        if (change.scope == "defaults" and change.field in inherited)
        or (change.scope, FOLLOWING.get(change.field), change.after) in prices
    }


def assumed(policies: Iterable[Policy], facts: TraceFacts) -> list[str]:
    """A sentence for each assumption about limits, if there are any."""
    limits = [limit for policy in policies for limit in _limits(policy) if limit.window is not None]
    if not limits:
        return []
    is_dated = facts.began is not None or not any(isinstance(limit.window, Budget) for limit in limits)
    when = "" if is_dated else ", and budgets on the first day of a month: the trace has no calendar"
    has_sessions = any(isinstance(limit.window, PerSession) for limit in limits)
    more = ["assumed: no request has a session: its limits are not simulated"] if has_sessions else []
    return [f"assumed: limits begin unused{when}", *more]


def _limits(policy: Policy) -> Iterator[Limit]:
    for tenant in (policy.default, *policy.tenants.values()):
        yield from tenant.limits + tenant.team_limits
        for key in tenant.keys.values():
            yield from key.limits


def _sources(tenant: str, key: str | None) -> list[str]:
    return [f"tenants.{tenant}", *([f"tenants.{tenant}.keys.{key}"] if key else [])]


def _reason(change: Change, seen: Seen) -> str | None:
    kind, _, name = change.scope.partition(".")
    match kind:
        case "classes":
            return _of_class(name, change.field, seen)
        case "prefix_sharing" | "aliases":
            known = "the trace has the models that served its requests"
            return known if kind == "aliases" else _of_sharing(change, seen)
        case "tenants" if change.scope not in seen.sources:
            return "the trace has no requests of this tenant"
        case "defaults" | "" if change.field != "classes" and not seen.has_unnamed:
            return "every tenant of the trace is named in a policy"
        case "tenants" | "defaults":
            return _of_tenant(change, seen)
    return None


def _of_class(name: str, field: str, seen: Seen) -> str | None:
    if field == "service_tiers" and not seen.facts.has_tiers:
        return "the trace has no service tiers; --service-tiers gives it some"
    if field == "queue.bytes" and not seen.facts.has_body_bytes:
        return "the trace does not say how long bodies are"
    return None if name in seen.classes else "no request was of this class"


def _of_tenant(change: Change, seen: Seen) -> str | None:
    match change.field.split("."):
        case ["keys", key, *rest]:
            return _of_key(f"{change.scope}.keys.{key}", ".".join(rest), seen)
        case ["models"] if seen.facts.model is None:
            return "the trace does not say which models were asked for"
        case _ if change.field in NEVER:
            return NEVER[change.field]
        case ["price", "cached_input"] | ["prefix_cache", _] if not seen.facts.has_contents:
            return NO_CONTENTS
        case ["limits", "kv_bytes"] | ["prefix_cache", _] if not seen.knows_kv_bytes:
            return "the device has no size of a token: give it kv_bytes_per_token"
    return None


def _of_sharing(change: Change, seen: Seen) -> str | None:
    if not seen.facts.has_contents:
        return NO_CONTENTS
    if not seen.facts.is_recorded:
        return None
    old, new = (frozenset(members.split(", ")) for members in (change.before, change.after))
    pairs = [set(map(frozenset, combinations(members, 2))) for members in (old, new)]
    changed = pairs[0] ^ pairs[1]
    shown = {name for pair in changed if any(pair <= names for names in seen.sharing) for name in pair}
    names = ", ".join(sorted({name for pair in changed for name in pair} - shown - (old & new)))
    reason = "blocks in an event log are told apart by the tenants that shared them then: it has none that"
    return f"{reason} {names} shared with another of these" if names else None


def _of_key(source: str, field: str, seen: Seen) -> str | None:
    if field == "hmac":
        return "which secret opens a key changes nothing for its requests"
    if field.startswith("tags."):
        return "tags of keys change nothing for their requests"
    if not seen.facts.has_keys:
        return "the trace has no API keys"
    if source not in seen.sources:
        return "the trace has no requests with this key"
    if field == "models" and seen.facts.model is None:
        return "the trace does not say which models were asked for"
    return "the trace has no time of day" if field == "expires" and seen.facts.began is None else None


def _place(change: Change, places: Iterable[Places]) -> str:
    """Returns the place of a change as text: the field's own, else that in the defaults, else that of its section."""
    paths = [change.path, f"defaults.{change.field}"] if change.scope.startswith("tenants.") else [change.path]
    for path in (*paths, change.scope):
        for known in places:
            if path in known:
                return f" at {known[path].file}:{known[path].line}"
    return ""
