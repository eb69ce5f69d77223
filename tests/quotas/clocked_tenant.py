"""A tenant and another of its team, in a store whose clock the test turns, their limits at random, and the random steps
that they live through.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date, timedelta
from uuid import uuid4

from hypothesis import strategies as st

from quotas.policy.limit import (
    PER_SESSION,
    UTC_CALENDAR,
    Budget,
    BudgetPeriod,
    Calendar,
    Limit,
    Rate,
    Resource,
    TokenPrices,
)
from quotas.reservation import NOTHING, Usage
from quotas.store.redis_store import RedisStore
from quotas.store.scripts import ScriptRunner
from tests.quotas.stores import usage_by_key

LEASE = 30.0
SPENT = (Resource.REQUESTS, Resource.INPUT_TOKENS, Resource.OUTPUT_TOKENS, Resource.TOKENS)
ONE_PRICE, *PRICES = [TokenPrices(7, 2, 11, reasoning, "EUR") for reasoning in (11, 3, 29)]  # of reasoning
TEAM, SESSION = "team", "session"
SESSIONS_KEY = "k1"
NEIGHBOURS_KEY = "k2"
Policy = dict[str | None, list[Limit]]
"""Limits by key: None for the tenant's own, `TEAM` for those of the team, to which `NEIGHBOURS_KEY` of the other tenant
belongs as well, and `SESSION` for those of the one session, whose requests have `SESSIONS_KEY`.
"""
Steps = list[tuple[object, ...]]

calendars = st.sampled_from(
    [UTC_CALENDAR, Calendar("Europe/Berlin"), Calendar("Australia/Lord_Howe", 6), Calendar("Asia/Kathmandu", 2)]
)
_windows = st.sampled_from([1, 60, 3600]) | st.sampled_from(list(BudgetPeriod))


@st.composite
def _limits(
    draw: st.DrawFn,
    owner: str | None,
    amounts: st.SearchStrategy[int],
    held: tuple[int, int],
    prices: Sequence[TokenPrices],
) -> Limit:
    if owner == SESSION:
        return Limit(draw(st.sampled_from(SPENT)), draw(amounts), PER_SESSION, session=SESSION)
    key, team = (None, TEAM) if owner == TEAM else (owner, None)
    if draw(st.integers(0, 3)) == 0:
        return Limit(Resource.CONCURRENT_REQUESTS, draw(st.integers(*held)), None, key, team=team)
    window, amount = draw(_windows), draw(amounts)
    if isinstance(window, BudgetPeriod):
        budget = Budget(window, draw(calendars))
        if draw(st.integers(0, 3)) == 0:
            return Limit(Resource.COST, 5 * amount, budget, key, draw(st.sampled_from(prices)), team)
        return Limit(draw(st.sampled_from(SPENT)), amount, budget, key, team=team)
    return Limit(draw(st.sampled_from(SPENT)), amount, Rate(window, draw(amounts)), key, team=team)


def policies_of(
    keys: Iterable[str | None],
    amounts: st.SearchStrategy[int],
    held: tuple[int, int],
    most: int,
    fewest: int = 1,
    prices: Sequence[TokenPrices] = PRICES,
) -> st.SearchStrategy[Policy]:
    """`fewest` to `most` limits of the tenant and of each key; `held`: the fewest and the most requests at once."""
    limits = {key: _limits(key, amounts, held, prices) for key in keys}
    return st.fixed_dictionaries(
        {
            key: st.lists(one, min_size=fewest, max_size=most, unique_by=lambda limit: limit.name)
            for key, one in limits.items()
        }
    )


async def booked(store: RedisStore, tenant: str, days: Iterable[int]) -> Usage:
    """Sum up what a ledger holds on days that are counted from 1970 on."""
    ledgers = [await usage_by_key(store, tenant, date(1970, 1, 1) + timedelta(days=day)) for day in days]
    return sum((usage for ledger in ledgers for usage in ledger.values()), NOTHING)


class ClockedTenant:
    """Steps are calls of its methods by their names."""

    def __init__(self, runner: ScriptRunner, policy: Policy, now: int) -> None:
        self.runner = runner
        self.now = now  # microseconds
        self.tenant, self.neighbour, self.team = uuid4().hex, uuid4().hex, uuid4().hex
        self.policy = self.named(policy)

    async def live(self, steps: Steps) -> None:
        await self.wait(0)
        for verb, *arguments in steps:
            await getattr(self, str(verb))(*arguments)

    async def wait(self, micros: int) -> None:
        self.now += micros
        await self.runner.client.execute(b"SET", b"test:clock", b"%d" % self.now)

    def named(self, policy: Policy) -> Policy:
        """The policy, with the name that the team has in this life."""
        return defaultdict(list, policy) | {TEAM: [replace(limit, team=self.team) for limit in policy.get(TEAM, ())]}

    def tenant_of(self, key: str | None) -> str:
        return self.neighbour if key == NEIGHBOURS_KEY else self.tenant

    def limits_of(self, key: str | None) -> tuple[Limit, ...]:
        own = () if key == NEIGHBOURS_KEY else self.policy[None]
        return (
            *own,
            *(self.policy[key] if key else ()),
            *self.policy[TEAM],
            *(self.policy[SESSION] if key == SESSIONS_KEY else ()),
        )

    async def state(self, suffix: str = "", owner: str | None = None) -> dict[bytes, bytes]:
        """Returns what the store has of the tenant, or of another `owner`."""
        words = await self.runner.client.execute(b"HGETALL", f"sluice:{{{owner or self.tenant}}}{suffix}".encode())
        return dict(zip(words[::2], words[1::2], strict=True))
