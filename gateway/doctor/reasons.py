"""The reasons for which a gateway says that requests wait, as the doctor tells them apart."""

from collections.abc import Mapping
from typing import Any

from admission.explain import BEHIND_PREFIX, PAUSED_PREFIX, REASONS

OWN_LIMITS = ("allowance", "tokens")  # of `REASONS`: limits of the tenant's own


def plain_reason(reason: str | None) -> str:
    """Return a reason to wait without the words that say whose it is."""
    return (reason or "").removeprefix(BEHIND_PREFIX).removeprefix(PAUSED_PREFIX)


def is_own_limit(reason: str | None) -> bool:
    return plain_reason(reason) in {REASONS[name] for name in OWN_LIMITS}


def is_paused(row: Mapping[str, Any]) -> bool:
    """Return whether a live request stands still at a limit of its tenant."""
    return str(row["reason"] or "").startswith(PAUSED_PREFIX)
