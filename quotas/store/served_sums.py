"""The engine time that all replicas of a fleet have served each tenant, as sums in the store that never fall.

A fleet has three keys, `sluice:fleet:{name}:` and

    served      by tenant, the sum of what all replicas ever served it, also replicas that are gone
    changed     by tenant, the version in which its sum changed last
    replicas    by replica, the ordinal of what it added last and when it was heard of; and the version

One call adds what this replica has served since the last, and reads the sums that others have changed: its cost goes
by the number of served tenants, not of all. An exchange that a lost connection leaves open is sent again under the same
ordinal, so that it is added once. A tenant that no replica has served for `LIFE_SECONDS` leaves the store, and a
replica forgets it after half of that: its next reading is only where it begins to count.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import quote

from quotas.store.scripts import Script, ScriptRunner

LIFE_SECONDS = 3600.0
LIVE_SECONDS = 10.0  # without a sign, in which a replica counts as live
MICROSECONDS_PER_SECOND = 1_000_000  # the store counts in millionths


class ServedElsewhere(NamedTuple):
    """The other replicas' service of each tenant since the last exchange, and the number of live replicas."""

    served: dict[str, float]
    replicas: int


class ServedSums:
    """One replica's view of the sums of its fleet."""

    def __init__(self, runner: ScriptRunner, fleet: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Replicas of one `fleet` count the same service in the same unit. `clock` is in seconds and never goes
        backwards.
        """
        name = f"sluice:fleet:{{{quote(fleet, safe='')}}}"
        self._keys = tuple(f"{name}:{key}".encode() for key in ("served", "changed", "replicas"))
        self._runner = runner
        self._clock = clock
        self._added: dict[str, int] = {}  # by this replica to each sum, in millionths
        self._totals: dict[str, float] = {}  # to be added
        self._replica, self._ordinal = secrets.token_hex(8), 0
        self._adding: dict[str, int] = {}  # perhaps added: resent alone until the store answers
        self._begin()

    def _begin(self) -> None:
        """Begin to read as a replica that has read nothing."""
        self._version = b""
        self._others: dict[str, tuple[int, float]] = {}  # others' part of a sum, and moment of change; oldest first
        self._answered = self._clock()

    async def exchange(self, served: Mapping[str, float]) -> ServedElsewhere:
        """Add this replica's service, in all since it began, and return the others'.

        Tenants without service since the last call may be left out. Raises `StoreUnavailable` or `StoreFault`; then a
        later call reports it all.
        """
        now = self._clock()
        self._totals.update(served)
        if now > self._answered + LIFE_SECONDS / 2:
            self._begin()
        if not self._adding:
            totals = {tenant: int(total * MICROSECONDS_PER_SECOND) for tenant, total in self._totals.items()}
            self._adding = {one: more for one, total in totals.items() if (more := total - self._added.get(one, 0)) > 0}
            self._totals.clear()
            self._ordinal += bool(self._adding)
        spans = (b"%d" % (LIVE_SECONDS * MICROSECONDS_PER_SECOND), b"%d" % (LIFE_SECONDS * MICROSECONDS_PER_SECOND))
        words = [word for tenant, more in self._adding.items() for word in (_name(tenant), b"%d" % more)]
        head = (self._replica.encode(), b"%d" % self._ordinal, self._version, *spans)
        self._version, replicas, *sums = await self._runner.call(Script.EXCHANGE, self._keys, *head, *words)
        self._answered = now
        for tenant, more in self._adding.items():
            self._added[tenant] = self._added.get(tenant, 0) + more
        self._adding = {}
        return ServedElsewhere(self._read(sums, now), int(replicas))

    def _read(self, sums: list[bytes], now: float) -> dict[str, float]:
        """The others' part of the changes.

        A sum that is new to this replica, or has fallen because the store lost it, is the new start of counting.
        """
        served: dict[str, float] = {}
        for name, total in zip(sums[::2], sums[1::2], strict=True):
            tenant = name.decode(errors="surrogatepass")
            others = int(total) - self._added.get(tenant, 0)
            before, _ = self._others.pop(tenant, (others, now))
            self._others[tenant] = others, now
            if others > before:
                served[tenant] = (others - before) / MICROSECONDS_PER_SECOND
        while (
            self._others and (oldest := next(iter(self._others))) and self._others[oldest][1] < now - LIFE_SECONDS / 2
        ):
            del self._others[oldest]
        return served


def _name(tenant: str) -> bytes:
    return tenant.encode(errors="surrogatepass")
