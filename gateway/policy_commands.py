"""`sluice policy`: check policy files, show what they come to, compare two, ask what one says of a request."""

import sys
import time
from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway import arguments
from gateway.entitlement import Entitlement
from gateway.explanation import Explanation, Request
from gateway.flags import add_flags, load
from gateway.key_store import KeyStore, KeyStoreError
from gateway.known_key import KnownKey, any_key_of, find_key
from gateway.settings import Settings
from gateway.store_question import STORE_FLAGS, ask_store
from gateway.unnamed_tenants import told
from quotas.embedded_errors import EmbeddedStoreError
from quotas.errors import QuotaError
from quotas.policy import SERVICE_TIERS, Policy
from quotas.policy_diff import policy_diff
from quotas.policy_file import PolicyError, policy_files, read_policy
from quotas.policy_schema import schema_text
from quotas.policy_text import policy_text
from quotas.reservation import Ask, LimitState

INVALID = 1
DIFFERENT = 1
REFUSED = 1
NOT_COMPARABLE = 2  # as diff(1): trouble
NOT_TOLD = 2

EXIT_STATUS = "Exit status: 0 it would pass, 1 it would be refused, 2 it cannot be told. Nothing is charged."

PATH = "a policy file, or a folder whose *.yaml files are one policy"


def add_to(commands: "_SubParsersAction[Any]") -> None:
    policy = commands.add_parser("policy", help="check, show and compare policy files", description=__doc__)
    policy.set_defaults(parser=policy)
    actions = policy.add_subparsers(title="commands", metavar="COMMAND")
    check = actions.add_parser("check", help="say what is wrong, with file, line and column; exit status 0 or 1")
    check.add_argument("paths", metavar="PATH", type=Path, nargs="+", help=f"{PATH}; each is checked by itself")
    add_flags(check, only={"state_dir": "where keys are looked for whose tenants the policy does not name"})
    check.set_defaults(run=_check)
    show = actions.add_parser("show", help="print what holds for each tenant, defaults filled in, as YAML")
    show.add_argument("path", metavar="PATH", type=Path, help=PATH)
    show.add_argument(
        "--tenant", metavar="NAME", type=arguments.tenant, help="only this one, named in the policy or not"
    )
    show.set_defaults(run=_show)
    diff = actions.add_parser("diff", help="print what changes for whom; exit status 0: nothing, 1: something")
    diff.add_argument("old", metavar="OLD", type=Path, help=PATH)
    diff.add_argument("new", metavar="NEW", type=Path, help="likewise")
    diff.set_defaults(run=_diff)
    explain = actions.add_parser(
        "explain",
        help="say which class and limits a request has, what is left, whether it would pass",
        epilog=EXIT_STATUS,
    )
    _explain_arguments(explain)
    actions.add_parser("schema", help="print the JSON Schema of policy files").set_defaults(run=_schema)
    for action in actions.choices.values():
        action.set_defaults(parser=action)


def _explain_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=Path, help=PATH)
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--key", metavar="ID", help="an API key's id, as `sluice keys list` or the policy has it")
    who.add_argument("--tenant", metavar="TENANT", type=arguments.tenant, help="any of its keys that is not narrowed")
    parser.add_argument(
        "--model", metavar="NAME", dest="asked_model", help="the model asked for (default: one that may be used)"
    )
    parser.add_argument(
        "--input", metavar="TOKENS", type=arguments.count, default="1", help="of the prompt, such as 20k (default: 1)"
    )
    parser.add_argument(
        "--output", metavar="TOKENS", type=arguments.count, default="1", help="max_tokens times n (default: 1)"
    )
    tiers = ("auto", "default", *SERVICE_TIERS)
    parser.add_argument("--service-tier", choices=tiers, metavar="TIER", help=f"{', '.join(tiers)} (default: auto)")
    add_flags(parser, only=STORE_FLAGS)
    parser.set_defaults(run=_explain)


def _check(namespace: Namespace) -> int:
    settings = load(namespace)
    return max(_check_one(path, settings, is_alone=len(namespace.paths) == 1) for path in namespace.paths)


def _check_one(path: Path, settings: Settings, is_alone: bool) -> int:
    try:
        policy = read_policy(path)
        num_files = len(policy_files(path))
    except PolicyError as error:
        return _invalid(error, INVALID)
    num_keys = sum(len(tenant.keys) for tenant in policy.tenants.values())
    counts = ((num_files, "file"), (len(policy.classes), "class"), (len(policy.tenants), "tenant"), (num_keys, "key"))
    valid = f"valid: {', '.join(_counted(*entry) for entry in counts)}; version {policy.version}"
    print(valid if is_alone else f"{path}: {valid}")
    if is_alone:
        _warn_of_unnamed(policy, settings)
    return 0


def _warn_of_unnamed(policy: Policy, settings: Settings) -> None:
    """Says which stored keys are of tenants that the policy, if it were the gateway's, would not name."""
    try:
        records = KeyStore(settings.state_dir).records()
    except (KeyStoreError, OSError):
        return  # whoever checks a policy need not be the gateway's user
    for line in told(policy, records) if policy.tenants else ():
        print(f"warning: a stored key's tenant is not named: {line}", file=sys.stderr)


def _show(namespace: Namespace) -> int:
    try:
        policy = read_policy(namespace.path)
    except PolicyError as error:
        return _invalid(error, INVALID)
    print(policy_text(_only(policy, namespace.tenant) if namespace.tenant else policy), end="")
    return 0


def _only(policy: Policy, tenant: str) -> Policy:
    """The same policy as far as it concerns one tenant. Keeps its version."""
    return replace(policy, tenants={tenant: policy.tenant(tenant)})


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
    request = Request(key, Ask(1, namespace.input, namespace.output), namespace.asked_model, namespace.service_tier)
    states = _states(settings, policy, request)
    explanation = Explanation(policy, request, states, time.time())
    print(explanation.text, end="")
    return REFUSED if explanation.reasons else NOT_TOLD if states is None else 0


def _key(namespace: Namespace, policy: Policy, settings: Settings) -> KnownKey:
    if namespace.key is None:
        return any_key_of(namespace.tenant)
    return find_key(namespace.key, policy, KeyStore(settings.state_dir))


def _states(settings: Settings, policy: Policy, request: Request) -> Sequence[LimitState] | None:
    """What is left of the limits; None, with a word on why, where the store cannot be asked."""
    who = Entitlement(policy, request.key.principal)
    if not who.charged:
        return ()
    try:
        return ask_store(settings, lambda store: store.states(who.name, who.key or None, who.charged))
    except (QuotaError, EmbeddedStoreError) as error:
        print(f"sluice: what is left cannot be told: {error}", file=sys.stderr)
        return None


def _schema(_: Namespace) -> int:
    print(schema_text(), end="")
    return 0


def _invalid(error: PolicyError, status: int) -> int:
    print(error, file=sys.stderr)
    num_problems = len(error.problems)
    print(f"sluice: {_counted(num_problems, 'problem')}: no policy can be made of this", file=sys.stderr)
    return status


def _counted(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
