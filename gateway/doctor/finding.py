"""A trouble of a running gateway, the evidence of it, and a remedy."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    WARNING = "warning"
    SERIOUS = "serious"  # requests fail, or wait forever


@dataclass(frozen=True, slots=True)
class Finding:
    """A trouble in sentences without a full stop. `name` is for scripts: of a fixed vocabulary, and stable.

    A router names the affected `replicas` of its fleet; none for the trouble of a whole fleet, or of a gateway alone.
    `cause` is the name of the finding that explains it, and `tenant` that of the one tenant that it is about; empty
    without one.
    """

    name: str
    trouble: str
    evidence: str
    remedy: str
    severity: Severity = Severity.WARNING
    replicas: tuple[str, ...] = ()
    cause: str = ""
    tenant: str = ""

    @staticmethod
    def of(entry: Mapping[str, Any]) -> "Finding":
        """Parse what `to_json` made. Raises `KeyError` and `ValueError` for anything else."""
        severity = Severity(entry["severity"])
        replicas = tuple(map(str, entry.get("replicas", ())))
        told = (entry["name"], entry["trouble"], entry["evidence"], entry["remedy"], severity, replicas)
        return Finding(*told, str(entry.get("cause", "")), str(entry.get("tenant", "")))

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "name": self.name,
            "trouble": self.trouble,
            "evidence": self.evidence,
            "remedy": self.remedy,
            "severity": self.severity,
        }
        told |= {"replicas": list(self.replicas)} if self.replicas else {}
        return told | {name: of for name, of in (("cause", self.cause), ("tenant", self.tenant)) if of}
