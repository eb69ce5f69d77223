"""The addresses of the replicas of a fleet, from an editable file or a replica's announcement."""

import json
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import yaml

from fleet.view import ReplicaAddress
from gateway.quoting import quoted

FIELDS = ("url", "admin")
MAX_REPLICAS = 256


class ReplicasError(ValueError):
    """A file of replicas is invalid; each line of the message names the place, the problem and the remedy."""


class ReplicasUnreadable(ReplicasError):
    """The system refused to read the file, which may be over at the next attempt."""


def read_replicas(path: Path, by_address: bool = False) -> tuple[ReplicaAddress, ...]:
    """The replicas in a file; with `by_address` their hosts have to be IP addresses. Raises `ReplicasError`."""
    try:
        document = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise ReplicasUnreadable(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ReplicasError(f"{path}: not valid YAML: {error}") from None
    rows = document.get("replicas") if isinstance(document, dict) and set(document) == {"replicas"} else None
    if not isinstance(rows, list) or len(rows) > MAX_REPLICAS:
        raise ReplicasError(
            f"{path}: one field `replicas` is needed, a list of at most {MAX_REPLICAS}, such as "
            "`replicas: [{url: http://10.0.0.1:8000, admin: http://10.0.0.1:8001}]`"
        )
    problems = [
        f"{path}: replicas[{index}] {why}" for index, row in enumerate(rows) if (why := _problem(row, by_address))
    ]
    names = [] if problems else [ReplicaAddress(**row).name for row in rows]
    problems += [f"{path}: {name} is named twice" for name in sorted({name for name in names if names.count(name) > 1})]
    if problems:
        raise ReplicasError("\n".join(problems))
    return tuple(ReplicaAddress(**row) for row in rows)


def parse_replica(document: bytes, by_address: bool = False) -> ReplicaAddress | None:
    """The replica in a JSON document; None if it is invalid, or a required IP address is missing."""
    try:
        row = json.loads(document)
    except ValueError:
        return None
    return None if _problem(row, by_address) else ReplicaAddress(**row)


def _problem(row: object, by_address: bool) -> str | None:
    if not isinstance(row, dict) or set(row) != set(FIELDS):
        return f"must have the fields {' and '.join(FIELDS)}, and no others"
    for field in FIELDS:
        if not _is_origin(row[field]):
            rule = "must be http:// or https:// with a host and a port and nothing behind"
            return f"{field} {rule}, got {quoted(str(row[field]))}"
    if by_address and not _has_address(row["url"]):
        return f"url must have an IP address, which is what a gateway sends to, got {quoted(row['url'])}"
    return None


def _has_address(origin: str) -> bool:
    try:
        return bool(ip_address(urlsplit(origin).hostname or ""))
    except ValueError:
        return False


def _is_origin(text: object) -> bool:
    if not isinstance(text, str):
        return False
    try:
        parts = urlsplit(text)
        has_port = parts.port is not None
        _ = httpx.URL(text).host  # whose rules, also for names of other scripts, are stricter
    except (ValueError, httpx.InvalidURL):
        return False
    return (
        parts.scheme in {"http", "https"}
        and has_port
        and text == f"{parts.scheme}://{parts.netloc}"
        and (bool(parts.hostname) and "@" not in parts.netloc)
    )
