"""What an engine has done so far."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since start; they never go down."""

    joined: int = 0  # sequences that were given a slot, each time
    prompt_tokens: int = 0  # computed for the first time
    recomputed_tokens: int = 0  # computed again after a preemption
    generation_tokens: int = 0
    late_tokens: int = 0  # sampled after their sequence had ended; discarded
    preemptions: int = 0  # for the memory or the slot of others
    lost_steps: int = 0  # for lack of memory on the device
    yields: int = 0  # preemptions of a tenant's youngest for its oldest, at a limit of its own
    shed: int = 0  # preemptions because a step was lost

    @property
    def all_preemptions(self) -> tuple[int, int, int]:
        return self.preemptions, self.yields, self.shed
