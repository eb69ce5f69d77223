"""What became of each request of a benchmark. Times are in seconds from the benchmark's start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    ANSWERED = "answered"
    REFUSED = "refused"  # by an error status, at the last attempt
    FAILED = "failed"  # a cut stream, an error in a stream, a broken connection, a timeout
    LEFT = "left"  # the client hung up, as it was to
    UNFINISHED = "unfinished"  # when the benchmark ended


@dataclass(slots=True)
class Exchange:
    """One request with all its attempts; `due` does not move when the generator falls behind."""

    tenant: str
    due: float
    sent: float = 0.0  # the first attempt
    attempts: int = 0
    token_times: list[float] = field(
        default_factory=list
    )  # of the last attempt's chunks that brought a part of an answer
    ended: float = 0.0
    outcome: Outcome | None = None  # None: in flight
    code: str = ""  # of a refusal: the status, and the error's code if it has one; of a failure: its kind
    prompt_tokens: int = 0  # as the server's usage says; 0: it said nothing
    output_tokens: int = 0
    cached_tokens: int = 0
    has_usage: bool = False
    is_right: bool | None = None  # the answer, by its workload's check; None: there is none
    is_slow: bool = False  # its client read slowly

    def note_usage(self, usage: Mapping[str, Any]) -> None:
        """Take what the server told, at the end or so far."""
        self.has_usage = True
        self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.output_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        self.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.due if self.token_times else None

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first, on average; None with fewer than two chunks."""
        times = self.token_times
        return (times[-1] - times[0]) / max(1, self.num_tokens - 1) if len(times) > 1 else None

    @property
    def total(self) -> float:
        return self.ended - self.due

    @property
    def num_tokens(self) -> int:
        """The tokens of the answer, by usage or else by chunks."""
        return self.output_tokens or len(self.token_times)


def _count(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
