"""`sluice doctor`: checks of a machine and a configuration, or the troubles of a running gateway."""

import json
import os
import sys
import time
from argparse import Namespace, _SubParsersAction
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.cli.arguments import argument
from gateway.cli.flags import SettingsError, add_flags, load
from gateway.doctor.causes import ranked
from gateway.doctor.check import Check, Verdict, problem
from gateway.doctor.finding import Finding, Severity
from gateway.doctor.findings import findings
from gateway.doctor.history import Figure
from gateway.doctor.snapshot import HISTORY_SECONDS, METRICS_INTERVAL_SECONDS, WINDOW_SECONDS, DoctorError
from gateway.settings.secret_rules import MIN_ADMIN_KEY_CHARS, is_token, rule
from gateway.table import printable
from gateway.tenants.key_store import KeyStore
from quotas.policy.units import duration, show_wait

ADMIN_URL = "http://127.0.0.1:8001"
MAX_NAMED_REPLICAS = 3  # named replicas of a shared trouble
KEY_VARIABLE = "SLUICE_ADMIN_KEY"

NOTES = """\
It takes the flags and the variables of `sluice serve`, checks the machine and the configuration, and serves nothing.
With --live it compares two snapshots of a running gateway, from its admin port, and names its troubles; of a router,
the troubles of its fleet and of each replica. The admin key is that of --key-file, else of SLUICE_ADMIN_KEY, else of
the file admin-key in the state directory; SSL_CERT_FILE names the authorities for checking a TLS certificate.
Exit status: 0, or 1 when there is a problem, with --live a serious trouble. docs/diagnosis.md has examples."""


def add_doctor_command(commands: "_SubParsersAction[Any]") -> None:
    doctor = commands.add_parser(
        "doctor",
        help="find faults of a machine, a configuration, or a running gateway",
        usage="sluice doctor [flags of serve]\n       sluice doctor --live [URL] [--last D] [--key-file FILE]",
        epilog=NOTES,
    )
    doctor.add_argument(
        "--live",
        metavar="URL",
        nargs="?",
        const=ADMIN_URL,
        help=f"diagnose a running gateway by its admin port (default: {ADMIN_URL})",
    )
    doctor.add_argument(
        "--key-file", metavar="FILE", type=Path, help="the file that holds the admin key of that gateway"
    )
    doctor.add_argument(
        "--last",
        metavar="D",
        type=argument(_last),
        help=f"with --live: look back for D, up to {show_wait(HISTORY_SECONDS)}, and show what the engine did in it",
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_flags(doctor)
    doctor.set_defaults(run=_doctor, parser=doctor)


def _last(text: str) -> float:
    if not METRICS_INTERVAL_SECONDS <= (seconds := duration(text)) <= HISTORY_SECONDS:
        least, most = show_wait(METRICS_INTERVAL_SECONDS), show_wait(HISTORY_SECONDS)
        raise ValueError(f"is not within {least} and {most}, for which a gateway keeps its metrics")
    return seconds


def _doctor(namespace: Namespace) -> int:
    if namespace.live is not None:
        return _diagnose(namespace)
    for option in ("key_file", "last"):
        if getattr(namespace, option) is not None:
            raise SettingsError(f"--{option.replace('_', '-')} is for --live")
    found = _checks(namespace)
    _print(namespace.json, {"checks": [check.to_json() for check in found]}, map(str, found))
    return int(any(check.verdict is Verdict.PROBLEM for check in found))


def _checks(namespace: Namespace) -> list[Check]:
    from gateway.doctor import checks  # noqa: PLC0415 - brings torch, seconds that --help need not wait for

    try:
        settings = load(namespace)
    except SettingsError as error:
        return [*checks.machine(), *(problem("settings", line) for line in str(error).splitlines())]
    return [*checks.machine(), *checks.configuration(settings)]


def _diagnose(namespace: Namespace) -> int:
    from gateway.doctor.live import LiveGateway  # noqa: PLC0415 - brings an HTTP client

    figures, seen = list[Figure](), f"{WINDOW_SECONDS:g} s and the metrics of the last minutes show"
    with LiveGateway(namespace.live, _admin_key(namespace)) as gateway:
        if gateway.is_router():
            if namespace.last is not None:
                raise DoctorError("--last is of a gateway, and this is a router: name the admin port of a replica")
            found = gateway.own_findings()
        elif namespace.last is not None:
            found, figures = gateway.history(namespace.last)
            seen = "the metrics of that time show"
            if not figures:
                raise DoctorError(f"no metrics are kept yet: ask again in {show_wait(METRICS_INTERVAL_SECONDS)}")
        else:
            before = gateway.snapshot()
            time.sleep(WINDOW_SECONDS)
            found = findings(before, gateway.snapshot())
            now = {finding.name for finding in found}
            found = ranked(found + [past for past in gateway.own_findings() if past.name not in now])
    told = {"findings": [finding.to_json() for finding in found]} | (
        {"figures": [one._asdict() for one in figures]} if figures else {}
    )
    shown = (f"{name:24}{value:>10}  {meaning}" for name, value, meaning in figures)
    _print(namespace.json, told, [*shown, *_told(found, seen)])
    return int(any(finding.severity is Severity.SERIOUS for finding in found))


def _told(found: Iterable[Finding], seen: str) -> Iterable[str]:
    lines = [_as_consequence(finding) if finding.cause else _as_cause(finding) for finding in found]
    return lines or [f"ok       nothing is wrong, as far as {seen}"]


def _as_cause(finding: Finding) -> str:
    told = f"{finding.severity:8} {_whose(finding)}{finding.trouble}\n{'':9}{finding.evidence}\n"
    return f"{told}{'':9}remedy: {finding.remedy}"


def _as_consequence(finding: Finding) -> str:
    return f"{'':9}with it: {_whose(finding)}{finding.trouble} ({finding.evidence})"


def _whose(finding: Finding) -> str:
    """The beginning of a line with the names of the affected replicas, of many the first ones."""
    first, others = finding.replicas[:MAX_NAMED_REPLICAS], finding.replicas[MAX_NAMED_REPLICAS:]
    more = f" and {len(others)} more" if others else ""
    return f"{', '.join(first)}{more}: " if first else ""


def _admin_key(namespace: Namespace) -> str:
    source, key = _found_key(namespace)
    if not is_token(key, MIN_ADMIN_KEY_CHARS):
        raise DoctorError(f"{source} must hold the admin key, {rule(MIN_ADMIN_KEY_CHARS)}: see --key-file")
    return key


def _found_key(namespace: Namespace) -> tuple[str, str]:
    """Return where the admin key was found, and the key. Raises `DoctorError`."""
    if namespace.key_file is None and (key := os.environ.get(KEY_VARIABLE)):
        return KEY_VARIABLE, key
    path: Path = namespace.key_file or KeyStore(load(namespace).state_dir).admin_key_path
    try:
        return str(path), path.read_text("latin-1").strip()
    except OSError as error:
        raise DoctorError(
            f"{path}: {error.strerror}; name the file that holds the admin key with --key-file, or set {KEY_VARIABLE}"
        ) from None


def _print(as_json: bool, told: Mapping[str, Sequence[Any]], lines: Iterable[str]) -> None:
    if as_json:
        sys.stdout.write(json.dumps(told, indent=1) + "\n")
        return
    for line in lines:
        sys.stdout.write("\n".join(map(printable, line.split("\n"))) + "\n")
