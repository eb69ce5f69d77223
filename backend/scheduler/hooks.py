"""Scheduler hooks: the choices left to an owner that knows tenants, classes and time."""

from collections.abc import Callable, Iterable
from typing import Protocol

from backend.config import EngineConfig
from backend.scheduler.retention import Retention
from backend.scheduler.scheduled_step import FixedSpareStep, PrefillBudget, SpareStep
from backend.scheduler.sequence import Sequence


class SchedulerHooks(Protocol):
    """Called by the scheduler while it plans or predicts a step; none may block."""

    retention: Retention | None  # of the blocks of finished sequences

    def prefill_budget(
        self, num_decodes: int, decode_context: int, interval: float | None, tokens: int, model: int = 0
    ) -> PrefillBudget:
        """Return the prefill budget, at most `tokens`, of a model's step with these decodes over `decode_context`
        tokens in total. `interval` is the tightest time between tokens promised to a running sequence, in seconds.
        """
        ...

    def decode_seconds(self, num_decodes: int, decode_context: int, model: int = 0) -> float:
        """Return the seconds of a model's step with these decodes, by which drafts are priced."""
        ...

    def draft_seconds(self, start: int, length: int, model: int = 0) -> float:
        """Return the seconds by which one row of `length` tokens with a draft takes longer than as many decodes that
        read the context of `start` tokens once: the device computes it as a prompt.
        """
        ...

    def spare_step(self, num_others: int, others_context: int, interval: float | None, model: int = 0) -> SpareStep:
        """Return what a model's step has for the spare class beside the decodes of others, over `others_context`
        tokens.
        """
        ...

    def due(self, sequence: Sequence) -> float:
        """Return when a sequence is due: the earliest is planned first, and is the last victim. Constant from its
        admission until it waits again.
        """
        ...

    def weight(self, tenant: str) -> float | None:
        """Return the tenant's weight: its share of slots and memory is proportional to it. None: tenants have no
        shares.
        """
        ...

    def may_take(self, tenant: str, other: str) -> bool:
        """Return True if a tenant may take slots and memory from another that holds more of them for its weight."""
        ...

    def first_that(self, may: Callable[[str, int], bool]) -> Sequence | None:
        """Return the first waiting sequence whose tenant and class pass the test. None: there is none, or tenants have
        no shares.
        """
        ...

    def admits(
        self, sequence: Sequence, running: Iterable[Sequence], num_free: int, num_held: int, num_kept: int
    ) -> bool:
        """Return True if `num_free` blocks suffice for `sequence` to join `running`, which it cannot preempt.

        `num_held` of its blocks are held already, to be shared; `num_kept` cached blocks are not evictable. The
        scheduler has made sure that its tokens fit now; the question is the remaining need of all of them.
        """
        ...

    def peak(self, sequences: Iterable[Sequence]) -> int:
        """Return the peak of the blocks that these sequences may hold together."""
        ...

    def admitted(self, sequence: Sequence, *, follows: bool) -> None:
        """Record an admission, perhaps again after a preemption: the next head may depend on it. A sequence that
        `follows` waits for its leader's prefill.
        """
        ...

    def swaps(self, probability: float, blocks_per_place: int) -> bool:
        """Return True if an evicted block is worth a copy to the host, and one back in case of reuse, at this
        probability of reuse. It is one of `blocks_per_place`, with those of groups of layers with a window.
        """
        ...


class DefaultHooks:
    """No promises, no tenants: first come, first served; prefill fills a step, and each running sequence has a free
    block.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.retention: Retention | None = None  # the least recently used is evicted first

    def prefill_budget(
        self, num_decodes: int, decode_context: int, interval: float | None, tokens: int, model: int = 0
    ) -> PrefillBudget:
        return PrefillBudget(tokens)

    def decode_seconds(self, num_decodes: int, decode_context: int, model: int = 0) -> float:
        return 0.01 + 0.0025 * num_decodes  # a row takes a quarter of what every step takes, as on a small CPU

    def draft_seconds(self, start: int, length: int, model: int = 0) -> float:
        return 0.0

    def spare_step(self, num_others: int, others_context: int, interval: float | None, model: int = 0) -> SpareStep:
        return FixedSpareStep()

    def due(self, sequence: Sequence) -> float:
        return sequence.arrival

    def weight(self, tenant: str) -> float | None:
        return 1.0

    def may_take(self, tenant: str, other: str) -> bool:
        return True

    def first_that(self, may: Callable[[str, int], bool]) -> Sequence | None:
        return None

    def admits(
        self, sequence: Sequence, running: Iterable[Sequence], num_free: int, num_held: int, num_kept: int
    ) -> bool:
        return True

    def peak(self, sequences: Iterable[Sequence]) -> int:
        config, peak = self._config, 0
        for one in sequences:
            model = one.request.model
            peak += config.kv_blocks(one.num_tokens, model) + 1 + config.windows_of(model)[0] - one.num_unpaid_blocks
        return peak

    def admitted(self, sequence: Sequence, *, follows: bool) -> None:
        pass

    def swaps(self, probability: float, blocks_per_place: int) -> bool:
        return True
