"""Who gives way when others need memory or a slot."""

from collections.abc import Iterable

from backend.policy import Policy
from backend.sequence import Sequence


class Victims:
    """Ranks running sequences: the lowest class gives way first, within a class as the policy says."""

    def __init__(self, policy: Policy, max_preemptions: int) -> None:
        self._policy = policy
        self._most = max_preemptions

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        """The largest gives way first."""
        return (sequence.priority_class, *self._policy.victim_rank(sequence))

    def of(self, running: Iterable[Sequence], step: int | None) -> list[Sequence]:
        """Who may be preempted, first choice first: not in `step`, not too often, not before making progress."""
        return sorted((s for s in running if s.last_step != step and self._may_go(s)), key=self.key, reverse=True)

    def may_be_preempted(self, sequence: Sequence) -> bool:
        return sequence.num_preemptions < self._most

    def _may_go(self, sequence: Sequence) -> bool:
        progressed = sequence.num_preemptions == 0 or len(sequence.output) > sequence.num_kept_tokens
        return progressed and self.may_be_preempted(sequence)
