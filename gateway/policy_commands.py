"""`sluice policy`: check policy files, show what they come to, compare two policies, print the format's schema."""

import sys
from argparse import ArgumentTypeError, Namespace, _SubParsersAction
from dataclasses import replace
from pathlib import Path
from typing import Any

from quotas.policy import Policy
from quotas.policy_diff import policy_diff
from quotas.policy_file import PolicyError, policy_files, read_policy
from quotas.policy_schema import schema_text
from quotas.policy_text import policy_text
from quotas.words import tenant_name

INVALID = 1
DIFFERENT = 1
NOT_COMPARABLE = 2  # as diff(1): trouble

PATH = "a policy file, or a folder whose *.yaml files are one policy"


def add_to(commands: "_SubParsersAction[Any]") -> None:
    policy = commands.add_parser("policy", help="check, show and compare policy files", description=__doc__)
    actions = policy.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = actions.add_parser("check", help="say what is wrong, with file, line and column; exit status 0 or 1")
    check.add_argument("path", metavar="PATH", type=Path, help=PATH)
    check.set_defaults(run=_check)
    show = actions.add_parser("show", help="print what holds for each tenant, defaults filled in, as YAML")
    show.add_argument("path", metavar="PATH", type=Path, help=PATH)
    show.add_argument("--tenant", metavar="NAME", type=_tenant, help="only this one, named in the policy or not")
    show.set_defaults(run=_show)
    diff = actions.add_parser("diff", help="print what changes for whom; exit status 0: nothing, 1: something")
    diff.add_argument("old", metavar="OLD", type=Path, help=PATH)
    diff.add_argument("new", metavar="NEW", type=Path, help="likewise")
    diff.set_defaults(run=_diff)
    actions.add_parser("schema", help="print the JSON Schema of policy files").set_defaults(run=_schema)
    for action in actions.choices.values():
        action.set_defaults(parser=action)


def _tenant(text: str) -> str:
    try:
        return tenant_name(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r:.80} {error}") from None


def _check(namespace: Namespace) -> int:
    try:
        policy = read_policy(namespace.path)
        num_files = len(policy_files(namespace.path))
    except PolicyError as error:
        return _invalid(error, INVALID)
    num_keys = sum(len(tenant.keys) for tenant in policy.tenants.values())
    counts = ((num_files, "file"), (len(policy.classes), "class"), (len(policy.tenants), "tenant"), (num_keys, "key"))
    print(f"valid: {', '.join(_counted(*entry) for entry in counts)}; version {policy.version}")
    return 0


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
