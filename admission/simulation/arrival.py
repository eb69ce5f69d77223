"""One request of a workload: when it comes, how long it is, whose it is."""

from math import inf
from typing import NamedTuple


class Arrival(NamedTuple):
    """Times in seconds from the workload's start, lengths in tokens."""

    time: float
    prompt_tokens: int
    output_tokens: int  # what it generates if nobody ends it earlier
    session: int = 0  # requests that belong together share it; what tenants by hash go by
    tenant: str = ""  # empty: not assigned yet
    priority_class: int = 0
    max_tokens: int = 0  # what it declares; 0: its output length, known exactly
    patience: float = inf  # it leaves when it has no token after this long
    deadline: float | None = None  # seconds in which it wants its first token, and says so
    done_within: float | None = None  # the same for its last token
    attempt: int = 0  # retries before it

    @property
    def most_tokens(self) -> int:
        """The longest it may become, by its own declaration."""
        return self.prompt_tokens + max(self.max_tokens, self.output_tokens)
