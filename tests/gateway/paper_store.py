"""A store on paper: grants everything, and knows what has not been settled."""

import asyncio
from collections.abc import Callable
from datetime import date

from quotas.policy.limit import Limit
from quotas.policy.policy import Outage
from quotas.reservation import Ask, LimitState, Reservation, Usage
from quotas.store.scripts import CommandObserver


class PaperStore:
    is_connected = True
    num_outages = 0
    set_aside = dict[str, int]

    def __init__(self) -> None:
        self.on_command: list[CommandObserver] = []
        self.outstanding: dict[str, Reservation] = {}
        self.usages: list[Usage] = []
        self.num_reserved = 0
        self.returned = asyncio.Event()

    @property
    def num_unsettled(self) -> int:
        return len(self.outstanding)

    async def reserve(
        self, tenant: str, key: str | None, limits: tuple[Limit, ...], ask: Ask, outage: Outage = "closed"
    ) -> Reservation:
        self.num_reserved += 1
        reservation = Reservation(str(self.num_reserved), tenant, key, ask, limits, tuple)
        self.outstanding[reservation.id] = reservation
        return reservation

    async def extend(self, reservation: Reservation, more_output: int) -> None:
        assert reservation.id in self.outstanding, "extended after it was settled"

    def settle_soon(
        self, reservation: Reservation, usage: Usage, done: Callable[[BaseException | None], object]
    ) -> None:
        asyncio.get_running_loop().call_soon(self._settle, reservation, usage, done)

    def _settle(self, reservation: Reservation, usage: Usage, done: Callable[[BaseException | None], object]) -> None:
        done(None)
        del self.outstanding[reservation.id]
        assert 0 <= usage.input_tokens <= reservation.ask.input_tokens
        assert 0 <= usage.output_tokens <= reservation.ask.output_tokens
        self.usages.append(usage)

    async def states(self, tenant: str, key: str | None, limits: tuple[Limit, ...]) -> tuple[LimitState, ...]:
        return ()

    def book(self, tenant: str, key: str | None, usage: Usage) -> None:
        self.usages.append(usage)

    async def lease_kv(self, tenant: str, limit: int, wanted: int) -> tuple[int, float]:
        return min(limit, wanted), 30.0

    async def heartbeat(self) -> None:
        pass

    async def usage(self, tenant: str, day: date) -> dict[str | None, Usage]:
        return {}

    async def close(self) -> None:
        pass
