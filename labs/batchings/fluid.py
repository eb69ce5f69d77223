"""The fluid balance of a batch: arrivals per step against the sequences that memory can hold.

Of Ao, Luo, Simchi-Levi and Wang, "Optimizing LLM inference: fluid-guided online scheduling with memory constraints"
(arXiv 2504.11320, version 2).
"""

from math import exp

ARRIVAL_WINDOW_S = 10.0  # time constant of the arrival rate


class ArrivalRate:
    """Arrivals per second, an exponential average over `ARRIVAL_WINDOW_S`."""

    def __init__(self) -> None:
        self._count, self._last, self._first = 0.0, 0.0, -1.0

    def arrived(self, now: float) -> None:
        if self._first < 0:
            self._first = self._last = now
        self._count = self._count * exp((self._last - now) / ARRIVAL_WINDOW_S) + 1.0
        self._last = now

    def at(self, now: float) -> float:
        """Return the arrivals per second; a lone first arrival counts as one in `ARRIVAL_WINDOW_S`."""
        seen = ARRIVAL_WINDOW_S * (1.0 - exp((self._first - now) / ARRIVAL_WINDOW_S))
        return (
            self._count
            * exp((self._last - now) / ARRIVAL_WINDOW_S)
            / max(seen, min(ARRIVAL_WINDOW_S, self._count / 2), 1e-9)
        )


class StepSeconds:
    """Mean seconds of a step, an exponential average over 32 steps."""

    def __init__(self) -> None:
        self.mean, self._count = 0.0, 0

    def completed(self, elapsed: float) -> None:
        self._count = min(self._count + 1, 32)
        self.mean += (elapsed - self.mean) / self._count


def memory_of(arriving: float, prompt: float, output: float) -> float:
    """Return the tokens of memory in balance, with `arriving` sequences admitted per step.

    Each of the output + 1 stages has `arriving` sequences, which hold their prompts and on average half their answers.
    """
    return arriving * (output + 1.0) * (prompt + output / 2.0)
