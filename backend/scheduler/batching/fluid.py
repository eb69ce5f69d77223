"""The fluid balance of a batch: how many arrive during a step, and how many may begin for memory to hold out.

Of Ao, Luo, Simchi-Levi and Wang, "Optimizing LLM inference: fluid-guided online scheduling with memory constraints"
(arXiv 2504.11320, version 2).
"""

from math import exp

WINDOW = 10.0  # seconds, over which arrivals are counted


class ArrivalRate:
    """Arrivals a second, of late: each counts less, exponentially, by its age over `WINDOW`."""

    def __init__(self) -> None:
        self._count, self._last, self._first = 0.0, 0.0, -1.0

    def arrived(self, now: float) -> None:
        if self._first < 0:
            self._first = self._last = now
        self._count = self._count * exp((self._last - now) / WINDOW) + 1.0
        self._last = now

    def at(self, now: float) -> float:
        """Return the arrivals a second; of the first alone nothing can be said, and it counts as one in `WINDOW`."""
        seen = WINDOW * (1.0 - exp((self._first - now) / WINDOW))
        return self._count * exp((self._last - now) / WINDOW) / max(seen, min(WINDOW, self._count / 2), 1e-9)


class StepSeconds:
    """What a step takes, averaged over the last few dozen."""

    def __init__(self) -> None:
        self.mean, self._count = 0.0, 0

    def completed(self, elapsed: float) -> None:
        self._count = min(self._count + 1, 32)
        self.mean += (elapsed - self.mean) / self._count


def memory_of(arriving: float, prompt: float, output: float) -> float:
    """Return the tokens of memory that are held in balance, where so many sequences begin in each step.

    In each of the output + 1 stages there are as many, and they hold their prompts and half of their answers.
    """
    return arriving * (output + 1.0) * (prompt + output / 2.0)
