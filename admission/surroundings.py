"""What is served before a newcomer and what behind it, by the order that is in force."""

from abc import ABC, abstractmethod
from itertools import islice
from operator import itemgetter

from admission.backlog import Backlog, QueuePosition, WorkAhead
from admission.due_order import Due
from admission.orderings.fair_queue import FairQueue
from admission.orderings.ordering import Line
from admission.output_length import OutputLengths
from admission.step_times.step_time import plain_sum
from backend.scheduler.sequence import Sequence

TENANTS_EXAMINED = 64  # other tenants, in one estimate
NOTHING = WorkAhead(0, 0, 0)
_FORGET = 0.02  # share of a running mean that each newcomer replaces
_KEY = itemgetter(0)

Later = list[Due]
"""Those behind a newcomer in their order, with their tokens of prefill left."""


class Typical:
    """Running means over newcomers, by which work in tokens is turned into work in other units."""

    def __init__(self, lengths: OutputLengths) -> None:
        self.prompt = 0.0  # tokens
        self.total = 0.0  # tokens of prompt and expected output
        self.price = 0.0  # prepaid, in the unit of account
        self.answer = 1.0  # expected tokens of the output; at least one
        self.tokens_a_price = 0.0  # prefill tokens for each unit of account that newcomers prepay
        self._lengths = lengths
        self._answers: dict[str, float] = {}  # by tenant, running means of the expected lengths

    def observe(self, tenant: str, prompt: int, output: float, price: float) -> None:
        """Learn from a newcomer, whose answer is expected to have `output` tokens."""
        weight = _FORGET if self.prompt else 1.0
        self.prompt += weight * (prompt - self.prompt)
        self.total += weight * (prompt + output - self.total)
        self.price += weight * (price - self.price)
        self.answer = max(1.0, self.total - self.prompt)
        self.tokens_a_price = self.prompt / self.price if self.price else 0.0
        answer = self._answers.get(tenant, output)
        self._answers[tenant] = answer + _FORGET * (output - answer)

    def answer_of(self, tenant: str) -> float:
        """Returns the tokens that an answer to the tenant is expected to have."""
        return self._answers.get(tenant, self.answer)

    def own_work(self, sequence: Sequence, tokens: int, requests: int) -> WorkAhead:
        """Returns work of the sequence's own tenant, the answers of which are taken to be as long as its own."""
        if not requests:
            return NOTHING
        return WorkAhead(tokens, requests, requests * self._lengths.mean(sequence.tenant, sequence.max_tokens))


class Surroundings(ABC):
    """Those around one newcomer, which does not wait yet. Changes nothing that anybody can see."""

    def __init__(self, sequence: Sequence, backlog: Backlog, typical: Typical) -> None:
        self._sequence, self._backlog, self._typical = sequence, backlog, typical

    @abstractmethod
    def ahead(self) -> tuple[WorkAhead, WorkAhead]:
        """Returns the waiting work that is served before the newcomer: of its own tenant, and of others."""

    @abstractmethod
    def tokens_beside(self, ahead: float) -> int:
        """Returns the waiting tokens that those running would let go first together with the newcomer, where so many
        are ahead of it.
        """

    def blocking(self, running: list[Sequence]) -> list[Sequence]:
        """Returns those of these running, which the newcomer could go before, that it cannot: one before it waits for
        them.
        """
        return []

    @abstractmethod
    def behind(self, running: Later) -> Later:
        """Returns those that have to wait for the newcomer, among them these running, which let it go first."""


class InFairOrder(Surroundings):
    """Those around a newcomer in the fair queue, which is not listed whole.

    Ahead is its tenant's own waiting work before it and, of every other tenant, no more than its credit lets pass
    meanwhile. `TENANTS_EXAMINED` of the others are looked at, those that have waited longest; any beyond them count as
    having the mean credit of these, and as coming before the newcomer whatever their age.
    """

    def __init__(self, sequence: Sequence, backlog: Backlog, typical: Typical, fair: FairQueue) -> None:
        super().__init__(sequence, backlog, typical)
        self._fair = fair
        self._position = QueuePosition.of(sequence, backlog.aging)

    def ahead(self) -> tuple[WorkAhead, WorkAhead]:
        backlog, fair, position = self._backlog, self._fair, self._position
        sequence, tenant = self._sequence, self._sequence.tenant
        tokens, requests = backlog.before(tenant, position)
        patient = self._of_others(tokens)
        pressing_tokens = pressing = 0
        for _, _, other, left in backlog.pressing.due_by(position.key):
            if other.tenant == tenant:
                tokens += left
                requests += 1
            elif position.is_pressing or not fair.outranks(sequence, other):
                pressing_tokens += left
                pressing += 1
        steps = patient.steps + pressing * self._typical.answer
        others = WorkAhead(patient.tokens + pressing_tokens, patient.requests + pressing, steps)
        return self._typical.own_work(sequence, tokens, requests), others

    def tokens_beside(self, ahead: float) -> int:
        return self._backlog.total.tokens

    def behind(self, running: Later) -> Later:
        """Under the fair queue those with pressing deadlines alone. O(all of them)."""
        position = self._position
        if not position.is_pressing:
            return []
        waiting = self._backlog.pressing.due_after(position.key)
        return sorted(running + waiting, key=_KEY) if running else waiting

    def _of_others(self, own_tokens: int) -> WorkAhead:
        """Returns the work of other tenants without pressing deadlines that goes first: of each that is examined, what
        its credit lets pass, and before what is pressing no more than is due earlier; nothing of those that the tenant
        outranks; of the rest by their mean.
        """
        fair, tenant, position = self._fair, self._sequence.tenant, self._position
        seen = dict(islice(self._backlog.tenants(), TENANTS_EXAMINED))
        seen.pop(tenant, None)
        if not seen:
            return NOTHING
        typical = self._typical
        tokens_of = typical.tokens_a_price
        rounds = fair.rounds_before(tenant, own_tokens / tokens_of if tokens_of else 0.0)
        reaches = self._tokens_for(fair.credits_after(seen, rounds))
        is_pressing = position.is_pressing and fair.credit(tenant) > -fair.deadline_debt_limit
        a_request = 1 / typical.prompt if typical.prompt else 0.0
        tokens = requests = steps = 0.0
        for (name, waiting), reach in zip(seen.items(), reaches, strict=True):
            if fair.shares.is_beyond(name) and fair.shares.is_within(tenant):
                continue
            is_overtaken = is_pressing and not (fair.shares.is_within(name) and fair.shares.is_beyond(tenant))
            most, most_requests = waiting.before(position) if is_overtaken else waiting.patient
            passing = float(most_requests)
            if reach < most:
                tokens += reach
                passing = min(passing, reach * a_request)
            else:
                tokens += most
            requests += passing
            steps += passing * typical.answer_of(name)
        if self._backlog.num_tenants > TENANTS_EXAMINED:
            rest = self._backlog.within(plain_sum(reaches) / len(seen), besides=(tenant, *seen))
            tokens, requests = tokens + rest, requests + rest * a_request
            steps += rest * a_request * typical.answer
        return WorkAhead(tokens, requests, steps)

    def _tokens_for(self, amounts: list[float]) -> list[float]:
        """Returns the tokens that such credits let pass. A tenant that may be served at all is served a whole
        prompt.
        """
        tokens_of, more = self._typical.tokens_a_price, self._typical.prompt / 2
        return [credit * tokens_of + more if credit > 0 else 0.0 for credit in amounts]


class InListedOrder(Surroundings):
    """Those around a newcomer in an order that lists who is served when."""

    def __init__(self, sequence: Sequence, backlog: Backlog, typical: Typical, line: Line, is_held: bool) -> None:
        """`line` has nobody of tenants that are held; `is_held`: the newcomer's own is."""
        super().__init__(sequence, backlog, typical)
        self._line, self._is_held = line, is_held

    def ahead(self) -> tuple[WorkAhead, WorkAhead]:
        sequence, tenant, tokens_of = self._sequence, self._sequence.tenant, self._backlog.tokens_of
        own = [tokens_of(one) for one in self._line.before if one.tenant == tenant]
        others = [tokens_of(one) for one in self._line.before if one.tenant != tenant]
        tokens, requests = sum(own), len(own)
        if self._is_held:
            load = self._backlog.of(tenant)
            tokens, requests = load.tokens, load.count
        steps = len(others) * self._typical.answer
        return self._typical.own_work(sequence, tokens, requests), WorkAhead(sum(others), len(others), steps)

    def tokens_beside(self, ahead: float) -> int:
        return int(ahead)

    def blocking(self, running: list[Sequence]) -> list[Sequence]:
        """Returns those that are due no later than the last of those before the newcomer."""
        if not self._line.before:
            return []
        due = self._backlog.aging.due
        last = max(map(due, self._line.before))
        return [one for one in running if due(one) <= last]

    def behind(self, running: Later) -> Later:
        """Of those running, who is due earlier lets go first."""
        left, later = sorted(running, key=_KEY, reverse=True), Later()
        for one in self._line.behind:
            key = self._backlog.aging.due(one)
            while left and left[-1][0] <= key:
                later.append(left.pop())
            later.append((key, 0, one, self._backlog.tokens_of(one)))
        return later + left[::-1]
