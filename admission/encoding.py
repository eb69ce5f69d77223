"""The queue of inputs to embed or to score, which are computed in batches between the steps of the answers.

Tenants are served in the order of their debts: a batch's seconds are charged when they are measured, and their
prediction counts while the batch is made. Beside answers a tenant in debt keeps `DEBTOR_PART_OF_SHARE`, so that its own
answers, which steps compute whatever it owes, do not hold its inputs up for ever. Among one tenant's requests the one
with the least service goes next, so that a short request passes a long list. An input is computed as a whole, and in
one batch.

A batch is taken as soon as the device is free. Waiting for more inputs pays if the next one is expected so soon that
all waiting inputs together lose less time by it than the fixed cost of one more batch (`EncodingQueue.taken_at`): never
at low load.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from admission.share import Share

EVIDENCE_SHARE_KEPT = 0.98  # the share of the evidence that is kept when another batch is measured
GAP_SHARE_KEPT = 0.7  # the share of the mean gap between requests that is kept when another comes
DEBTOR_PART_OF_SHARE = 0.25  # of a tenant's share of the time, for its inputs beside answers, whatever it owes
PRIOR_BATCH_S, PRIOR_TOKEN_S = 2e-3, 1e-5  # before batches are measured


class EncodingLimits(NamedTuple):
    """`longest_wait_s`: before a batch is taken, for further inputs; `batch_tokens`: the most of a batch, one long
    input excepted; `waiting_tokens`: the most that may wait; `beside_s`: a batch's seconds while answers are generated,
    and `alone_s` while none are, since one may come.
    """

    longest_wait_s: float = 2e-3
    batch_tokens: int = 8192
    waiting_tokens: int = 2**20
    beside_s: float = 0.02
    alone_s: float = 0.05


class BatchTime:
    """Predicts the seconds of a batch from its tokens: a line fitted to the measured batches by weighted least
    squares.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0
        self.batch_s, self.token_s = PRIOR_BATCH_S, PRIOR_TOKEN_S

    def seconds(self, tokens: float) -> float:
        return self.batch_s + self.token_s * tokens

    def tokens(self, seconds: float) -> int:
        """Return the tokens of a batch of these seconds, or of twice the fixed cost if that is longer; at least 1."""
        return max(1, int(max(seconds - self.batch_s, self.batch_s) / self.token_s))

    def measured(self, tokens: int, seconds: float) -> None:
        keep = EVIDENCE_SHARE_KEPT
        self._weight = keep * self._weight + 1.0
        self._tokens = keep * self._tokens + tokens
        self._squares = keep * self._squares + tokens * tokens
        self._seconds = keep * self._seconds + seconds
        self._products = keep * self._products + tokens * seconds
        spread = self._weight * self._squares - self._tokens**2
        slope = (self._weight * self._products - self._tokens * self._seconds) / spread if spread > 0.0 else 0.0
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        self.token_s = min(max(slope, 1e-9), mean_seconds / mean_tokens)
        self.batch_s = mean_seconds - self.token_s * mean_tokens


class EncodingRequest:
    """One request: the lengths of its inputs in tokens, and its progress."""

    def __init__(self, tenant: str, lengths: Sequence[int], arrival: float, is_spare: bool = False) -> None:
        """`is_spare`: it is a line of a batch, behind all other requests."""
        self.tenant, self.lengths, self.arrival, self.is_spare = tenant, lengths, arrival, is_spare
        self.num_taken = self.tokens_taken = 0
        self.is_cancelled = False


class BatchInput(NamedTuple):
    """One input of a batch: `request.lengths[ordinal]` tokens."""

    request: EncodingRequest
    ordinal: int


class EncodingQueue:
    """The inputs that wait. Times are seconds of the engine's clock."""

    def __init__(self, share: Share, limits: EncodingLimits, time: BatchTime) -> None:
        """`share` has the accounts that its requests are charged to."""
        self.limits = limits
        self.time = time
        self.num_tokens = 0  # waiting
        self.share = share
        self._waiting: dict[str, list[tuple[int, float, int, EncodingRequest]]] = {}  # heaps, by tenant
        self._tokens_of: dict[str, int] = {}  # waiting, by tenant
        self._arrivals = deque[EncodingRequest]()  # the oldest first; taken requests leave it lazily
        self._gap_s = inf  # the mean between two requests
        self._last_arrival = -inf
        self._num_requests = 0
        self._next_at: dict[str, float] = {}  # by tenant: in debt it has its next batch beside answers then

    def fits(self, request: EncodingRequest) -> bool:
        """Return True if a request may wait. Beyond the limit on all tokens, a tenant may have an equal part of that
        limit waiting.
        """
        tokens, most = sum(request.lengths), self.limits.waiting_tokens
        own = self._tokens_of.get(request.tenant, 0)
        if not own or self.num_tokens + tokens <= most:
            return tokens <= most or not self.num_tokens
        return own + tokens <= most // len(self._tokens_of)

    def wait_s(self, request: EncodingRequest) -> float:
        """Return the seconds until a newcomer is computed, if only inputs are: behind its tenant's waiting inputs,
        while every other tenant is served by weight, at most its own waiting inputs.
        """
        weight = self.share.weight_for(request.tenant)
        own = self._tokens_of.get(request.tenant, 0) + sum(request.lengths)
        others = [
            min(tokens, own * self.share.weight_for(tenant) / weight)
            for tenant, tokens in self._tokens_of.items()
            if tenant != request.tenant
        ]
        tokens = own + sum(others)
        return self.time.seconds(tokens) + self.time.batch_s * (tokens // self.limits.batch_tokens)

    def add(self, request: EncodingRequest) -> None:
        now = request.arrival
        if self._last_arrival > -inf:
            gap, kept = now - self._last_arrival, GAP_SHARE_KEPT
            self._gap_s = gap if self._gap_s == inf else kept * self._gap_s + (1 - kept) * gap
        self._last_arrival = now
        self._count(request.tenant, sum(request.lengths))
        self._arrivals.append(request)
        self._push(request)

    def cancel(self, request: EncodingRequest) -> None:
        """Drop the inputs of a request that are not in a batch yet."""
        if not request.is_cancelled:
            request.is_cancelled = True
            self._count(request.tenant, -sum(request.lengths[request.num_taken :]))

    def least_payback(self, most: float, now: float) -> float:
        """Return the least payback (`Share.payback`) of a tenant that `may_go`; inf: none may."""
        return min([self.share.payback_of(one) for one in self._waiting if self.may_go(one, most, now)], default=inf)

    def may_go(self, tenant: str, most: float, now: float) -> bool:
        """Return True if the tenant's inputs may be taken beside answers of tenants of whom the least payback is
        `most`: it owes no more, or has had less than its part of the time since its last batch.
        """
        return self.share.payback_of(tenant) <= most or self._next_at.get(tenant, now) <= now

    def taken_at(self, now: float) -> float:
        """Return the time at which a batch is taken if no request comes before: now, or later; inf: no input waits."""
        while self._arrivals and self._is_gone(self._arrivals[0]):
            self._arrivals.popleft()
        if not self._arrivals:
            return inf
        next_s = max(0.0, self._last_arrival + self._gap_s - now)
        lost_s = len(self._arrivals) * next_s
        latest = self._arrivals[0].arrival + self.limits.longest_wait_s
        if self.num_tokens >= self.limits.batch_tokens or lost_s >= self.time.batch_s or now + next_s > latest:
            return now  # no request is expected in time, or not soon enough
        return now + next_s

    def take_batch(self, now: float, most_payback: float = inf) -> list[BatchInput]:
        """Take a batch of the tenants that `may_go`. `most_payback`: below inf, answers are generated meanwhile, which
        it must not delay for long.
        """
        limits = self.limits
        most = min(limits.batch_tokens, self.time.tokens(limits.alone_s if most_payback == inf else limits.beside_s))
        ranked: list[tuple[float, float, str]] = []
        for tenant in [one for one in self._waiting if self.may_go(one, most_payback, now)]:
            self._rank(tenant, 0.0, ranked)
        batch, tokens = list[BatchInput](), 0
        while ranked:
            owed, _, tenant = heappop(ranked)
            request = self._waiting[tenant][0][3]
            length = request.lengths[request.num_taken]
            if batch and tokens + length > most:
                break
            batch.append(BatchInput(request, request.num_taken))
            tokens += length
            self._advance(request, length)
            self._count(tenant, -length)
            cost = length * self.time.token_s * self.share.scale / self.share.weight_for(tenant)
            self._rank(tenant, owed + cost, ranked)
        return batch

    def measured(self, batch: Sequence[BatchInput], seconds: float, now: float) -> dict[str, float]:
        """Record the seconds of a batch that has ended. Return the seconds of each tenant, by its tokens."""
        lengths = [(taken.request.tenant, taken.request.lengths[taken.ordinal]) for taken in batch]
        tokens, by_tenant = sum([length for _, length in lengths]), dict[str, float]()
        self.time.measured(tokens, seconds)
        for tenant, length in lengths:
            by_tenant[tenant] = by_tenant.get(tenant, 0.0) + seconds * length / tokens
        self._next_at = {tenant: at for tenant, at in self._next_at.items() if at > now}
        for tenant, own in by_tenant.items():
            part = DEBTOR_PART_OF_SHARE * self.share.weight_for(tenant) / self.share.scale
            self._next_at[tenant] = now + own / part
        return by_tenant

    def _count(self, tenant: str, tokens: int) -> None:
        self.num_tokens += tokens
        self._tokens_of[tenant] = self._tokens_of.get(tenant, 0) + tokens
        if not self._tokens_of[tenant]:
            del self._tokens_of[tenant]

    def _advance(self, request: EncodingRequest, length: int) -> None:
        heappop(self._waiting[request.tenant])
        request.num_taken += 1
        request.tokens_taken += length
        if request.num_taken < len(request.lengths):
            self._push(request)

    def _push(self, request: EncodingRequest) -> None:
        self._num_requests += 1
        entry = request.tokens_taken, request.arrival, self._num_requests, request
        heappush(self._waiting.setdefault(request.tenant, []), entry)

    def _rank(self, tenant: str, owed: float, ranked: list[tuple[float, float, str]]) -> None:
        """Rank a tenant, if any of its inputs wait. `owed` is its part of this batch so far."""
        heap = self._waiting[tenant]
        while heap and self._is_gone(heap[0][3]):
            heappop(heap)
        if not heap:
            del self._waiting[tenant]
            return
        due = owed or self.share.payback_of(tenant)
        heappush(ranked, (due, heap[0][1], tenant))

    @staticmethod
    def _is_gone(request: EncodingRequest) -> bool:
        return request.is_cancelled or request.num_taken == len(request.lengths)
