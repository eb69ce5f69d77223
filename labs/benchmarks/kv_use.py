"""The KV memory that is held and the part of it without tokens, in token-slot-seconds, exact at every event."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from backend.scheduler.kv_accounts import KVAccounts
from labs.simulation.loop import Loop

WINDOW_SECONDS = 60.0


Slots = Mapping[str, int]  # of tokens, by tenant


@dataclass(slots=True)
class Weighed:
    """Token-slot-seconds held and unused, by tenant and by window of time. What tenants share counts for each."""

    held_by_tenant: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    unused_by_tenant: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    held: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # by window
    unused: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, held: Slots, unused: Slots, start: float, end: float) -> None:
        """Add what was used in the same way from `start` to `end`."""
        for weighed, slots in ((self.held_by_tenant, held), (self.unused_by_tenant, unused)):
            for tenant, count in slots.items():
                weighed[tenant] += count * (end - start)
        all_held, all_unused = sum(held.values()), sum(unused.values())
        while start < end:
            window = int(start // WINDOW_SECONDS)
            until = min(end, (window + 1) * WINDOW_SECONDS)
            self.held[window] += all_held * (until - start)
            self.unused[window] += all_unused * (until - start)
            start = until

    @property
    def waste(self) -> float:
        return sum(self.unused_by_tenant.values()) / sum(self.held_by_tenant.values())


class WeighingLoop(Loop):
    """A `Loop` that weighs memory: as it is once everything has happened that happens at one moment, until the next."""

    weighed: Weighed
    _use: tuple[Slots, Slots] | None = None  # held and unused
    _since = 0.0

    def _plan(self, now: float) -> None:
        if self._use is not None and now > self._since:
            held, unused = self._use
            self.weighed.add(held, unused, self._since, now)
        super()._plan(now)
        scheduler = self._core.scheduler
        accounts, size = KVAccounts(scheduler.kv_manager), scheduler.config.block_size
        held = {tenant: blocks * size for tenant, blocks in accounts.held().items()}
        self._use, self._since = (held, accounts.unused_slots()), now
