"""The ledger charges each step to the sequences that it serves. It charges the accounts of the share.

A step's predicted cost is charged when it is planned and corrected when it completes, with the time from completion to
completion. The fixed part of a step is split pro rata to the marginal parts, so that the charges of all steps add up to
the time that the device was busy.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from admission.promise import Promise
from admission.share import Account, Share
from admission.step_times.step_time import CopyTime, StepTimeModel, StepWork, plain_sum, prefill_pairs
from backend.config import EngineConfig
from backend.scheduler.batch import Batch
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence


class EngineTimeTariff:
    """The tariff in seconds of the device."""

    def __init__(self, model: StepTimeModel) -> None:
        self.model = model
        self._total = self._parts = 0.0  # running means of a step's time, and of the sum of its marginal parts
        self._beyond = 0.0  # the running mean of the share of a step's tokens beyond the knee

    def costs(self, scheduled: ScheduledStep, seconds: float) -> list[float]:
        batch, decodes, each = scheduled.batch, scheduled.batch.num_decodes, 0.0
        model = self.model.fitted
        _, _, decode, context, read, pairs, beyond = model.coefficients
        if beyond and self.model.is_calibrated:
            tokens = sum(batch.lengths)
            share = (tokens - model.knee) / tokens if tokens > model.knee else 0.0
            self._beyond += (0.02 if self._parts else 1.0) * (share - self._beyond)
            each = beyond * share
            marginal = self._with_hinge(batch, each)
        else:
            marginal = [decode + context * (start + 1) for start in batch.starts[:decodes]]
            if decodes < len(batch.starts):
                chunks = zip(batch.starts[decodes:], batch.lengths[decodes:], strict=True)
                marginal += [model.of_prefill(start, length) for start, length in chunks]
        if scheduled.drafts:  # as `work_of` counts them
            for row in range(decodes, len(batch.starts)):
                if scheduled.sequences[row] in scheduled.drafts:
                    start, length = batch.starts[row], batch.lengths[row]
                    marginal[row] = (decode + each) * length + read * start + pairs * prefill_pairs(start, length)
        parts = plain_sum(marginal)
        if parts <= 0:
            return [seconds / len(marginal)] * len(marginal)
        weight = 0.02 if self._parts else 1.0
        self._total += weight * (seconds - self._total)
        self._parts += weight * (parts - self._parts)
        return [part * seconds / parts for part in marginal]

    def _with_hinge(self, batch: Batch, each: float) -> list[float]:
        """Return the marginal parts of the rows where each token beyond the knee costs `each`: all rows grow alike from
        nothing to their sizes, so that each has its share of the tokens beyond the knee (Aumann and Shapley, 1974).
        """
        _, prefill, decode, context, prefill_context, pairs, _ = self.model.fitted.coefficients
        decodes, decode, prefill = batch.num_decodes, decode + each, prefill + each
        marginal = [decode + context * (start + 1) for start in batch.starts[:decodes]]
        for start, length in zip(batch.starts[decodes:], batch.lengths[decodes:], strict=True):
            marginal.append(prefill * length + prefill_context * start + pairs * prefill_pairs(start, length))
        return marginal

    def estimate(self, prompt: int, output: float, cached: int = 0) -> float:
        """Return the cost of a request with its share of the fixed part of steps; no more than in steps of its own."""
        model = self.model.fitted
        fixed, prefill, decode, context, prefill_context, pairs, beyond = model.coefficients
        own = output * (decode + context * (prompt + output / 2))
        computed = max(0, prompt - cached)  # 0: it is forked from another answer's prompt
        if beyond and self.model.is_calibrated:
            own += (output + computed) * beyond * self._beyond + prefill * computed
            own += (prefill_context * cached if computed else 0.0) + pairs * prefill_pairs(cached, computed)
        elif computed > 0:
            own += model.of_prefill(cached, computed)
        shared = own * self._total / self._parts if self._parts else own
        return min(shared, own + (1 + output) * fixed * model.read_share(1))


class Tariffs:
    """The tariff of each model."""

    def __init__(self, each: Iterable[EngineTimeTariff]) -> None:
        self.each = list(each)

    def estimate(self, sequence: Sequence, output: float, cached: int) -> float:
        """Return the cost of a request of `output` tokens, with `cached` tokens of its prompt."""
        return self.each[sequence.request.model].estimate(sequence.num_prompt_tokens, output, cached)


def work_of(scheduled: ScheduledStep) -> StepWork:
    """Returns the work of a planned step."""
    batch, decodes = scheduled.batch, scheduled.batch.num_decodes
    work, drafts = StepWork(0, decodes, scheduled.decode_context), scheduled.drafts
    for row in range(decodes, len(batch.starts)):
        start, length = batch.starts[row], batch.lengths[row]
        if drafts and scheduled.sequences[row] in drafts:  # it attends as a prompt does
            work += StepWork(0, length, 0, start, prefill_pairs(start, length))
        else:
            work = work.with_prefill(start, length)
    for _, start, length in batch.padding:
        work = work.with_prefill(start, length)
    return work


class AdapterTime:
    """The seconds that adapters add to a step: each row's own, by the blocks of its adapter, as measured at start."""

    def __init__(self, config: EngineConfig) -> None:
        self._config, self._takes_time = config, any(config.adapter_block_seconds)

    def of_prompt(self, sequence: Sequence, tokens: int) -> float:
        """Return the seconds that its adapter, once it is on the device, adds to computing `tokens` of its prompt."""
        if (adapter := sequence.request.adapter) is None:
            return 0.0
        _, prompt, _ = self._config.adapter_seconds_of(sequence.request.model)
        return prompt * adapter.num_blocks * tokens

    def of_decodes(self, sequences: Iterable[Sequence]) -> float:
        """Return the seconds that adapters add to a step in which these sequences, of one model, decode."""
        adapted = [one.request for one in sequences if one.request.adapter is not None]
        if not adapted:
            return 0.0
        decode, _, _ = self._config.adapter_seconds_of(adapted[0].model)
        return decode * sum([one.adapter.num_blocks for one in adapted if one.adapter is not None])

    def of_rows(self, scheduled: ScheduledStep) -> list[float]:
        """Return the seconds of each row; none where adapters take none. What a step brings is its first row's that has
        the adapter.
        """
        if not self._takes_time:
            return []
        rows, batch = scheduled.sequences, scheduled.batch
        decode, prompt, bring = self._config.adapter_seconds_of(batch.model)
        brought = Counter([number for number, _, _ in batch.adapter_blocks])
        seconds, decodes = [0.0] * len(rows), batch.num_decodes
        for index, row in enumerate(rows):
            if (adapter := row.request.adapter) is not None:
                each = decode if index < decodes else prompt * batch.lengths[index]
                seconds[index] = each * adapter.num_blocks + bring * brought.pop(adapter.number, 0)
        return seconds


_Charge = tuple[list[Promise], StepTimeModel, StepWork, float, list[float], Mapping[Account, float]]
"""The charge of a step in flight: the promises to its rows, its model's step times, its work, the seconds of its copies
and its adapters, and the costs of its rows and of accounts.
"""


class Ledger:
    """Charges steps to the accounts of their tenants, in the order in which steps are planned and completed. A tenant
    has an account of its own for the spare class, in another share: neither use counts against the other.
    """

    def __init__(
        self,
        share: Share,
        spare: Share,
        tariffs: Tariffs,
        copy_time: CopyTime,
        adapter_time: AdapterTime,
    ) -> None:
        self.share, self.spare = share, spare
        self._tariffs = tariffs
        self._copy_time, self._adapter_time = copy_time, adapter_time
        self._open: deque[_Charge] = deque()
        self._corrections: dict[Account, float] = {}  # of completed steps: charged with the next step
        self.promises: dict[Sequence, Promise] = {}  # to sequences admitted to the queue and not ended

    def admitted(self, sequence: Sequence, promise: Promise) -> None:
        self.promises[sequence] = promise
        share = self.spare if sequence.is_spare else self.share
        promise.account = account = share.account(sequence.tenant)
        share.opened(account)

    def begun(self, sequence: Sequence, *, follows: bool) -> None:
        """Take the cost of its prompt from the credit of a newcomer's tenant, once: a preempted sequence has prepaid
        already. Nothing is used yet: a row's cost is charged as used when its step is planned, and comes out of the
        prepaid seconds. A sequence that `follows` another answer prepays no prompt, which would come back to its tenant
        as credit; its computed tokens are charged as usual.
        """
        if not sequence.is_newcomer:
            return
        promise, prompt = self.promises[sequence], len(sequence.request.prompt)
        cached = prompt - 1 if follows else sequence.num_computed_tokens
        promise.prepaid = cost = self._tariffs.estimate(sequence, 0.0, cached)
        account = promise.account
        account.share.spend(account, cost)

    def charge_side_work(self, tenant: str, seconds: float, now: float, is_spare: bool) -> None:
        """Charge a tenant for seconds of work beside the steps, for which it counts as asking."""
        share = self.spare if is_spare else self.share
        account = share.account(tenant)
        share.set_time(now)
        share.asked(account)
        share.charge(account, seconds)

    def planned(self, scheduled: ScheduledStep) -> float:
        """Charge a planned step; returns its predicted seconds."""
        work, tariff = work_of(scheduled), self._tariffs.each[scheduled.batch.model]
        copying = self._copy_time.planned(len(scheduled.batch.swap_out) + len(scheduled.batch.swap_in))
        seconds = tariff.model.fitted.seconds(work) + copying
        costs = tariff.costs(scheduled, seconds)
        if adapting := self._adapter_time.of_rows(scheduled):
            added = plain_sum(adapting)
            costs = [cost + own for cost, own in zip(costs, adapting, strict=True)]
            seconds, copying = seconds + added, copying + added
        promises = [self.promises[sequence] for sequence in scheduled.sequences]
        self._open.append((promises, tariff.model, work, copying, costs, self._charge_rows(promises, costs)))
        return seconds

    def _charge_rows(self, promises: list[Promise], costs: list[float]) -> Mapping[Account, float]:
        """Charge each sequence with its cost, from its prepaid seconds first; returns the sums by account."""
        sums, returned = dict[Account, float](), dict[Account, float]()
        sum_of = sums.get
        for promise, cost in zip(promises, costs):  # noqa: B905 - being strict takes as long as ten rows
            account = promise.account
            sums[account] = sum_of(account, 0.0) + cost
            if promise.prepaid > 0.0:
                used = min(promise.prepaid, cost)
                promise.prepaid -= used
                returned[account] = returned.get(account, 0.0) + used
        for account, paid in returned.items():
            account.share.spend(account, -paid)
        corrections = self._corrections
        for account, cost in sums.items():
            account.share.charge(account, cost + corrections.pop(account, 0.0))
        self._correct()
        return sums

    def _correct(self) -> None:
        """Charge the corrections that no step has been charged with."""
        for account, seconds in self._corrections.items():
            account.share.charge(account, seconds)
        self._corrections.clear()

    def completed(self, elapsed: float) -> None:
        """Correct the charges of the oldest planned step, which took `elapsed` seconds: at once if no other is in
        flight, else with the charges of the next.
        """
        promises, model, work, copying, costs, by_account = self._open.popleft()
        total = plain_sum(by_account.values())
        correction = (elapsed - total) / total if total else 0.0
        if correction:
            corrections = self._corrections
            for account, cost in by_account.items():
                corrections[account] = corrections.get(account, 0.0) + correction * cost
            if not self._open:
                self._correct()
        factor = 1 + correction
        for promise, cost in zip(promises, costs):  # noqa: B905 - as in `_charge_rows`
            promise.charged += cost * factor
        model.observe(work, elapsed - copying)

    def lost(self) -> None:
        """Return the charges of all steps in flight, none of which took place. Prepaid seconds that they used stay in
        the credit of the tenant: the rows that are computed again are charged without it.
        """
        while self._open:
            *_, by_account = self._open.pop()
            for account, cost in by_account.items():
                account.share.charge(account, -cost)
        self._correct()
        self._copy_time.lost()

    def ended(self, sequence: Sequence) -> None:
        """Return the unused prepaid seconds of an ended sequence to its tenant. Idempotent."""
        if (promise := self.promises.pop(sequence, None)) is not None:
            account = promise.account
            account.share.closed(account)
            if promise.prepaid:
                account.share.spend(account, -promise.prepaid)
