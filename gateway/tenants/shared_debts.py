"""Exchanges tenants' engine time: tells other replicas of the service here, and the core of the service elsewhere."""

import asyncio
from collections.abc import Callable, Mapping

from admission.admission import Admission
from admission.controller import Controller
from gateway.background import Outages
from gateway.settings.settings import Settings
from quotas.errors import QuotaError
from quotas.store.redis_store import RedisStore
from quotas.store.served_sums import ServedSums

PERIOD_SECONDS = 0.1  # between exchanges of several replicas
ALONE_SECONDS = 1.0  # between exchanges of a lone replica


def share_debts(settings: Settings, store: RedisStore, admission: Admission, core: Controller) -> "SharedDebts | None":
    """The exchange of debts among the replicas that serve one model on one store; None if settings or the order leave
    nothing to share.
    """
    if settings.shared_debts == "off" or settings.order != "fair":
        return None
    sums = store.served_sums(f"{settings.served_name} engine_time")
    return SharedDebts(sums, core.share.take_charged, admission.debts_changed, admission.clock)


class SharedDebts:
    """Exchanges the tenants' service with the other replicas, on the event loop; the core never waits for it.

    While the store is away each replica is fair by its own service alone, for `staleness` seconds so far.
    """

    def __init__(
        self,
        sums: ServedSums,
        served: Callable[[], Mapping[str, float]],
        debts_changed: Callable[[Mapping[str, float], int], object],
        clock: Callable[[], float],
    ) -> None:
        """`served` returns this replica's total service, of tenants served since the last call, in engine seconds.
        `debts_changed` is called with the others' service since the last exchange, and the number of replicas.
        """
        self._sums = sums
        self._served = served
        self._debts_changed = debts_changed
        self._clock = clock
        self._exchanged = clock()
        self.replicas = 1  # at the last exchange, this one included
        self.elsewhere = 0.0  # engine seconds served by other replicas since this one's start

    @property
    def staleness(self) -> float:
        """Seconds since this replica last learned the others' service."""
        return self._clock() - self._exchanged

    async def run(self) -> None:
        """Exchange at intervals, as long as the server runs."""
        outages = Outages("fairness is local while other replicas' service is unknown", QuotaError)
        while True:
            with outages:
                await self.exchange()
            await asyncio.sleep(PERIOD_SECONDS if self.replicas > 1 else ALONE_SECONDS)

    async def exchange(self) -> None:
        """Report the service here, and charge the service elsewhere. Raises `QuotaError`; a later call reports it
        all.
        """
        found = await self._sums.exchange(self._served())
        self._exchanged, self.replicas = self._clock(), found.replicas
        if found.served:
            self.elsewhere += sum(found.served.values())
            self._debts_changed(found.served, found.replicas)
