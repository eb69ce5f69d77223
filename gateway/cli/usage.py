"""`sluice usage`: the settled use of tenants by UTC day, and its cost where the policy has a price."""

import sys
from argparse import ArgumentTypeError, Namespace, _SubParsersAction
from datetime import UTC, date, datetime, timedelta
from typing import Any

from gateway.cli import arguments
from gateway.cli.flags import SettingsError, add_flags, load
from gateway.cli.store_question import STORE_FLAGS, ask_store
from gateway.tenants.key_source import tag_values
from gateway.tenants.key_store import KeyStore
from gateway.tenants.live_policy import LivePolicy
from gateway.tenants.usage import BY, BY_WORDS, LEDGER_DAYS, Grouping, usage_csv, usage_entries, usage_table

PRICES = "policy file, or folder of them, with the prices; auto: the built-in policy, without prices"

NOTES = """\
The present policy's prices (--policy) apply to past days too. The store is the one of a gateway with the same
--redis-url and --state-dir; a running gateway books its use every few seconds."""


def add_usage_command(commands: "_SubParsersAction[Any]") -> None:
    usage = commands.add_parser("usage", help="the tenants' use by day", description=__doc__, epilog=NOTES)
    usage.add_argument("--tenant", metavar="TENANT", type=arguments.tenant, help="only this tenant (default: all)")
    usage.add_argument(
        "--from",
        metavar="DAY",
        dest="first",
        type=arguments.utc_day,
        help="the first day (default: the first of the month of --to)",
    )
    usage.add_argument(
        "--to", metavar="DAY", dest="last", type=arguments.utc_day, help="the last day (default: today, in UTC)"
    )
    usage.add_argument(
        "--by",
        type=_grouping,
        metavar="WHAT",
        default="tenant",
        help=f"print a row for each {BY_WORDS} (default: tenant)",
    )
    usage.add_argument("--csv", action="store_true", help="print comma-separated values, without totals")
    add_flags(usage, only={"policy": PRICES, **STORE_FLAGS})
    usage.set_defaults(run=_usage, parser=usage)


def _usage(namespace: Namespace) -> int:
    settings = load(namespace)
    today = datetime.now(UTC).date()
    last: date = namespace.last or today
    first: date = namespace.first or last.replace(day=1)
    if first > last:
        raise SettingsError(f"--from {first} is after --to {last}")
    policy = LivePolicy(settings.policy).current
    since, until = max(first, today - timedelta(days=LEDGER_DAYS)), min(last, today + timedelta(days=1))
    grouping: Grouping = namespace.by
    if grouping.by.startswith("tag."):
        records = KeyStore(settings.state_dir).records()
        grouping = Grouping(grouping.by, tag_values(grouping.by.removeprefix("tag."), records, policy))
    tenant = namespace.tenant
    entries = ask_store(settings, lambda store: usage_entries(store, tenant, since, until, grouping, policy))
    if not entries:
        sys.stderr.write(f"no use from {first} to {last}\n")
    if namespace.csv:
        sys.stdout.write(usage_csv(entries, grouping.column))
    elif entries:
        sys.stdout.write(usage_table(entries, grouping.column))
    return 0


def _grouping(text: str) -> Grouping:
    if not BY.fullmatch(text):
        raise ArgumentTypeError(f"must be {BY_WORDS}, got {text[:80]!r}")
    return Grouping(text)
