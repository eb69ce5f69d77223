"""Books each tenant's engine time, and the time for which this process has run: what a machine's bill is made of."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import date

from admission.share import Account
from gateway.background import Outages, map_in_slices
from quotas.damage import tell
from quotas.errors import QuotaError, StoreFault
from quotas.reservation import Usage
from quotas.store.usage_ledger import UsageLedger
from quotas.usage_row import NO_KEY

INTERVAL_SECONDS = 2.0


class EngineHours:
    """Books engine time as usage of its tenant, without a key and without requests; whole microseconds, each once. It
    is what the tenant's accounts were charged, lines of batches and embeddings included.
    """

    def __init__(
        self,
        shares: Iterable[Mapping[str, Account]],
        ledger: UsageLedger,
        clock: Callable[[], float],
        today: Callable[[], date],
    ) -> None:
        """`shares` are the accounts by tenant; `clock` counts seconds and `today` is the day in UTC."""
        self._shares = tuple(shares)
        self._ledger = ledger
        self._clock = clock
        self._today = today
        self._booked: dict[str, int] = {}  # microseconds
        self._day, self._ran, self._since = today(), 0.0, clock()  # `_ran`: seconds of the day until `_since`

    async def book(self) -> None:
        """Book what was used since the last call. Raises `QuotaError`; a later call books the rest."""
        await map_in_slices(dict.fromkeys(tenant for accounts in self._shares for tenant in accounts), self._book)
        now, today = self._clock(), self._today()
        self._ran, self._since = self._ran + now - self._since, now
        try:
            await self._ledger.book_running(self._day, self._ran)
        except StoreFault as error:  # a damaged day would keep the next ones from being booked
            tell(f"running time of {self._day}", str(error))
        if today != self._day:
            self._day, self._ran = today, 0.0

    def _book(self, tenant: str) -> None:
        charged = sum(accounts[tenant].charged for accounts in self._shares if tenant in accounts)
        total, booked = int(charged * 1e6), self._booked.get(tenant, 0)
        if total > booked:  # a correction may take back a part of a charge ahead
            self._booked[tenant] = total
            self._ledger.add(tenant, NO_KEY, Usage(engine_seconds=(total - booked) / 1e6, requests=0))

    async def run(self) -> None:
        """Book at intervals for as long as the server runs."""
        outages = Outages("the machine's time is booked once the store answers", QuotaError)
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            with outages:
                await self.book()
