"""`sluice policy`: check policy files, show the effective policy, compare two, explain one for a request."""

import sys
import time
from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from gateway.cli import arguments
from gateway.cli.flags import add_flags, load
from gateway.cli.store_question import STORE_FLAGS, ask_store
from gateway.errors import ApiError, ClassNotAllowed
from gateway.key_mask import masked
from gateway.settings.settings import Settings
from gateway.table import printable, table
from gateway.tenants.effective_policy import EffectivePolicy
from gateway.tenants.key_source import KnownKey, any_key_of, find_key
from gateway.tenants.key_store import KeyStore, KeyStoreError
from gateway.tenants.live_policy import check_policy
from gateway.tenants.unnamed_tenants import unnamed_tenant_lines
from quotas.embedded.errors import EmbeddedStoreError
from quotas.errors import QuotaError, refusals
from quotas.policy.limit import Budget, Limit, Rate, Resource
from quotas.policy.policy import SERVICE_TIERS, ClassPolicy, Policy
from quotas.policy.policy_diff import policy_diff
from quotas.policy.policy_file import PolicyError, parse_policy, policy_files, read_policy, read_sources
from quotas.policy.policy_text import policy_text
from quotas.policy.schema import schema_text
from quotas.policy.units import counted, show_amount, show_count, show_duration, show_size, show_wait
from quotas.reservation import Ask, LimitState

HEADING = ("limit", "allows", "asked", "left", "full again")


@dataclass(frozen=True, slots=True)
class ExplainedRequest:
    """A hypothetical request for `sluice policy explain` to judge."""

    key: KnownKey
    ask: Ask
    model: str | None = None  # None: any allowed one
    service_tier: str | None = None


class Explanation:
    """Explains the outcome of a request under a policy at a Unix time. `states` is None without a store."""

    def __init__(
        self, policy: Policy, request: ExplainedRequest, states: Sequence[LimitState] | None, now: float
    ) -> None:
        self._policy = policy
        self._request = request
        self._effective = EffectivePolicy(policy, request.key.principal)
        self._all = self._effective.limits_of(request.model)
        self._states: Mapping[Limit, LimitState] = {state.limit: state for state in states or ()}
        self._is_asked = states is not None
        self._now = now
        self.reasons = tuple(self._reasons())

    @property
    def verdict(self) -> str:
        if self.reasons:
            return "\n".join(f"it would be refused: {reason}" for reason in self.reasons)
        return "it would pass" if self._is_asked else "nothing in the policy alone refuses it"

    @property
    def text(self) -> str:
        lines = [
            f"policy {self._policy.version}",
            printable(self._request.key.described) + self._note(),
            self._class(),
            self._limits(),
            self.verdict,
        ]
        return "\n".join(lines) + "\n"

    def _class(self) -> str:
        try:
            served = self._effective.service_class(self._request.service_tier)
        except ClassNotAllowed:
            return "no class"
        return f"class {served.name}{_targets(served)}"

    def _note(self) -> str:
        named = self._request.key.principal.tenant in self._policy.tenants
        return "" if named else "; the policy does not name the tenant: its defaults hold"

    def _limits(self) -> str:
        if not self._all:
            return "no limits apply"
        return table(HEADING, [self._row(limit) for limit in self._all], frozenset(HEADING[1:4]))[:-1]

    def _row(self, limit: Limit) -> tuple[str, ...]:
        state, asked = self._states.get(limit), show_amount(limit, self._request.ask.of(limit))
        left = show_amount(limit, state.remaining) if state else "?" if not self._is_asked and limit.is_charged else "-"
        return limit.name, _allowed(limit), asked if limit.is_charged else "-", left, self._full_again(state)

    def _full_again(self, state: LimitState | None) -> str:
        if state is None or state.remaining == state.limit.capacity:
            return ""
        match state.limit.window:
            case Rate():
                return f"in {show_wait(state.reset)}"
            case Budget():
                return f"{datetime.fromtimestamp(round(self._now + state.reset), UTC):%Y-%m-%d %H:%M} UTC"
        return "when others end"

    def _reasons(self) -> Iterator[str]:
        """Yield every reason to refuse the request, in the gateway's order."""
        if (expires := self._request.key.expires) and expires.timestamp() <= self._now:
            yield f"the key expired at {expires:%Y-%m-%d %H:%M} UTC"
        try:
            self._effective.require("inference")
            if self._request.model is not None:
                self._effective.check_model(self._request.model)
            self._effective.service_class(self._request.service_tier)
        except ApiError as error:
            yield str(error)
        untouched = [LimitState(limit, limit.capacity, 0.0) for limit in self._all]
        states = [self._states.get(state.limit, state) for state in untouched]
        yield from map(str, refusals(states, self._request.ask, self._now))


def _targets(served: ClassPolicy) -> str:
    targets = (("first token", served.ttft), ("each further one", served.time_per_output_token))
    promised = [f"{what} in {show_duration(seconds)}" for what, seconds in targets if seconds is not None]
    return f" (targets: {', '.join(promised)})" if promised else " (without targets)"


def _allowed(limit: Limit) -> str:
    if limit.resource is Resource.KV_BYTES:
        return show_size(limit.amount)
    if limit.resource is Resource.COST:
        return show_amount(limit, limit.amount)
    burst = limit.window.burst if isinstance(limit.window, Rate) else limit.amount
    return show_count(limit.amount) + (f" (burst {show_count(burst)})" if burst != limit.amount else "")


INVALID = 1
DIFFERENT = 1
REFUSED = 1
NOT_COMPARABLE = 2  # as diff(1): trouble
NOT_TOLD = 2

EXIT_STATUS = "Exit status: 0 the request would pass, 1 it would be refused, 2 unknown. Nothing is charged."

PATH = "a policy file, or a folder whose *.yaml files are one policy"


def add_policy_command(commands: "_SubParsersAction[Any]") -> None:
    policy = commands.add_parser("policy", help="check, show and compare policy files", description=__doc__)
    policy.set_defaults(parser=policy)
    actions = policy.add_subparsers(title="commands", metavar="COMMAND")
    check = actions.add_parser("check", help="list all problems with file, line and column; exit status 0 or 1")
    check.add_argument("paths", metavar="PATH", type=Path, nargs="+", help=f"{PATH}; each is checked by itself")
    add_flags(
        check,
        only={
            "state_dir": "directory of keys, to warn of tenants outside the policy",
            "kv_memory_bytes": "KV memory, of which the policy's floors must leave some",
        },
    )
    check.set_defaults(run=_check)
    show = actions.add_parser("show", help="print each tenant's effective policy as YAML, with defaults filled in")
    show.add_argument("path", metavar="PATH", type=Path, help=PATH)
    show.add_argument("--tenant", metavar="NAME", type=arguments.tenant, help="only this tenant, in the policy or not")
    show.set_defaults(run=_show)
    diff = actions.add_parser("diff", help="print the changes for each tenant; exit status 0: none, 1: some")
    diff.add_argument("old", metavar="OLD", type=Path, help=PATH)
    diff.add_argument("new", metavar="NEW", type=Path, help=PATH)
    diff.set_defaults(run=_diff)
    explain = actions.add_parser(
        "explain",
        help="explain a request: its class, limits, the rest of each limit, and the decision",
        epilog=EXIT_STATUS,
    )
    _explain_arguments(explain)
    actions.add_parser("schema", help="print the JSON Schema of policy files").set_defaults(run=_schema)
    for action in actions.choices.values():
        action.set_defaults(parser=action)


def _explain_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=Path, help=PATH)
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--key", metavar="ID", help="an API key's id, from `sluice keys list` or the policy")
    who.add_argument(
        "--tenant",
        metavar="TENANT",
        type=arguments.tenant,
        help="a tenant: any key of it that the policy does not restrict",
    )
    parser.add_argument(
        "--model", metavar="NAME", dest="asked_model", help="the requested model (default: any allowed one)"
    )
    parser.add_argument(
        "--input",
        metavar="TOKENS",
        type=arguments.count,
        default="1",
        help="tokens of the prompt, such as 20k (default: 1)",
    )
    parser.add_argument(
        "--output", metavar="TOKENS", type=arguments.count, default="1", help="max_tokens times n (default: 1)"
    )
    tiers = ("auto", "default", *SERVICE_TIERS)
    parser.add_argument(
        "--service-tier", choices=tiers, metavar="TIER", help=f"one of {', '.join(tiers)} (default: auto)"
    )
    add_flags(parser, only=STORE_FLAGS)
    parser.set_defaults(run=_explain)


def _check(namespace: Namespace) -> int:
    settings = load(namespace)
    return max(_check_one(path, settings, is_alone=len(namespace.paths) == 1) for path in namespace.paths)


def _check_one(path: Path, settings: Settings, is_alone: bool) -> int:
    try:
        sources = read_sources(path)
        policy = parse_policy(sources)
        check_policy(policy, sources, [partial(_floors_beyond, settings.kv_memory_bytes)])
        num_files = len(policy_files(path))
    except PolicyError as error:
        return _invalid(error, INVALID)
    num_keys = sum(len(tenant.keys) for tenant in policy.tenants.values())
    counts = ((num_files, "file"), (len(policy.classes), "class"), (len(policy.tenants), "tenant"), (num_keys, "key"))
    valid = f"valid: {', '.join(counted(*entry) for entry in counts)}; version {policy.version}"
    print(valid if is_alone else f"{path}: {valid}")
    if is_alone:
        _warn_of_unnamed(policy, settings)
    return 0


def _floors_beyond(most: int | None, policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield the largest floor, if all floors together take the whole KV memory. The engine knows how much must
    remain.
    """
    floors = {tenant: policy.cache_limits(tenant).floor for tenant in sorted(policy.tenants)}
    if most is not None and sum(floors.values()) >= most:
        kept = f"floors keep {show_size(sum(floors.values()))} in all, and --kv-memory-bytes is {show_size(most)}"
        largest = max(floors, key=lambda tenant: floors[tenant])
        yield f"tenants.{largest}.prefix_cache.floor", f"{kept}: one sequence of max_model_len must fit beside them"


def _warn_of_unnamed(policy: Policy, settings: Settings) -> None:
    """Warn of stored keys whose tenants the policy does not name."""
    try:
        records = KeyStore(settings.state_dir).records()
    except (KeyStoreError, OSError):
        return  # this user may not read the gateway's keys
    for line in unnamed_tenant_lines(policy, records) if policy.tenants else ():
        print(f"warning: a stored key's tenant is not named: {line}", file=sys.stderr)


def _show(namespace: Namespace) -> int:
    try:
        policy = read_policy(namespace.path)
    except PolicyError as error:
        return _invalid(error, INVALID)
    print(policy_text(_only(policy, namespace.tenant) if namespace.tenant else policy), end="")
    return 0


def _only(policy: Policy, tenant: str) -> Policy:
    """The policy, its version unchanged, with one tenant alone and its sharing group."""
    groups = {group: members for group, members in policy.prefix_sharing.items() if tenant in members}
    return replace(policy, tenants={tenant: policy.tenant(tenant)}, prefix_sharing=groups)


def _diff(namespace: Namespace) -> int:
    try:
        changes = policy_diff(read_policy(namespace.old), read_policy(namespace.new))
    except PolicyError as error:
        return _invalid(error, NOT_COMPARABLE)
    print("\n".join(changes) if changes else "nothing changes")
    return DIFFERENT if changes else 0


def _explain(namespace: Namespace) -> int:
    settings = load(namespace)
    try:
        policy = read_policy(namespace.path)
        key = _key(namespace, policy, settings)
    except PolicyError as error:
        return _invalid(error, NOT_TOLD)
    except KeyStoreError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return NOT_TOLD
    request = ExplainedRequest(
        key, Ask(1, namespace.input, namespace.output), namespace.asked_model, namespace.service_tier
    )
    states = _states(settings, policy, request)
    explanation = Explanation(policy, request, states, time.time())
    print(explanation.text, end="")
    return REFUSED if explanation.reasons else NOT_TOLD if states is None else 0


def _key(namespace: Namespace, policy: Policy, settings: Settings) -> KnownKey:
    if namespace.key is None:
        return any_key_of(namespace.tenant)
    return find_key(namespace.key, policy, KeyStore(settings.state_dir))


def _states(settings: Settings, policy: Policy, request: ExplainedRequest) -> Sequence[LimitState] | None:
    """The rest of the limits; None, with a message on standard error, if the store cannot be asked."""
    who = EffectivePolicy(policy, request.key.principal)
    if not who.charged:
        return ()
    try:
        limits = who.charged_in(None, request.model)
        return ask_store(settings, lambda store: store.states(who.name, who.key or None, limits))
    except (QuotaError, EmbeddedStoreError) as error:
        print(f"sluice: the rest of the limits is unknown: {error}", file=sys.stderr)
        return None


def _schema(_: Namespace) -> int:
    print(schema_text(), end="")
    return 0


def _invalid(error: PolicyError, status: int) -> int:
    print(masked(str(error)), file=sys.stderr)
    num_problems = len(error.problems)
    print(f"sluice: {counted(num_problems, 'problem')}: no policy can be made of this", file=sys.stderr)
    return status
