"""Masks API keys in log lines, pages, exports and answers, where a client has put one by mistake: in a path,
as the name of a model, in a header that is handed on.
"""

import re
from collections.abc import Iterable

MASK = "***"
MIN_SECRET_CHARS = 12  # of a secret that is looked for as such: a short one may be a word of any line
_KEY = re.compile(
    r"sk(?:-|%2d)sluice(?:-|%2d)[\w.~+=%-]*|sluice-admin-\w+|(?<![a-z0-9])sk-[\w-]{20,}", re.ASCII | re.IGNORECASE
)
_hidden: list[str] = []  # secrets of another form, that an operator chose


def hide(secrets: Iterable[str]) -> None:
    """Have these be masked as well, for as long as the process runs."""
    _hidden.extend(secret for secret in secrets if len(secret) >= MIN_SECRET_CHARS and secret not in _hidden)


def masked(text: str) -> str:
    """Returns the text with `MASK` in the place of each key."""
    lower = text.lower()
    if "sk-" in lower or ("%" in lower and "sk%" in lower) or "sluice-admin-" in lower:  # rare, and found at once
        text = _KEY.sub(MASK, text)
    for secret in _hidden:
        if secret in text:
            text = text.replace(secret, MASK)
    return text
