"""The rest of the budgets of many tenants, keys and teams, from hashes that are read without a script.

A script for each of 10,000 tenants would take the store and this process seconds. Only an owner of whose state a lost
replica may hold a part is left to the scripts, which settle that part first.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from redis.exceptions import ResponseError

from quotas.damage import tell
from quotas.policy.limit import QUARTER_MICROSECONDS, Budget, Limit
from quotas.reservation import LimitState
from quotas.store.account import levels_key, state_key, team_state_key, until_period_ends
from quotas.store.budget_alerts import alert_states
from quotas.store.damage import DAMAGE
from quotas.store.redis_client import RedisClient
from quotas.store.redis_link import command

LEVEL = struct.Struct("<4d")  # used, at, part, aside: lua/level.lua
LOST = struct.Struct("<2d")  # first day of the period, amount: lua/level.lua
TIME = command(b"TIME")
HELD = (b"r:", b"s:", b"t:")  # fields of reservations, of slices, and of tenants that have them in a team's state

Fields = Mapping[bytes, bytes]


class BudgetOwner(NamedTuple):
    """A team, a tenant or a key, with its own budgets."""

    tenant: str | None  # None: of a team
    key: str | None
    team: str | None
    budgets: tuple[Limit, ...]
    state: bytes  # the key of the hash in which reservations are
    levels: bytes  # the key of the hash with the levels of its budgets

    @classmethod
    def of(
        cls, tenant: str | None, key: str | None, team: str | None, limits: tuple[Limit, ...]
    ) -> "BudgetOwner | None":
        """The owner with the budgets among its limits; None without any."""
        budgets = tuple([one for one in limits if isinstance(one.window, Budget)])
        if not budgets:
            return None
        state = (team_state_key(team or "") if tenant is None else state_key(tenant)).encode()
        levels = state if tenant is None or key is None else levels_key(tenant, budgets[0])
        return cls(tenant, key, team, budgets, state, levels)


class BudgetState(NamedTuple):
    """The state of a budget, and of each of its alerts: "sent", "failed", "sending", or None before it is due."""

    limit: LimitState
    alerts: list[str | None]


class BudgetLevel(NamedTuple):
    """How much of a budget is used. Its whole state takes several times as long to tell, and is asked of few."""

    owner: BudgetOwner
    limit: Limit
    used: int | None  # in the present period; None: the store does not answer, or what it has is damaged
    fields: Fields  # of the hash of its level
    now: int  # microseconds, by the store's clock
    is_damaged: bool = False

    @classmethod
    def of(cls, owner: BudgetOwner, limit: Limit, fields: Fields, now: int) -> "BudgetLevel":
        try:
            return cls(owner, limit, _level(limit, fields, now)[0], fields, now)
        except DAMAGE as error:
            tell(owner.levels, f"{limit.label}: {error}")
            return cls.damaged(owner, limit)

    @classmethod
    def damaged(cls, owner: BudgetOwner, limit: Limit) -> "BudgetLevel":
        return cls(owner, limit, None, {}, 0, is_damaged=True)

    @property
    def share_left(self) -> float:
        """The part of its amount that is left; 0 if it is not known."""
        amount = self.limit.amount
        return 0.0 if self.used is None else max(amount - self.used, 0) / amount

    @property
    def state(self) -> BudgetState | None:
        """Its state; None if the store does not answer, or what it has is damaged."""
        try:
            return None if self.used is None else budget_state(self.limit, self.fields, self.now)
        except DAMAGE as error:
            tell(self.owner.levels, f"{self.limit.label}: {error}")
            return None


class BudgetHashes(NamedTuple):
    """The hashes of some owners at a moment, to be read in a thread."""

    now: int  # microseconds, by the store's clock
    by_key: Mapping[bytes, Sequence[bytes] | ResponseError]  # fields and values in turns

    @classmethod
    async def of(cls, client: RedisClient, owners: Sequence[BudgetOwner]) -> "BudgetHashes":
        """Ask the store. Raises `StoreUnavailable`."""
        keys = list(dict.fromkeys([key for owner in owners for key in (owner.state, owner.levels)]))
        (seconds, micros), *answers = await client.send_all([TIME, *[command(b"HGETALL", key) for key in keys]])
        return cls(int(seconds) * 10**6 + int(micros), dict(zip(keys, answers, strict=True)))

    def levels(self, owners: Sequence[BudgetOwner]) -> tuple[list[BudgetLevel], list[BudgetOwner]]:
        """The levels of these owners' budgets, and the owners of whose state a lost replica may hold a part."""
        found, held = list[BudgetLevel](), list[BudgetOwner]()
        for owner in owners:
            key = owner.state
            try:
                state = _fields(self.by_key[key])
                now, lease = max(self.now, int(state.get(b"now", 0))), state.get(b"lease")
                is_held = lease is not None and now >= int(lease) and any(name.startswith(HELD) for name in state)
                key = owner.levels
                own = state if key is owner.state else _fields(self.by_key[key])
            except DAMAGE as error:
                tell(key, str(error))
                found += [BudgetLevel.damaged(owner, limit) for limit in owner.budgets]
                continue
            if is_held:
                held.append(owner)
            found += [BudgetLevel.of(owner, limit, own, now) for limit in owner.budgets]
        return found, held


def budget_state(limit: Limit, levels: Fields, now: int) -> BudgetState:
    """The state of a budget, by the hash of its level, at a moment in microseconds."""
    used, aside, first_day = _level(limit, levels, now)
    noted = levels.get(f"lost:{limit.label}".encode())
    since, lost = map(int, LOST.unpack(noted)) if noted else (0, 0)
    left, lost = max(limit.amount - used, 0), lost if since >= first_day else 0
    state = LimitState(limit, left, until_period_ends(limit, used, now), aside, lost)
    return BudgetState(state, alert_states(limit, levels, first_day))


def _level(limit: Limit, levels: Fields, now: int) -> tuple[int, int, int]:
    """How much of a budget is used in its period, and set aside; and the first day of the period."""
    assert isinstance(limit.window, Budget)
    first_day = limit.window.first_day(now // QUARTER_MICROSECONDS)
    level = levels.get(limit.label.encode())
    if level is None:
        return 0, 0, first_day
    used, at, _, aside = LEVEL.unpack(level)
    return int(used) if at >= first_day else 0, int(aside), first_day


def _fields(words: Sequence[bytes] | ResponseError) -> Fields:
    if isinstance(words, ResponseError):
        raise words
    turns = iter(words)
    return dict(zip(turns, turns, strict=True))
