"""One trouble of a running gateway, what shows it, and what helps."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    WARNING = "warning"
    SERIOUS = "serious"  # requests fail, or wait without end


@dataclass(frozen=True, slots=True)
class Finding:
    """Sentences without a full stop. `name` is for scripts: one of few, and it stays."""

    name: str
    trouble: str
    evidence: str
    remedy: str
    severity: Severity = Severity.WARNING

    @staticmethod
    def of(told: Mapping[str, str]) -> "Finding":
        """From what `to_json` gave. Raises `KeyError` and `ValueError` for anything else."""
        severity = Severity(told["severity"])
        return Finding(told["name"], told["trouble"], told["evidence"], told["remedy"], severity)

    def to_json(self) -> dict[str, str]:
        return {
            "name": self.name,
            "trouble": self.trouble,
            "evidence": self.evidence,
            "remedy": self.remedy,
            "severity": self.severity,
        }
