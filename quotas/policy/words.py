"""The words of policy files: names, ids, choices and dates.

The readers raise `ValueError` with the end of a sentence that begins with the text, as those of `units` do.
"""

import re
from datetime import UTC, date, datetime, time
from functools import partial
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from quotas.policy import units
from quotas.policy.limit import WEEKDAYS
from quotas.policy.policy import MAX_GUARDRAIL_DEADLINE_SECONDS, SCOPES, SERVICE_TIERS
from quotas.policy.problems import did_you_mean
from quotas.policy.schema import (
    CLASS_NAME,
    CURRENCY,
    GROUP_NAME,
    GUARDRAIL_FAILURES,
    GUARDRAIL_STAGES,
    GUARDRAIL_URL,
    HMAC,
    KEY_ID,
    KEY_PREFIX,
    LATENESS,
    LOG_TEXTS,
    MAX_PROMPT_CHARS,
    MODEL,
    NO_TEAM,
    OUTAGES,
    TAG_NAME,
    TAG_VALUE,
    TEAM_NAME,
    TENANT_NAME,
    UNNAMED,
    URL,
    USAGE_PART,
)
from quotas.policy.section import one_of

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_URL_CHARS = 2000


def _matching(pattern: str, complaint: str, text: str) -> str:
    if not re.fullmatch(pattern, text):
        raise ValueError(complaint)
    return text


stored_tenant_name = partial(
    _matching,
    TENANT_NAME,
    "is no name of a tenant: 1 to 64 letters, digits, dots, dashes and underscores, the first a letter or a digit",
)
group_name = partial(
    _matching,
    GROUP_NAME,
    "is no name of a group: 1 to 64 letters, digits, dots, dashes and underscores, the first a letter or a digit",
)
class_name = partial(
    _matching,
    CLASS_NAME,
    "is no name of a class: 1 to 32 small letters, digits, dashes and underscores, the first a letter",
)
key_id = partial(_matching, KEY_ID, "is no id of a key: 1 to 64 letters and digits")
model = partial(_matching, MODEL, "is no name of a model: 1 to 256 characters of ASCII")
tag_name = partial(_matching, TAG_NAME, "is no name of a tag: 1 to 32 letters, digits, dots, dashes and underscores")
tag_value = partial(
    _matching,
    TAG_VALUE,
    "is no value of a tag: 1 to 64 letters, digits, spaces and . _ : / @ -, the first a letter or digit",
)
usage_part = partial(
    _matching, USAGE_PART, "is no part of a request that use is told apart by: user, session, or metadata.NAME"
)
currency = partial(_matching, CURRENCY, "is no currency such as USD (ISO 4217)")
scope = one_of(SCOPES, "a scope")
outage = one_of(OUTAGES, "an outage policy")
lateness = one_of(LATENESS, "a treatment of late requests")
unnamed = one_of(UNNAMED, "a treatment of unnamed tenants")
log_texts = one_of(LOG_TEXTS, "a treatment of prompts and answers in the log of requests")
guardrail_stage = one_of(GUARDRAIL_STAGES, "a stage of a guardrail")
guardrail_failure = one_of(GUARDRAIL_FAILURES, "a treatment of requests without a verdict")
guardrail_url = partial(
    _matching,
    GUARDRAIL_URL,
    "is no address such as http://guardrail:8080/check, without a name and a password",
)


def team_name(text: str) -> str:
    if text == NO_TEAM:
        raise ValueError("is the word for no team: choose another name")
    complaint = (
        "is no name of a team: 1 to 64 letters, digits, dots, dashes and underscores, the first a letter or a digit"
    )
    return _matching(TEAM_NAME, complaint, text)


weekday = one_of(WEEKDAYS, "a weekday")


def time_zone(text: str) -> str:
    """Read the name of a time zone that this machine knows."""
    try:
        ZoneInfo(text)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        near = did_you_mean(text, available_timezones())
        raise ValueError(f"is no time zone of this machine's database, such as Europe/Berlin{near}") from None
    return text


def tenant_name(text: str) -> str:
    """Read the name of a tenant that is to be: an API key in its place would be shown wherever names are."""
    if text.lower().startswith(KEY_PREFIX):
        raise ValueError("is an API key and no name of a tenant: name the tenant that the key is for")
    return stored_tenant_name(text)


def alert_url(text: str) -> str:
    """Read the address that an alert is sent to."""
    rule = f"must be https://HOST[:PORT]/PATH without a password, of at most {MAX_URL_CHARS} characters"
    if not re.fullmatch(URL, text) or len(text) > MAX_URL_CHARS:
        raise ValueError(rule)
    try:
        url = urlsplit(text)
        host, has_password, _ = url.hostname, url.username is not None, url.port
    except ValueError:
        raise ValueError(rule) from None
    if not host or has_password:
        raise ValueError(rule)
    if url.scheme == "http" and host not in LOOPBACK_HOSTS:
        raise ValueError("must begin with https://: http:// is for a receiver on this machine, such as 127.0.0.1")
    return text


def service_tier(text: str) -> str:
    if text in {"auto", "default"}:
        raise ValueError("is the default_class of each tenant: leave it out here and set that")
    return one_of(SERVICE_TIERS, "a service tier")(text)


def system_prompt(text: str) -> str:
    if not text:
        raise ValueError("is no system prompt: write the text that messages of role system have, word for word")
    if len(text) > MAX_PROMPT_CHARS:
        raise ValueError(
            f"has {len(text):,} characters: at most {MAX_PROMPT_CHARS:,} can be pinned, leave out what differs"
        )
    return text


def weight(text: str) -> float:
    weight = units.number(text)
    if not 0.001 <= weight <= 1000:
        raise ValueError("is not within 0.001 and 1000")
    return weight


def guardrail_deadline(text: str) -> float:
    seconds = units.positive_duration(text)
    if seconds > MAX_GUARDRAIL_DEADLINE_SECONDS:
        raise ValueError(f"is longer than {MAX_GUARDRAIL_DEADLINE_SECONDS:g}s, for which no client would wait")
    return seconds


def hmac(text: str) -> str:
    return _matching(HMAC, "is no HMAC-SHA-256: 64 hexadecimal digits", text).lower()


def expires(text: str) -> datetime:
    """Read a date, which is its first moment in UTC, or a time with its zone."""
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
            return datetime.combine(date.fromisoformat(text), time(), UTC)
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("is not a date or time such as 2027-01-31 or 2027-01-31T12:00:00Z") from None
    if moment.tzinfo is None:
        raise ValueError("has no zone: end it in Z for UTC")
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("is in no year from 1 to 9999 in UTC: leave it out for no expiry") from None
