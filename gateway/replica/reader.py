"""Reads a replica's state for routers and autoscalers off the core. Reading changes no decision."""

import secrets
from collections import Counter
from collections.abc import Callable
from heapq import nlargest

from admission.controller import Controller
from admission.step_times.step_time import StepWork, prefill_pairs
from backend.scheduler.kv_accounts import KVAccounts
from backend.scheduler.sequence import Sequence
from gateway.replica.beginnings import CachedBeginnings
from gateway.replica.state import PAIRS_COEFFICIENT, KVTokens, LoadTotals, ReplicaState, StepCost, WaitingWork
from gateway.telemetry.request_record import RequestRecord
from gateway.version import VERSION

MAX_TENANTS = 1000  # in a state: the largest backlogs
BYTES_PER_TOKEN = 4.0  # before the first request
NEWEST_SHARE = 0.05  # weight of the newest request in the mean


class ReplicaReader:
    """Reads one core; `clock` is the engine's. `target` is the backlog of one replica in seconds of work, and `policy`
    returns the version of the policy in force.
    """

    def __init__(
        self,
        model: str,
        core: Controller,
        target: float,
        clock: Callable[[], float],
        policy: Callable[[], str] = lambda: "",
    ) -> None:
        self._model, self._core, self._target, self._clock = model, core, target, clock
        self._policy = policy
        self._instance = secrets.token_hex(8)
        self._bytes_per_token = BYTES_PER_TOKEN
        manager = core.scheduler.kv_manager
        self._kv = KVAccounts(manager)
        self.beginnings = CachedBeginnings(manager.cache, core.scheduler.config.block_size)

    def ended(self, record: RequestRecord) -> None:
        """Learn the bytes of a body for each prompt token, and the prompt's cached beginnings."""
        tokens = record.num_prompt_tokens
        if record.engine.beginnings.digests and record.engine.timelines:
            self.beginnings.computed(record.engine.beginnings, record.engine.timelines[0].sequence)
        if tokens and record.body_bytes:
            self._bytes_per_token += NEWEST_SHARE * (record.body_bytes / tokens - self._bytes_per_token)

    def state(self, draining: bool, since: int = 0) -> ReplicaState:
        """The present state, with the changes of cached beginnings since an event. O(running + tenants with a backlog +
        events).
        """
        core, scheduler = self._core, self._core.scheduler
        running, config = scheduler.running, scheduler.config
        token_seconds = self._token_seconds()
        left = [
            (one.num_computed_tokens, one.num_admitted_tokens - one.num_computed_tokens)
            for one in running.values()
            if one.num_computed_tokens < one.num_admitted_tokens
        ]
        tokens, pairs = sum(length for _, length in left), sum(prefill_pairs(*one) for one in left)
        fitted = core.step_time.fitted
        held, idle = self._kv.num_held, self._kv.cache.num_idle
        return ReplicaState(
            instance=self._instance,
            model=self._model,
            draining=draining,
            running=len(running),
            seats=config.max_num_seqs,
            seat_seconds=self._seat_seconds() if len(running) >= config.max_num_seqs else 0.0,
            step_seconds=self._step_seconds(),
            prefill_seconds=self._prefill_seconds(token_seconds, tokens, pairs),
            token_seconds=token_seconds,
            bytes_per_token=self._bytes_per_token,
            work_seconds=(work := self.work_seconds()),
            replicas_wanted=work / self._target,
            step=StepCost(fitted.coefficients, fitted.knee, core.step_time.relative_error),
            kv=KVTokens(
                config.short_tokens(config.num_blocks),
                config.short_tokens(config.num_blocks - held - idle),
                config.short_tokens(idle),
                self._kv.num_queried_tokens,
                scheduler.counters.cached_tokens,
            ),
            waiting=self._waiting(token_seconds),
            running_by_tenant=Counter(one.tenant for one in running.values()),
            version=VERSION,
            policy=self._policy(),
            beginnings=self.beginnings.since(since),
        )

    def totals(self) -> LoadTotals:
        """The present load, all tenants together. O(steps in flight)."""
        core, scheduler, steps = self._core, self._core.scheduler, self._core.in_flight
        config, counters = scheduler.config, scheduler.kv_manager.counters
        seconds, running = core.predicted(steps[-1]) if steps else 0.0, len(scheduler.running)
        return LoadTotals(
            running=running,
            waiting=len(scheduler.waiting),
            seats=config.max_num_seqs,
            waiting_tokens=core.backlog.total.tokens,
            held_tokens=config.short_tokens(self._kv.num_held),
            total_tokens=config.short_tokens(config.num_blocks),
            tokens_per_second=running / seconds if seconds else 0.0,
            cache_hit_rate=counters.cached_tokens / max(1, self._kv.num_queried_tokens),
        )

    def work_seconds(self) -> float:
        """The predicted engine seconds of all running and queued requests."""
        running = sum(map(self._seconds_left, self._core.scheduler.running.values()))
        return self._core.backlog.total.seconds + running

    def replicas_wanted(self) -> float:
        """The number of replicas that its work would occupy; summed over replicas, the number there should be."""
        return self.work_seconds() / self._target

    def _waiting(self, token_seconds: float) -> dict[str, WaitingWork]:
        most = nlargest(MAX_TENANTS, self._core.backlog.tenants(), key=lambda pair: pair[1].seconds)
        return {
            name: WaitingWork(load.count, self._prefill_seconds(token_seconds, load.tokens, load.pairs), load.seconds)
            for name, load in most
        }

    def _prefill_seconds(self, token_seconds: float, tokens: int, pairs: int) -> float:
        """Seconds to prefill `tokens` with `pairs` of a query and a key."""
        return tokens * token_seconds + pairs * self._core.step_time.fitted.coefficients[PAIRS_COEFFICIENT]

    def _token_seconds(self) -> float:
        """Seconds of a prefill token in a step with the present decodes, as the core estimates it; its attention comes
        on top.
        """
        scheduler = self._core.scheduler
        newest = scheduler.in_flight[-1] if scheduler.in_flight else None
        decodes, context = newest.decoding if newest else (0, 0)
        tokens = max(1, scheduler.budget.tokens - decodes)
        return self._core.step_time.fitted.seconds(StepWork(tokens, decodes, context)) / tokens

    def _seat_seconds(self) -> float:
        fewest = min(self._tokens_left(one) for one in self._core.scheduler.running.values())
        return fewest * self._core.predicted(self._core.in_flight[-1]) if self._core.in_flight else 0.0

    def _step_seconds(self) -> float:
        steps = self._core.in_flight
        predicted = sum(map(self._core.predicted, steps))
        return max(0.0, predicted - (self._clock() - steps[0].planned_at)) if steps else 0.0

    def _tokens_left(self, one: Sequence) -> float:
        """The expected remaining tokens of a running sequence's answer."""
        generated = len(one.output)
        return max(1.0, self._core.lengths.mean(one.tenant, one.request.max_tokens, generated) - generated)

    def _seconds_left(self, one: Sequence) -> float:
        """The remaining cost of a running sequence, as the remaining part of its tokens."""
        tokens = self._tokens_left(one)
        output = tokens + len(one.output)
        left = max(0, one.num_admitted_tokens - one.num_computed_tokens) + tokens
        return self._core.backlog.load_of(one, output).seconds * min(1.0, left / (one.num_prompt_tokens + output))
