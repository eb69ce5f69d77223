"""The result of one check of a machine or a configuration."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"  # serves, below its potential
    PROBLEM = "problem"  # does not serve, or not as configured


@dataclass(frozen=True, slots=True)
class Check:
    """A check's result. `found` and `remedy` are parts of one sentence; `remedy` is empty without a problem."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "verdict": self.verdict, "found": self.found, "remedy": self.remedy}

    def __str__(self) -> str:
        text = f"{self.found}: {self.remedy}" if self.remedy else self.found
        return f"{self.verdict:8} {self.name:11} {text}"


def ok(name: str, found: str) -> Check:
    return Check(name, Verdict.OK, found)


def warning(name: str, found: str, remedy: str) -> Check:
    return Check(name, Verdict.WARNING, found, remedy)


def problem(name: str, found: str, remedy: str = "") -> Check:
    """A problem; without a `remedy` if `found` names it already."""
    return Check(name, Verdict.PROBLEM, " ".join(found.split()), remedy)
