"""Latencies of delivery, measured as tokens leave for their clients; shown under vLLM's names."""

from collections.abc import Callable

from backend.scheduler.sequence import Sequence
from gateway.telemetry.metrics.registry import HistogramSeries

# upper bounds in seconds; those of gen_ai are of the GenAI conventions for a server (August 2026)
TIME_TO_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TIME_PER_OUTPUT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

# upper bounds of buckets of vLLM 0.33, in seconds
FIRST_TOKEN = (*TIME_TO_FIRST_TOKEN, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
INTER_TOKEN_LATENCY = (*TIME_PER_OUTPUT_TOKEN, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)


class DeliveryMetrics:
    """Times first tokens and the gaps between tokens as they are sent to clients; `clock` is the engine's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.first_token = HistogramSeries(FIRST_TOKEN)
        self.gap = HistogramSeries(INTER_TOKEN_LATENCY)
        self._clock = clock

    def delivered(self, sequence: Sequence, before: int, count: int, last: float) -> float:
        """Record `count` tokens sent now, after `before` others, of which the last was sent at `last`. Returns the time
        now.
        """
        now = self._clock()
        if before:
            self.gap.observe((now - last) / (count or 1), count)
        elif count:
            self.first_token.observe(now - sequence.arrival)
            self.gap.observe(0.0, count - 1)
        return now
