"""The time of a server between two steps beside the device: delivering tokens, and reading and ending requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from admission.event_logs.numbers import in_seconds
from admission.step_times.least_squares import Evidence, solve_non_negative

RIDGE_SHARE_OF_SQUARES = 0.05  # rows that vary by less than a quarter of their mean are hardly informative


@dataclass(frozen=True, slots=True)
class HostTime:
    """Seconds between the end of a step and the beginning of the next, linear in the host's work.

    If steps are planned ahead of the device and the host has a processor of its own, they are hardly any. If it shares
    one with the device, they are a good part of a short step: a third with the embedded model on one core.
    """

    step: float = 0.0
    row: float = 0.0  # of the ended step, whose token is delivered
    request: float = 0.0  # arrived or ended since the previous step was planned

    def seconds(self, rows: int, requests: int) -> float:
        return self.step + self.row * rows + self.request * requests


NO_TIME = HostTime()


class Host:
    """A host that serves in a simulation."""

    def __init__(self, time: HostTime) -> None:
        self._time = time
        self._requests = self._rows = 0  # to be handled before the next step

    def serve(self) -> None:
        """Record an arrival or an end of a request."""
        self._requests += 1

    def launch(self, rows: int, now: float, done_at: float) -> float:
        """Launch a step behind the steps in flight, which are done at `done_at`; return when it begins."""
        delivered = self._rows if done_at > now else 0
        seconds = self._time.seconds(delivered, self._requests)
        self._rows, self._requests = rows, 0
        return max(done_at, now) + seconds


class HostTimes:
    """Learns the time of a host between two steps from the entries of its event log."""

    def __init__(self) -> None:
        self._evidence = Evidence()
        self._planned: dict[int, tuple[float, int]] = {}  # steps in flight: when, and their rows
        self._done_at = 0.0  # of the last step, as the host saw it
        self._rows = self._requests = 0  # of that step, and since

    def add(self, entry: Sequence[Any]) -> None:
        match entry[0]:
            case "arrive" | "finish":
                self._requests += 1
            case "plan" if entry[2] is not None:
                self._planned[entry[2]] = in_seconds(entry[1]), entry[3] + len(entry[5])
            case "lost":
                self._planned.clear()
            case "done":
                self._done(in_seconds(entry[1]), entry[2], in_seconds(entry[3]), len(entry[4]) + len(entry[5]))

    def _done(self, now: float, step: int, elapsed: float, ended: int) -> None:
        planned, rows = self._planned.pop(step)
        delivered = self._rows if self._done_at > planned else 0
        between = max(0.0, now - elapsed - max(planned, self._done_at))
        self._evidence.add([[1.0], [float(delivered)], [float(self._requests)]], [between], [1.0], 1.0)
        self._done_at, self._rows, self._requests = now, rows, ended

    @property
    def fitted(self) -> HostTime:
        """The least-squares fit; costs that equal row counts cannot separate are the step's."""
        gram = [list(row) for row in self._evidence.gram]
        for place in (1, 2):
            gram[place][place] *= 1 + RIDGE_SHARE_OF_SQUARES
        step, row, request, *_ = solve_non_negative(gram, self._evidence.moment)
        return HostTime(step, row, request)
