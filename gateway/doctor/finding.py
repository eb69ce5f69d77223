"""A trouble of a running gateway, the evidence of it, and a remedy."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from admission.explain import BEHIND, PAUSED, REASONS


class Severity(StrEnum):
    WARNING = "warning"
    SERIOUS = "serious"  # requests fail, or wait without end


@dataclass(frozen=True, slots=True)
class Finding:
    """A trouble in sentences without a full stop. `name` is for scripts: one of few, and it never changes."""

    name: str
    trouble: str
    evidence: str
    remedy: str
    severity: Severity = Severity.WARNING

    @staticmethod
    def of(entry: Mapping[str, str]) -> "Finding":
        """Parse what `to_json` made. Raises `KeyError` and `ValueError` for anything else."""
        severity = Severity(entry["severity"])
        return Finding(entry["name"], entry["trouble"], entry["evidence"], entry["remedy"], severity)

    def to_json(self) -> dict[str, str]:
        return {
            "name": self.name,
            "trouble": self.trouble,
            "evidence": self.evidence,
            "remedy": self.remedy,
            "severity": self.severity,
        }


OWN_LIMITS = ("allowance", "tokens")  # of `REASONS`: limits of the tenant's own


def plain_reason(reason: str | None) -> str:
    """Return a reason to wait without the words that say whose it is."""
    return (reason or "").removeprefix(BEHIND).removeprefix(PAUSED)


def is_own_limit(reason: str | None) -> bool:
    return plain_reason(reason) in {REASONS[name] for name in OWN_LIMITS}


def is_paused(row: Mapping[str, Any]) -> bool:
    """Return whether a live request stands still at a limit of its tenant."""
    return str(row["reason"] or "").startswith(PAUSED)
