"""The order in which prompts are computed that hold slots, and which of those that wait may go before them.

A prompt of many steps would keep all of its class waiting that come after it, and taking turns in equal shares would
keep everyone waiting for everyone. So of one class, who has a pressing deadline goes before those that are due later
(earliest deadline first: Liu and Layland, 1973): that is what estimates have promised. Besides, who has fewer tokens
left goes first (shortest remaining processing time: Schrage, 1968) where it costs the other no promise. It goes before
one that was admitted earlier, with a pressing deadline or without,

- while the other is still expected to have its first token in time, with all that goes before it, and
- while all that went before the other since it was admitted is at most `prefill_overtaking` of its own prefill.

Prefill is divided among tenants as well: one goes before another tenant's, whatever came before it, that needs as many
tokens and more with those of its tenant before it, once the other tenant was served more than its own by as much as it
needs, since both have prompts to compute (start-time fair queueing: Goyal et al., 1996). So one tenant's eight long
prompts, side by side, do not keep another's waiting until all are done.

Bound. A sequence that is admitted with n tokens to compute waits, of its class, besides those that were admitted
earlier for at most `prefill_overtaking` * n tokens of those that come later, for pressing ones that came before it was
due, and for those of tenants that were served less than its own. And whatever arrives, of any class, in one of
`PASSED_OVER` + 1 steps the one that was admitted first is the first of all: so each of them progresses.
"""

from collections.abc import Callable, Iterable
from operator import attrgetter

from backend.config import EngineConfig
from backend.scheduler.hooks import SchedulerHooks
from backend.scheduler.prefix_hit import PrefixHit
from backend.scheduler.scheduled_step import PrefillBudget, ScheduledStep
from backend.scheduler.sequence import Sequence

PASSED_OVER = 15
"""The steps that may pass without a token of the prompt that was admitted first, before it goes first: more urgent
classes keep 15 of 16 steps, and a prompt of 16 steps under a flood of theirs takes 2 s at 8 ms each, and not forever.
"""
_BY_CLASS = attrgetter("sequence.priority_class")


class _Prefill:
    """A sequence that holds a slot and has tokens of its prompt left to compute, and those that may go before it."""

    __slots__ = ("may_wait_for", "sequence")

    def __init__(self, sequence: Sequence, may_wait_for: int) -> None:
        self.sequence = sequence
        self.may_wait_for = may_wait_for  # tokens


class PrefillOrder:
    """Keeps those that prefill in the order in which steps serve them: by class, then as the module says.

    A place is found when a sequence is admitted, at O(prefills); later ones move it back by no more than they may.
    Static batches, in which all are admitted together, are served in the order of admission.
    """

    def __init__(self, config: EngineConfig, hooks: SchedulerHooks) -> None:
        self._config, self._hooks = config, hooks
        self._share = 0.0 if config.batching.is_static else config.prefill_overtaking
        self._line: list[_Prefill] = []
        self._room = 0  # tokens of prefill that the step has room for, once somebody asks
        self._served_before: dict[
            str, float
        ] = {}  # by tenant with prompts to compute: what does not count of its service
        self._asking: dict[str, None] = {}  # tenants whose head asked to go before others since the last step
        self._oldest: Sequence | None = None  # who was admitted first, of those that prefill
        self._oldest_computed = self._passed_over = 0  # its tokens, and the steps since it had one
        self._goes_first: Sequence | None = None  # in this step, before anybody who waits as well
        self._asked: Sequence | None = None  # who waits and was asked about last in this step
        self._yielding: set[Sequence] = set()  # those that would let it go first

    def begin(self, prefilling: list[Sequence]) -> list[Sequence]:
        """Return those that prefill as this step is planned, given in the order of admission, as it serves them.

        Those that were done, and are not because a step was lost, come first in their class.
        """
        self._room, self._asked = 0, None
        if self._share:
            places = {prefill.sequence: prefill for prefill in self._line}
            known = set(prefilling)
            line = [_Prefill(s, 0) for s in prefilling if s not in places]
            line += [prefill for prefill in self._line if prefill.sequence in known]
        else:
            line = [_Prefill(sequence, 0) for sequence in prefilling]
        line.sort(key=_BY_CLASS)
        self._line = line
        if self._share:
            self._divide()
        self._pass_over(prefilling)
        served = [prefill.sequence for prefill in self._line]
        if self._goes_first is not None:
            served.remove(self._goes_first)
            served.insert(0, self._goes_first)
        return served

    def goes_before(
        self,
        head: Sequence,
        left: Callable[[], int],
        running: Sequence,
        scheduled: ScheduledStep,
        budget: PrefillBudget,
    ) -> bool:
        """Return True if a sequence that waits, with `left` tokens to compute, may go before one of those that prefill,
        and so before all behind that one. Of each that waits that is found out once a step, O(prefills).
        """
        if running is self._goes_first:
            return False
        if head is not self._asked:
            self._asking[head.tenant] = None
            if not self._room:
                self._room = max(1, budget.fits(0, self._config.max_num_batched_tokens))
            self._asked, self._yielding = head, set(self.yielding(head, left(), scheduled, self._room))
        return running in self._yielding

    def yielding(self, sequence: Sequence, left: int, scheduled: ScheduledStep, room: int) -> list[Sequence]:
        """Return those that prefill which would let one go first that waits, with `left` tokens to compute, the last in
        the order first: steps from `scheduled` on have `room` for prefill.
        """
        found = []
        of_tenants = _left_by_tenant(self._line)
        ahead = left + sum(of_tenants.values())
        for prefill in reversed(self._line):
            running, tenant = prefill.sequence, prefill.sequence.tenant
            yields = self._yields(prefill, sequence, left, ahead, scheduled, room)
            if not (yields or self._was_served_more(running, of_tenants[tenant], sequence, left)):
                break
            found.append(running)
            ahead -= _left(running)
            of_tenants[tenant] -= _left(running)
        return found

    def admitted(self, sequence: Sequence, before: Sequence | None) -> None:
        """Give an admitted sequence its place, before one that `goes_before` allowed it to overtake, or behind all of
        its class.
        """
        left, level = sequence.num_uncomputed_tokens, sequence.priority_class
        line = [prefill for prefill in self._line if prefill.sequence is not sequence]  # it may have given way just now
        place = len(line)
        if before is None:
            while place and line[place - 1].sequence.priority_class > level:
                place -= 1
        else:
            while place and line[place - 1].sequence is not before:
                place -= 1
            place = max(0, place - 1)
            for prefill in line[place:]:
                if prefill.sequence.priority_class == level:
                    prefill.may_wait_for -= left
        line.insert(place, _Prefill(sequence, int(self._share * left)))
        self._line, self._asked = line, None

    def _yields(
        self, prefill: _Prefill, head: Sequence, left: int, ahead: int, scheduled: ScheduledStep, room: int
    ) -> bool:
        """Return True if it may wait for the head, and is in time where it is done after `ahead` tokens."""
        running = prefill.sequence
        if head.priority_class != running.priority_class:
            return head.priority_class < running.priority_class
        if self._hooks.outranks(head, running) or self._hooks.outranks(running, head):
            return self._hooks.outranks(head, running)
        if head.presses_before(running):
            return True
        if left > prefill.may_wait_for or left >= _left(running):
            return False
        due = running.first_token_by
        return due is None or ahead <= self._hooks.prefill_in_time(running, due, scheduled, room)

    def _divide(self) -> None:
        """Let those go first whose tenants were served less, where they may."""
        tenants = dict.fromkeys([prefill.sequence.tenant for prefill in self._line])
        tenants.update(self._asking)
        self._asking = {}
        if len(tenants) < 2:
            self._served_before = {}
            return
        served, before = self._hooks.served, self._served_before
        least = min([served(tenant) - before[tenant] for tenant in tenants if tenant in before], default=0.0)
        self._served_before = {t: before[t] if t in before else served(t) - least for t in tenants}
        line: list[_Prefill] = []
        of_tenants = dict[str, int]()
        for prefill in self._line:
            sequence, place, left = prefill.sequence, len(line), _left(prefill.sequence)
            before_place = of_tenants.copy()
            while place:
                last = line[place - 1].sequence
                if not self._was_served_more(last, before_place[last.tenant], sequence, left):
                    break
                before_place[last.tenant] -= _left(last)
                place -= 1
            line.insert(place, prefill)
            of_tenants[sequence.tenant] = of_tenants.get(sequence.tenant, 0) + left
        self._line = line

    def _was_served_more(self, last: Sequence, of_tenant: int, sequence: Sequence, left: int) -> bool:
        """Return True if the last of a line, in which its tenant has so many tokens, lets one of another tenant go
        first that has `left` tokens to compute, because its own tenant was served more.
        """
        tenant, before = last.tenant, self._served_before
        if tenant == sequence.tenant or last.priority_class != sequence.priority_class or last.is_pressing:
            return False
        if tenant not in before or sequence.tenant not in before or self._hooks.outranks(last, sequence):
            return False
        served = self._hooks.served
        lead = served(tenant) - before[tenant] - served(sequence.tenant) + before[sequence.tenant]
        if lead < self._hooks.prefill_cost(sequence, left):
            return False
        return left <= of_tenant

    def _pass_over(self, prefilling: list[Sequence]) -> None:
        """Count the steps that had nothing of the one that was admitted first."""
        oldest = prefilling[0] if prefilling else None
        computed = oldest.num_computed_tokens if oldest is not None else 0
        if oldest is not self._oldest or computed != self._oldest_computed:
            self._oldest, self._oldest_computed, self._passed_over = oldest, computed, 0
        else:
            self._passed_over += 1
        self._goes_first = oldest if self._passed_over >= PASSED_OVER else None

    def chunk(self, sequence: Sequence, hit: PrefixHit, budget: PrefillBudget) -> int:
        """Return how many tokens of a prefill this step can compute beside what was found; 0 when it does not fit.

        What another sequence computes in this very step is not computed twice, but found in the next; nor is what the
        host has, beyond a block that keeps the step from having no row.
        """
        if hit.is_being_computed:
            return 0
        found = hit.num_blocks * self._config.block_size
        start, uncomputed = sequence.num_computed_tokens + found, sequence.num_uncomputed_tokens - found
        if hit.is_cut:
            return budget.fits(start, self._config.block_size)
        if self._config.prefill_chunk is None:
            return uncomputed if budget.fits(start, uncomputed) == uncomputed else 0
        return budget.fits(start, min(uncomputed, self._config.prefill_chunk))


def _left_by_tenant(line: Iterable[_Prefill]) -> dict[str, int]:
    """Return the tokens that each tenant's prompts have left to compute."""
    left = dict[str, int]()
    for prefill in line:
        sequence = prefill.sequence
        left[sequence.tenant] = left.get(sequence.tenant, 0) + _left(sequence)
    return left


def _left(sequence: Sequence) -> int:
    return max(0, sequence.num_admitted_tokens - sequence.num_computed_tokens)
