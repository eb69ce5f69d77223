"""The KV memory that is held and the part of it without tokens, in token-slot-seconds, exact at every event."""

from collections import defaultdict
from dataclasses import dataclass, field

from backend.scheduler.kv_accounts import KVAccounts
from labs.simulation.loop import Loop

WINDOW_SECONDS = 60.0


@dataclass(slots=True)
class Weighed:
    """Token-slot-seconds by window of time. What tenants share counts for each."""

    held: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    unused: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, held: float, unused: float, start: float, end: float) -> None:
        """Add what was used in the same way from `start` to `end`."""
        while start < end:
            window = int(start // WINDOW_SECONDS)
            until = min(end, (window + 1) * WINDOW_SECONDS)
            self.held[window] += held * (until - start)
            self.unused[window] += unused * (until - start)
            start = until

    @property
    def waste(self) -> float:
        return sum(self.unused.values()) / sum(self.held.values())


class WeighingLoop(Loop):
    """A `Loop` that weighs memory: as it is once everything has happened that happens at one moment, until the next."""

    weighed: Weighed
    _use: tuple[float, float] | None = None  # slots held and unused
    _since = 0.0

    def _plan(self, now: float) -> None:
        if self._use is not None and now > self._since:
            self.weighed.add(*self._use, self._since, now)
        super()._plan(now)
        scheduler = self._core.scheduler
        accounts = KVAccounts(scheduler.kv_manager)
        held = sum(accounts.held().values()) * scheduler.config.block_size
        self._use, self._since = (held, sum(accounts.unused_slots().values())), now
