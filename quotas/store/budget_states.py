"""The rest of the budgets of many tenants, keys and teams, from hashes that are read without a script.

A script for each of 10,000 tenants would take the store and this process seconds. Only an owner of whose state a lost
replica may hold a part is left to the scripts, which settle that part first.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quotas.policy.limit import QUARTER_MICROSECONDS, Budget, Limit
from quotas.reservation import LimitState
from quotas.store.account import levels_key, state_key, team_state_key, until_period_ends
from quotas.store.budget_alerts import alert_states
from quotas.store.redis_client import RedisClient
from quotas.store.redis_link import command

LEVEL = struct.Struct("<4d")  # used, at, part, aside: lua/level.lua
LOST = struct.Struct("<2d")  # first day of the period, amount: lua/level.lua
HELD = (b"r:", b"s:", b"t:")  # fields of reservations, of slices, and of tenants that have them in a team's state

Fields = Mapping[bytes, bytes]


class BudgetOwner(NamedTuple):
    """A team, a tenant or a key that has a budget, with all limits that its requests are charged to."""

    tenant: str | None  # None: of a team
    key: str | None
    team: str | None
    limits: tuple[Limit, ...]

    @property
    def budgets(self) -> list[Limit]:
        """Its own budgets among the limits."""
        owner = self.key, self.team
        return [one for one in self.limits if isinstance(one.window, Budget) and (one.key, one.team) == owner]

    @property
    def hashes(self) -> tuple[bytes, bytes]:
        """The keys of its state, in which reservations are, and of the levels of its own budgets."""
        if self.tenant is None:
            state = team_state_key(self.team or "").encode()
            return state, state
        return state_key(self.tenant).encode(), levels_key(self.tenant, self.budgets[0])


class BudgetState(NamedTuple):
    """The state of a budget, and of each of its alerts: "sent", "failed", "sending", or None before it is due."""

    limit: LimitState
    alerts: list[str | None]


class BudgetHashes(NamedTuple):
    """The hashes of some owners at a moment, to be read in a thread."""

    now: int  # microseconds, by the store's clock
    by_key: Mapping[bytes, Sequence[bytes]]  # fields and values in turns

    @classmethod
    async def of(cls, client: RedisClient, owners: Sequence[BudgetOwner]) -> "BudgetHashes":
        """Ask the store. Raises `StoreUnavailable`."""
        keys = list(dict.fromkeys(key for owner in owners for key in owner.hashes))
        asked = [command(b"TIME"), *(command(b"HGETALL", key) for key in keys)]
        (seconds, micros), *answers = await client.send_all(asked)
        return cls(int(seconds) * 10**6 + int(micros), dict(zip(keys, answers, strict=True)))

    def states(self, owner: BudgetOwner) -> tuple[list[BudgetState], bool]:
        """The states of an owner's budgets, and whether a lost replica may hold a part of them."""
        state, own = (_fields(self.by_key[key]) for key in owner.hashes)
        now = max(self.now, int(state.get(b"now", 0)))
        is_due = b"lease" in state and now >= int(state[b"lease"])
        is_held = is_due and any(name.startswith(HELD) for name in state)
        return [budget_state(limit, own, now) for limit in owner.budgets], is_held


def budget_state(limit: Limit, levels: Fields, now: int) -> BudgetState:
    """The state of a budget, by the hash of its level, at a moment in microseconds."""
    assert isinstance(limit.window, Budget)
    label, first_day = limit.label.encode(), limit.window.first_day(now // QUARTER_MICROSECONDS)
    used, at, _, aside = map(int, LEVEL.unpack(levels[label])) if label in levels else (0, 0, 0, 0)
    noted = levels.get(b"lost:" + label)
    since, lost = map(int, LOST.unpack(noted)) if noted else (0, 0)
    used, lost = used if at >= first_day else 0, lost if since >= first_day else 0
    state = LimitState(limit, max(limit.amount - used, 0), until_period_ends(limit, used, now), aside, lost)
    return BudgetState(state, alert_states(limit, levels, first_day))


def _fields(words: Sequence[bytes]) -> Fields:
    return dict(zip(words[::2], words[1::2], strict=True))
