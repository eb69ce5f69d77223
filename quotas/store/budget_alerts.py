"""Alerts of budgets: which of them are due, and which replica sends each, once in a period over all replicas.

A budget's alert is due once what is used and reserved reaches its share, or once the budget has refused a request.
The replica that sees this first claims it in the store, beside the level of the budget:

    alert:<limit>:<percent>:<digest of the URL>    first day of the period, and until when the claim holds (us), or how
                                                   it ended: sent or failed

A replica that is lost while it sends leaves a claim that runs out, after which another replica sends the alert again,
under the same id.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, NamedTuple

from quotas.errors import QuotaError
from quotas.policy.limit import Alert, Budget, Limit
from quotas.store.account import Levels, QuotaAccount
from quotas.store.scripts import Script, ScriptRunner

CLAIM_SECONDS = 900.0  # that a claim holds: longer than all attempts to send take
ASK_SECONDS = 60.0  # between looks at an alert that another replica sends
MAX_KNOWN = 10_000  # alerts of which this replica knows that they need nothing now

AlertEnd = Literal["sent", "failed"]


class Crossing(NamedTuple):
    """An alert of a limit in one period of its budget."""

    levels: bytes  # the key of the hash with the level
    limit: Limit
    alert: Alert
    first_day: int  # of the period, counted from 1 January 1970 on

    @property
    def field(self) -> bytes:
        digest = sha256(self.alert.url.encode()).hexdigest()[:16]
        return f"alert:{self.limit.label}:{self.alert.percent}:{digest}".encode()

    @property
    def id(self) -> str:
        """An id that is the same for every attempt of every replica."""
        text = b" ".join((self.levels, self.field, b"%d" % self.first_day))
        return f"msg_{sha256(text).hexdigest()[:32]}"


@dataclass(frozen=True, slots=True)
class DueAlert:
    """An alert that this replica is to send."""

    crossing: Crossing
    tenant: str  # whose request it was
    used: int  # or reserved, in the units of the limit
    now: float  # Unix time of the store
    resets_at: float  # Unix time


class BudgetAlerts:
    """The alerts of this process. `on_due` is called with each that it has claimed; without a listener none is."""

    def __init__(self, runner: ScriptRunner, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_due: Callable[[DueAlert], object] | None = None
        self._runner = runner
        self._clock = clock
        self._known: dict[Crossing, float] = {}  # until when nothing is to be asked about it
        self._claiming: set[asyncio.Task[None]] = set()

    def check(self, account: QuotaAccount, levels: Levels, refused: Limit | None = None) -> None:
        """Claim the alerts that are due by these levels; a limit that has `refused` a request counts as spent."""
        if self.on_due is None or not account.watched:
            return
        now, used = levels.now, levels.numbers
        for index, key in account.watched:
            limit = account.limits[index]
            assert isinstance(limit.window, Budget)
            spent = max(used[index], limit.amount) if limit is refused else used[index]
            for alert in limit.alerts:
                if 100 * spent < alert.percent * limit.amount:
                    continue
                crossing = Crossing(key, limit, alert, limit.window.first_day(levels.quarter))
                if self._clock() >= self._known.get(crossing, 0.0):
                    self._know(crossing, self._clock() + ASK_SECONDS)
                    due = DueAlert(crossing, account.tenant, used[index], now / 1e6, limit.window.end(now))
                    task = asyncio.create_task(self._claim(due))
                    self._claiming.add(task)
                    task.add_done_callback(self._claiming.discard)

    async def ended(self, crossing: Crossing, end: AlertEnd) -> None:
        """Note that the alert was sent or given up, so that no replica sends it in this period. Raises
        `StoreUnavailable`.
        """
        self._know(crossing, float("inf"))
        said = f"{crossing.first_day} {end}".encode()
        await self._runner.client.execute(b"HSET", crossing.levels, crossing.field, said)

    async def _claim(self, due: DueAlert) -> None:
        crossing = due.crossing
        words = (crossing.field, b"%d" % crossing.first_day, b"%d" % (CLAIM_SECONDS * 1e6))
        try:
            (answer,) = await self._runner.call(Script.CLAIM_ALERT, (crossing.levels,), *words)
        except QuotaError:
            self._known.pop(crossing, None)  # the next request asks again
            return
        if answer == b"done":
            self._know(crossing, float("inf"))
        elif answer == b"yes" and self.on_due is not None:
            self.on_due(due)

    def _know(self, crossing: Crossing, until: float) -> None:
        self._known.pop(crossing, None)
        self._known[crossing] = until
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]


def alert_states(limit: Limit, levels: Mapping[bytes, bytes], first_day: int) -> list[str | None]:
    """The state of each alert of a limit, by the hash of its level, in the period that begins on this day: "sent",
    "failed", "sending", or None before it is due.
    """
    fields = (Crossing(b"", limit, alert, first_day).field for alert in limit.alerts)
    return [_state(levels.get(field), first_day) for field in fields]


def _state(said: bytes | None, first_day: int) -> str | None:
    day, _, state = (said or b"").decode().partition(" ")
    if not day or int(day) < first_day:
        return None
    return "sending" if state.isdecimal() else state
