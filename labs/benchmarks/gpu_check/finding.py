"""The findings of one part of the check: figures, some with a bound.

A speed is held to a share of another speed of the same device in the same run, never to a number of one card.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """A figure. An `exact` one keeps its bound on any machine, interpreted too; the others are speeds."""

    what: str
    value: float | str
    unit: str = ""
    bound: float | None = None
    sense: Literal[">=", "<="] = "<="
    exact: bool = False

    @property
    def met(self) -> bool | None:
        """True within its bound; None without a bound."""
        if self.bound is None or isinstance(self.value, str):
            return None
        return self.value >= self.bound if self.sense == ">=" else self.value <= self.bound

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}

    def __str__(self) -> str:
        shown = self.value if isinstance(self.value, str) else f"{self.value:,.4g}"
        verdict = "" if self.met is None else f"  {'met' if self.met else 'MISS'} ({self.sense} {self.bound:g})"
        return f"{self.what:58}{shown:>12} {self.unit}{verdict}".rstrip()
