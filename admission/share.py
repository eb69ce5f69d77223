"""The tenants' accounts: each tenant's use of the engine against its share of all use.

Every engine second charged is taken from the credit of the tenant that used it, and granted by weight to the asking
tenants. A tenant asks while it has a request waiting or running, for `ASKING_S` longer, and in debt. A tenant saves at
most `BURST_S` for each unit of its weight, unless it has waiting work that its share decides about; the rest goes to
the other tenants, and it owes at most `DEBT_LIMIT_BURSTS` times as much. So credits follow the weighted max-min shares
of use, and they rest on no prediction: charges made ahead are settled.

It is deficit round robin (Shreedhar and Varghese, 1995) in its limit of small quanta: a deficit counter for each
tenant, granted by weight and charged as work is done, where a round lasts as long as a quantum takes to be charged.
"""

from collections import OrderedDict
from collections.abc import Mapping
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

ASKING_S = 10.0
"""The seconds after its last request for which a tenant counts as asking: longer than clients pause between two
requests.
"""

BURST_S = 16.0
"""Engine seconds that a tenant of weight 1 may save: a minute's share among four."""
DEBT_LIMIT_BURSTS = 2.0
"""The debt that a tenant may have, as a multiple of its savings limit. Use beyond that while no other tenant wants the
engine costs nothing later.
"""
GRANTS_PER_BURST = 800
"""Grants in a tenant's savings limit: of 0.02 s each, less than the shortest steps whose order could differ."""


def weight_of(tenant: str, weights: Mapping[str, float]) -> float:
    """Return the tenant's weight relative to that of "", the tenants without an entry, whose weight is 1 by default.

    Seconds for each unit of weight mean the same then for weights of 1 and 2 or of 100 and 200.
    """
    weight, usual = weights.get(tenant), weights.get("", 1.0)
    return 1.0 if weight is None else weight / usual


Offsets = list[tuple[float, str]]  # a heap of accounts, by offset and tenant


class Account:
    """One tenant's use. `credit` is in engine seconds for each unit of weight; below 0 it is debt.

    | state                              | its credit        | gains by grants | in which heap     |
    | ---------------------------------- | ----------------- | --------------- | ----------------- |
    | not listed: it does not take part  | `saved`           | no              | none              |
    | listed                             | level less offset | yes             | `_nearest_cap`    |
    | listed and waiting                 | level less offset | yes, any amount | `_waiting`        |
    | listed and capped                  | `burst_s`         | no              | none              |
    """

    def __init__(self, tenant: str, weight: float, share: "Share") -> None:
        """`share` keeps the account, and charges it."""
        self.tenant, self.weight, self.share = tenant, weight, share
        self.charged = self.served = 0.0  # engine seconds in total; `served`: each over the weight at its time
        self.num_open = 0  # requests that wait or run
        self.asked_at = -inf
        self.is_listed = False  # True: it takes part in grants
        self.is_waiting = False  # True: its share decides about its waiting work, and it may save any amount
        self.is_capped = False  # True: it has saved its limit
        self.is_repaid = False  # True: it is among `Share.repaid`
        self.offset = 0.0  # while it takes part and is not capped: its credit is the level less this
        self.saved = 0.0  # its credit, while it does not take part


class Share:
    """The accounts of all tenants. Charging and granting cost O(log tenants).

    Uncapped tenants that take part gain the same credit by each grant, so one number, the level, stands for all their
    gains.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, burst_s: float = BURST_S) -> None:
        """`burst_s`: seconds that a tenant of weight 1 may save; it may owe `DEBT_LIMIT_BURSTS` times as much."""
        self.burst_s, self.debt_limit_s, self.grant_s = burst_s, DEBT_LIMIT_BURSTS * burst_s, burst_s / GRANTS_PER_BURST
        self.accounts: dict[str, Account] = {}
        self._weights = dict(weights or {})
        self._level = 0.0
        self._pot = 0.0  # charged and not granted yet
        self.asking_weight = 0.0  # of all tenants that take part
        self._gaining = 0.0  # weight of the uncapped tenants that take part
        self._num_listed = self._num_capped = 0
        self._nearest_cap: Offsets = []  # accounts that may be capped, the nearest first; outdated entries leave lazily
        self._waiting: Offsets = []  # accounts with work waiting
        self._idle: OrderedDict[Account, None] = OrderedDict()  # accounts that take part without open requests: by time
        self._charged: set[str] = set()  # since the last `take_charged`
        self._now = 0.0
        self.repaid: list[Account] = []  # accounts with work waiting whose credit has grown otherwise than by grants

    def account(self, tenant: str) -> Account:
        """Return the tenant's account, created on first use."""
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = Account(tenant, weight_of(tenant, self._weights), self)
        return account

    def credit(self, account: Account) -> float:
        """Return the tenant's credit in engine seconds for each unit of its weight; below 0 it is debt."""
        if not account.is_listed:
            return account.saved
        return self.burst_s if account.is_capped else self._level - account.offset

    def behind_best(self, account: Account) -> float:
        """Return by how much the tenant's credit is below the largest of a tenant that takes part, in engine seconds
        for each unit of weight.
        """
        tops = self._top(self._nearest_cap, is_waiting=False), self._top(self._waiting, is_waiting=True)
        found = [self._level - top.offset for top in tops if top is not None]
        best = max([*found, self.burst_s] if self._num_capped else found, default=0.0)
        return max(0.0, best - self.credit(account))

    @property
    def scale(self) -> float:
        """The seconds in which a tenant's share of the engine pays a second of debt for each unit of weight."""
        return max(self.asking_weight, 1.0)

    def payback(self, account: Account) -> float:
        """Return the seconds in which the tenant's share of the engine pays its debt; below 0: it has credit."""
        return -self.credit(account) * self.scale

    def payback_of(self, tenant: str) -> float:
        """Return the payback of a tenant that may have no account yet."""
        account = self.accounts.get(tenant)
        return 0.0 if account is None else self.payback(account)

    def weight_for(self, tenant: str) -> float:
        """Return the weight of a tenant that may have no account yet."""
        return weight_of(tenant, self._weights)

    def set_time(self, now: float) -> None:
        """Stop counting tenants as asking that have had no open request for `ASKING_S`. A tenant in debt takes part
        until it has paid.
        """
        self._now = max(self._now, now)
        while self._idle:
            account = next(iter(self._idle))
            if self._now - account.asked_at < ASKING_S:
                return
            del self._idle[account]
            if self.credit(account) >= 0.0:
                self._unlist(account)
            else:
                account.asked_at = self._now  # to be looked at again
                self._idle[account] = None

    def asked(self, account: Account) -> None:
        """Note a request of the tenant, admitted or refused; the time is set."""
        account.asked_at = self._now
        if not account.is_listed:
            self._list(account)
        if not account.num_open:
            self._idle[account] = None
            self._idle.move_to_end(account)

    def opened(self, account: Account) -> None:
        """Note that one more of its requests waits or runs."""
        account.num_open += 1
        if account.num_open == 1:
            self._idle.pop(account, None)
            if not account.is_listed:
                self._list(account)

    def closed(self, account: Account) -> None:
        """Note that one of its requests has ended."""
        account.num_open -= 1
        if not account.num_open:
            account.asked_at = self._now
            self._idle[account] = None

    def waits(self, account: Account, *, is_waiting: bool) -> None:
        """Record that the tenant has waiting work that its share decides about, or no longer. While it has, the
        tenant's credit has no limit: it is unserved work, not savings.
        """
        if account.is_waiting == is_waiting:
            return
        account.is_waiting = is_waiting
        if not account.is_listed:
            if is_waiting:
                self._list(account)
            return
        if account.is_capped:
            self._uncap(account)
        elif not is_waiting and self._level - account.offset >= self.burst_s:
            self._cap(account)
            return
        self._push(account)

    def charge(self, account: Account, seconds: float) -> None:
        """Charge engine seconds of this replica; negative seconds are a refund."""
        self._charged.add(account.tenant)
        account.charged += seconds
        account.served += seconds / account.weight
        self.use(account, seconds)

    def use(self, account: Account, seconds: float) -> None:
        """Take engine seconds, of this replica or another, from the tenant's credit and grant them to all asking
        tenants.
        """
        self.spend(account, seconds)
        self._pot += seconds
        if self._pot > self.grant_s:
            self.grant()

    def take_charged(self) -> dict[str, float]:
        """Return the total charges of each tenant charged since the last call."""
        tenants, self._charged = self._charged, set()
        return {tenant: self.accounts[tenant].charged for tenant in tenants}

    def spend(self, account: Account, seconds: float) -> None:
        """Take engine seconds from the tenant's credit alone: prepayments, and their refunds."""
        change = seconds / account.weight
        if not account.is_listed:
            account.saved = max(-self.debt_limit_s, min(self.burst_s, account.saved - change))
            return
        if was_capped := account.is_capped:
            if change <= 0.0:
                return
            self._uncap(account)
        account.offset = min(account.offset + change, self._level + self.debt_limit_s)
        if not account.is_waiting:
            account.offset = max(account.offset, self._level - self.burst_s)
        elif change < 0.0 and not account.is_repaid:
            account.is_repaid = True
            self.repaid.append(account)
        if was_capped or change < 0.0:  # otherwise its entry has too much credit, which `_top` corrects
            self._push(account)

    def grant(self) -> None:
        """Grant the charged seconds, by weight, to all asking tenants; above `burst_s` only to tenants with waiting
        work.
        """
        if self._pot <= 0.0:
            return
        left, self._pot = self._pot, 0.0
        while left > 0.0 and self._num_listed > self._num_capped:
            nearest = self._top(self._nearest_cap, is_waiting=False)
            room = inf if nearest is None else self.burst_s - (self._level - nearest.offset)
            if nearest is None or left < room * self._gaining:
                self._level += left / self._gaining
                return
            self._level += room
            left -= room * self._gaining
            self._cap(nearest)

    def set_policy(self, weights: Mapping[str, float]) -> None:
        """Use these weights from now on. Past grants keep the old weights."""
        self.grant()
        self._weights = dict(weights)
        for account in self.accounts.values():
            seconds = self.credit(account) * account.weight
            account.weight = weight_of(account.tenant, self._weights)
            credit = max(seconds / account.weight, -self.debt_limit_s)
            if account.is_listed:
                account.is_capped = credit >= self.burst_s and not account.is_waiting
                account.offset = self._level - credit
            else:
                account.saved = min(credit, self.burst_s)
        self._num_capped = sum([a.is_capped for a in self.accounts.values()])
        self.asking_weight = sum([a.weight for a in self.accounts.values() if a.is_listed])
        self._rebuild()
        self._gaining = sum([a.weight for a in self.accounts.values() if a.is_listed and not a.is_capped])

    def _list(self, account: Account) -> None:
        account.is_listed = True
        account.is_capped = account.saved >= self.burst_s and not account.is_waiting
        self._num_listed += 1
        self.asking_weight += account.weight
        if account.is_capped:
            self._num_capped += 1
            return
        account.offset = self._level - account.saved
        self._push(account)
        self._gain(account.weight)

    def _unlist(self, account: Account) -> None:
        account.saved = min(self.credit(account), self.burst_s)
        self._num_listed -= 1
        self.asking_weight = self.asking_weight - account.weight if self._num_listed else 0.0
        if account.is_capped:
            self._num_capped -= 1
        else:
            self._gain(-account.weight)
        account.is_listed = account.is_capped = False

    def _cap(self, account: Account) -> None:
        account.is_capped = True
        self._num_capped += 1
        self._gain(-account.weight)

    def _uncap(self, account: Account) -> None:
        account.is_capped = False
        account.offset = self._level - self.burst_s
        self._num_capped -= 1
        self._gain(account.weight)

    def _gain(self, weight: float) -> None:
        """Add the weight of a tenant that is uncapped or begins to take part; negative for the reverse."""
        self._gaining = self._gaining + weight if self._num_listed > self._num_capped else 0.0

    def _push(self, account: Account) -> None:
        heap = self._waiting if account.is_waiting else self._nearest_cap
        heappush(heap, (account.offset, account.tenant))
        if len(heap) > 4 * len(self.accounts) + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        listed = [a for a in self.accounts.values() if a.is_listed and not a.is_capped]
        self._nearest_cap = [(a.offset, a.tenant) for a in listed if not a.is_waiting]
        self._waiting = [(a.offset, a.tenant) for a in listed if a.is_waiting]
        heapify(self._nearest_cap)
        heapify(self._waiting)

    def _top(self, heap: Offsets, *, is_waiting: bool) -> Account | None:
        """Return the tenant with the most credit in a heap."""
        while heap:
            offset, tenant = heap[0]
            account = self.accounts[tenant]
            if not account.is_listed or account.is_capped or account.is_waiting is not is_waiting:
                heappop(heap)
            elif account.offset > offset:
                heapreplace(heap, (account.offset, tenant))
            elif account.offset < offset:
                heappop(heap)
            else:
                return account
        return None
