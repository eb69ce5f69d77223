"""Why a sequence waits or stands still, in the words of the admin API."""

from collections.abc import Mapping
from typing import Any

from admission.explain import BEHIND, PAUSED, REASONS

OWN_LIMITS = ("allowance", "tokens")  # of `REASONS`: limits of the tenant's own


def plain_reason(reason: str | None) -> str:
    """Without whose obstacle it is."""
    return (reason or "").removeprefix(BEHIND).removeprefix(PAUSED)


def is_own_limit(reason: str | None) -> bool:
    return plain_reason(reason) in {REASONS[name] for name in OWN_LIMITS}


def is_paused(row: Mapping[str, Any]) -> bool:
    """Of a request being served."""
    return str(row["reason"] or "").startswith(PAUSED)
