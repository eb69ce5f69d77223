"""What one replica may spend of some limits while it cannot ask the store. Pure: times are told."""

from collections.abc import Sequence

from quotas.account import Account
from quotas.demand import Demand
from quotas.reservation import Ask, Usage

SAFETY = 0.9  # of the lease: the store must not end a slice before its replica has, and clocks differ in pace


class Slice:
    """Amounts of each limit of `account`, in units, that the store has set aside for this replica.

    What is spent stays spent until the store has charged it; only then may it be spent once more.
    """

    def __init__(self, account: Account, field: bytes, lease: float, now: float) -> None:
        """`field` names it in the store; `lease` in seconds."""
        self.account = account
        self.field = field
        self.demand = Demand(lease / 2, now)
        self._lease = lease
        self._expires = float("-inf")
        none = [0] * len(account.limits)
        self._granted, self._due, self._spent = none, none, none

    @property
    def is_empty(self) -> bool:
        return not any(self._granted) and not any(self._spent)

    @property
    def exceeds_its_due(self) -> bool:
        return any(
            granted > max(due, spent) for granted, due, spent in zip(self._granted, self._due, self._spent, strict=True)
        )

    def fits(self, ask: Ask, now: float) -> bool:
        rows = zip(self._granted, self._spent, self._costs(ask), strict=True)
        return now < self._expires and all(cost == 0 or spent + cost <= granted for granted, spent, cost in rows)

    def spend(self, ask: Ask) -> None:
        self._add(self._costs(ask))

    def end(self, ask: Ask, used: Usage) -> None:
        """What `ask` was spent for has ended and used so much: the rest may be spent again."""
        self._add(self._kept(used))
        self.taken_over(ask)

    def charged(self, used: Usage) -> None:
        """The store has charged what was used by what has ended."""
        self._add([-amount for amount in self._kept(used)])

    def taken_over(self, ask: Ask) -> None:
        """What `ask` was spent for is held by the store."""
        self._add([-cost for cost in self._costs(ask)])

    def request(self, now: float) -> list[int]:
        """What the store is asked for (lua/slice.lua). Until it has answered, no more is spent than is to be kept."""
        rows = zip(self._granted, self._due, self._spent, strict=True)
        self._granted = [max(min(granted, due), spent) for granted, due, spent in rows]
        wanted = self._costs(self.demand.within(self._lease, now))
        return [*self._granted, *wanted, *self._costs(self.demand.largest)]

    def release(self) -> list[int]:
        """The same, to give back all that is not spent."""
        self._granted = list(self._spent)
        return [*self._granted, *([0] * (2 * len(self._granted)))]

    def grant(self, answer: Sequence[int], asked: float) -> None:
        """The answer to what the store was asked for at that time."""
        count = len(self._granted)
        self._granted, self._due = list(answer[:count]), list(answer[count:])
        self._expires = asked + self._lease * SAFETY

    def _costs(self, ask: Ask) -> list[int]:
        return [ask.of(limit.resource) for limit in self.account.limits]

    def _kept(self, used: Usage) -> list[int]:
        """What is held at once is given back when it ends."""
        costs = self._costs(Ask(used.requests, used.input_tokens, used.output_tokens))
        return [cost if limit.window else 0 for limit, cost in zip(self.account.limits, costs, strict=True)]

    def _add(self, amounts: Sequence[int]) -> None:
        self._spent = [spent + amount for spent, amount in zip(self._spent, amounts, strict=True)]
