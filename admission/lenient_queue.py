"""The fair queue with patience: first come, first served across tenants, while nobody is far ahead of its share.

Between tenants that are about even, whose turn it is depends on chance, and a newcomer that overtakes older work breaks
what was promised for it. So a sequence with a pressing deadline that has waited longer than the one whose turn it is
goes first while its tenant's credit is above -leeway. Credit is then above -leeway at every admission, so the fair
queue's bound holds with `leeway` in the place of `borrow` where it is larger.
"""

from collections.abc import Mapping
from heapq import heappop, heappush
from math import floor, inf

from admission.aging import Aging
from admission.fair_queue import FairQueue
from backend.scheduler.sequence import Sequence

_Place = tuple[float, int]  # of a waiting sequence among its tenant's


class LenientFairQueue(FairQueue):
    """A `FairQueue` in which tenants may be `leeway` in debt, in the unit of account, and still have what has a
    pressing deadline served in order of age. O(log tenants) for each that comes or goes.
    """

    def __init__(
        self,
        quantum: float,
        aging: Aging,
        weights: Mapping[str, float] | None = None,
        borrow: float = 0.0,
        leeway: float = 0.0,
    ) -> None:
        if not leeway >= 0:
            raise ValueError(f"leeway must be at least 0, got {leeway}")
        super().__init__(quantum, aging, weights, borrow)
        self.leeway = leeway
        self._heads: list[tuple[_Place, str]] = []  # heap; an entry that is no tenant's head leaves when it surfaces
        self._aside: list[tuple[int, str]] = []  # heap of tenants too far in debt, by when they no longer are
        self._away: dict[str, int] = {}  # the valid entry of each of those

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self._note_head(sequence.tenant)

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self._note_head(sequence.tenant)

    def settle(self, sequence: Sequence) -> None:
        super().settle(sequence)
        if self._away.pop(sequence.tenant, None) is not None:
            self._note_head(sequence.tenant)

    def hold(self, tenant: str, reason: str | None) -> None:
        super().hold(tenant, reason)
        if reason is None:
            self._note_head(tenant)

    def policy_changed(self, weights: Mapping[str, float], aging: Aging) -> None:
        super().policy_changed(weights, aging)
        self._aside, self._away = [], {}
        for tenant in self.accounts:
            self._note_head(tenant)

    def head(self) -> Sequence | None:
        """The next to be admitted; the same until something changes."""
        choice = super().head()
        if choice is None or not self.leeway or self.credit(choice.tenant) <= -self.leeway:
            return choice  # nobody, or urgent work that borrows more
        self._recall()
        oldest = self._oldest()
        turn = self._head_place(choice.tenant)
        return choice if oldest is None or (turn is not None and turn < oldest[0]) else oldest[1]

    def rounds_before(self, tenant: str, cost: float) -> int:
        """Rounds until the tenant has paid `cost` for others of its own and has credit again."""
        account = self.accounts.get(tenant)
        if account is None:
            share, credit = self._quantum * self._weight(tenant), 0.0
        else:
            share, credit = self._quantum * account.weight, self.credit(tenant)
        if account is None or not account.num_waiting:
            credit = min(credit, 0.0) + share
        return max(0, floor((cost - credit) / share) + 1)

    def credit_after(self, tenant: str, rounds: int) -> float:
        """What a tenant whose work waits will have so many rounds on, in the unit of account; -inf while it is held."""
        account = self.accounts[tenant]
        if account.held is not None:
            return -inf
        return account.credit + (self.round - account.round + rounds) * self._quantum * account.weight

    def _head_place(self, tenant: str) -> _Place | None:
        """Of its first sequence; None when it has none that may be admitted."""
        account = self.accounts[tenant]
        if not account.num_waiting or account.held is not None:
            return None
        self._first_of(account)
        return account.waiting[0][:2]

    def _note_head(self, tenant: str) -> None:
        place = self._head_place(tenant)
        pressing = place is not None and self._first_of(self.accounts[tenant]).is_pressing
        if place is not None and pressing and tenant not in self._away:
            heappush(self._heads, (place, tenant))

    def _recall(self) -> None:
        """Whoever was too far in debt and no longer is."""
        while self._aside and self._aside[0][0] <= self.round:
            due, tenant = heappop(self._aside)
            if self._away.get(tenant) == due:
                del self._away[tenant]
                self._note_head(tenant)

    def _oldest(self) -> tuple[_Place, Sequence] | None:
        """Of those with a deadline, whose tenants are within the leeway."""
        while self._heads:
            place, tenant = self._heads[0]
            if tenant in self._away or self._head_place(tenant) != place:
                heappop(self._heads)
            elif self.credit(tenant) > -self.leeway:
                return place, self._first_of(self.accounts[tenant])
            else:
                heappop(self._heads)
                self._set_aside(tenant)
        return None

    def _set_aside(self, tenant: str) -> None:
        lacking = -self.credit(tenant) - self.leeway
        due = self.round + floor(lacking / (self._quantum * self.accounts[tenant].weight)) + 1
        self._away[tenant] = due
        heappush(self._aside, (due, tenant))
