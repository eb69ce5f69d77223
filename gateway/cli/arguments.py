"""Types of command-line arguments, parsed as policy files parse the same words."""

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import TypeVar

from gateway.key_mask import masked
from gateway.quoting import quoted
from quotas.policy import units, words
from quotas.policy.policy import SCOPES

T = TypeVar("T")

MAX_DAYS = 36_500
MAX_NAME_CHARS = 64


def argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """Make a parser fit for argparse.

    `read` raises `ValueError` with the end of a sentence that begins with the text.
    """

    def checked(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{quoted(text)} {error}") from None

    return checked


def _days(text: str) -> int:
    if re.fullmatch("[0-9]{1,5}", text) and 1 <= int(text) <= MAX_DAYS:
        return int(text)
    raise ValueError(f"is no number of days: a whole one, 1 to {MAX_DAYS}")


def _scopes(text: str) -> tuple[str, ...]:
    named = {words.scope(word.strip()) for word in text.split(",")}
    return tuple(scope for scope in SCOPES if scope in named)


def _key_name(text: str) -> str:
    if not (1 <= len(text) <= MAX_NAME_CHARS and text.isprintable()):
        raise ValueError(f"is no name: 1 to {MAX_NAME_CHARS} printable characters")
    if masked(text) != text:
        raise ValueError("holds an API key, and lists of keys show names: choose another")
    return text


def _utc_day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError("is no day such as 2027-01-31") from None


def _future(text: str) -> datetime:
    moment = words.expires(text)
    if moment <= datetime.now(UTC):
        raise ValueError("is past: the key would open nothing")
    return moment


tenant = argument(words.tenant_name)
expires = argument(_future)
duration = argument(units.duration)
count = argument(lambda text: units.count(text, least=0))
days = argument(_days)
scopes = argument(_scopes)
key_name = argument(_key_name)
utc_day = argument(_utc_day)
