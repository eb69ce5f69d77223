"""Exchanges tenants' engine time: tells other replicas of the service here, and the core of the service elsewhere."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from admission.admission import Admission
from admission.controller import Controller
from gateway.settings.settings import Settings
from quotas.errors import QuotaError
from quotas.store.redis_store import RedisStore
from quotas.store.served_sums import ServedElsewhere

log = logging.getLogger(__name__)

PERIOD_SECONDS = 0.1  # between exchanges where there are several replicas
ALONE_SECONDS = 1.0  # after which a replica that is alone looks for others


class Sums(Protocol):
    """The sums of what all replicas have served, as `quotas.store.served_sums` keeps them."""

    async def exchange(self, served: Mapping[str, float]) -> ServedElsewhere: ...


def share_debts(settings: Settings, store: RedisStore, admission: Admission, core: Controller) -> "SharedDebts | None":
    """Returns what shares debts among the replicas that serve one model on one store; None where settings
    or the order of requests leave nothing to share.
    """
    if settings.shared_debts == "off" or settings.order != "fair":
        return None
    sums = store.served_sums(f"{settings.served_name} engine_time")
    return SharedDebts(sums, core.share.take_charged, admission.debts_changed, admission.clock)


class SharedDebts:
    """Exchanges what tenants were served with the other replicas, on the event loop; the core never waits for it.

    While the store is away each replica is fair by its own service alone, and `staleness` says for how long.
    """

    def __init__(
        self,
        sums: Sums,
        served: Callable[[], Mapping[str, float]],
        debts_changed: Callable[[Mapping[str, float], int], object],
        clock: Callable[[], float],
    ) -> None:
        """`served` returns what this replica has served in all, of tenants that it has served since the last call, in
        engine seconds. `debts_changed` is told what others have since, and how many replicas there are.
        """
        self._sums = sums
        self._served = served
        self._debts_changed = debts_changed
        self._clock = clock
        self._exchanged = clock()
        self.replicas = 1  # as the last exchange found, this one included
        self.elsewhere = 0.0  # that others have served since this replica began

    @property
    def staleness(self) -> float:
        """Seconds since this replica last learned what others have served."""
        return self._clock() - self._exchanged

    async def run(self) -> None:
        """Exchange again and again, as long as the server runs."""
        is_away = False
        while True:
            try:
                await self.exchange()
            except QuotaError as error:
                if not is_away:
                    log.warning("fairness is local while other replicas' service is not known: %s", error)
                is_away = True
            else:
                is_away = False
            await asyncio.sleep(PERIOD_SECONDS if self.replicas > 1 else ALONE_SECONDS)

    async def exchange(self) -> None:
        """Tell what was served here, and charge what was served elsewhere. Raises `QuotaError`; a later call
        tells it all.
        """
        found = await self._sums.exchange(self._served())
        self._exchanged, self.replicas = self._clock(), found.replicas
        if found.served:
            self.elsewhere += sum(found.served.values())
            self._debts_changed(found.served, found.replicas)
