"""Checks an operator's secrets: the form of a key, and signs of a weak one."""

import base64
import re
from itertools import pairwise

MAX_KEY_CHARS = 512  # characters, each a byte
MIN_ADMIN_KEY_CHARS = 16
MIN_DISTINCT_CHARS = 8  # 32 random hexadecimal digits have fewer once in 10^8
WEBHOOK_PREFIX = "whsec_"  # of Standard Webhooks
MAKE_ONE = "`openssl rand -hex 32` prints a good one"
_PLACEHOLDER = re.compile(
    r"replace|change[-_ ]?(me|it)|placeholder|your[-_ ]|example|fill[-_ ]?in|hexadecimal|password|letmein"
    r"|(super|my)[-_ ]?secret|x{6}|<.+>|\$\{",
    re.IGNORECASE,
)


def placeholder(secret: str) -> str | None:
    """A message if `secret` looks like a template's placeholder; else None."""
    return f"is a placeholder that was never replaced; {MAKE_ONE}" if _PLACEHOLDER.search(secret) else None


def webhook_secret(text: str) -> bytes:
    """The bytes of a secret as Standard Webhooks write it. Raises `ValueError`."""
    try:
        secret = base64.b64decode(text.removeprefix(WEBHOOK_PREFIX), validate=True)
    except ValueError:
        secret = b""
    if not text.startswith(WEBHOOK_PREFIX) or not 24 <= len(secret) <= 64:
        raise ValueError(f"must be {WEBHOOK_PREFIX} and 24 to 64 bytes in base64, as `openssl rand -base64 32` prints")
    return secret


def weakness(secret: str) -> str | None:
    """The weakness of `secret`, in words that follow its name and do not repeat it; None without an obvious one.

    A secret that passes need not be strong: only a placeholder, few distinct characters, a repetition and a plain
    sequence such as 0123456789abcdef are found.
    """
    distinct = len(set(secret))
    if distinct < MIN_DISTINCT_CHARS:
        return f"has only {distinct} distinct characters, at least {MIN_DISTINCT_CHARS} are needed; {MAKE_ONE}"
    if secret in (secret + secret)[1:-1]:
        return f"repeats itself; {MAKE_ONE}"
    if _sequential(secret) > len(secret) // 2:
        return f"counts up or down; {MAKE_ONE}"
    return placeholder(secret)


def _sequential(secret: str) -> int:
    """The number of characters that succeed, or precede, their left neighbour in ASCII."""
    return sum(abs(ord(after) - ord(before)) == 1 for before, after in pairwise(secret))


def is_token(text: str, least: int) -> bool:
    """True if a text has the form of a key, with `least` characters or more."""
    return least <= len(text) <= MAX_KEY_CHARS and all("!" <= character <= "~" for character in text)


def rule(least: int) -> str:
    """Returns in words the rule that `is_token` checks."""
    return f"{least} to {MAX_KEY_CHARS} printable ASCII characters without spaces"
