"""Each function here records an event log of everything at once, and returns its lines.

`scripts/record_logs.py` calls them once for each version of the log, and `random_run` for each choice that a core has.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

from admission.core import CoreConfig
from admission.event_logs.event_log import make_logged_core
from admission.outcome import AdmissionRefused
from admission.request import JudgedPrompt, JudgedRequest
from admission.scheduling_policy import QueueBounds, SchedulingPolicy
from admission.step_times.step_time import StepTimeModel
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from labs.simulation.arrival import Arrival, ClassTarget
from labs.simulation.device import DEVICES
from labs.simulation.loop import Loop
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder
from tests.admission.staged_core import StagedCore

TENANTS = ("acme", "beta", "corp", "dyne")
LEARNED = {"coefficients": [5e-3, 1.1e-4, 2.5e-5, 1.3e-6, 1e-7, 9e-9, 1e-4], "knee": 20, "steps": 5000}
A100 = {"coefficients": [15e-3, 8.1e-5, 9.5e-5, 1.1e-7, 7.6e-7, 0.0, 0.0], "knee": 512, "steps": 200}


def random_run(
    config: CoreConfig,
    seed: int,
    learned: bool = False,
    losses: float = 0.0,
    failures: float = 0.0,
    rounds: int = 90,
    is_shared: bool = False,
    **engine: Any,
) -> list[str]:
    """Let random events happen in a number of rounds, and serve the remaining requests to their end.

    `learned`: it begins with the step times of an earlier run. `losses`: the share of the steps that are lost.
    `failures`: the share of the rounds from which on the model computes no numbers for one of the latest.
    `is_shared`: prompts begin as others did, or with what these became, and tenants' caches are limited.
    """
    prior = StepTimeModel.from_json(LEARNED) if learned else None
    kind = _SharingRun if is_shared else _RandomRun
    run = kind(StagedCore(config, seed, prior, **engine), losses, failures)
    for number in range(rounds):
        run.round(number)
    return run.end()


class _RandomRun:
    """Four tenants send requests with all that a request may have to a machine that is too small for them."""

    def __init__(self, stage: StagedCore, losses: float, failures: float) -> None:
        self._stage = stage
        self._losses = losses
        self._failures = failures
        self._random = stage.random
        self._sequences: list[Sequence] = []
        self._group: str | None = None  # of those that arrive now
        self._events: list[tuple[float, Callable[[], None]]] = [
            (0.08, self._cancel),
            (0.05, self._stop),
            (0.10, self._allow),
            (0.15, self._extend),
            (0.04, self._change_policy),
            (0.02, self._stall),
        ]
        stage.log.serves("embedded", 4096, 1.75e9, stage.now)

    def round(self, number: int) -> None:
        random, stage = self._random, self._stage
        stage.now += random.expovariate(400)
        if random.random() < 0.5:
            self._request(f"cmpl-{number}")
        for share, happens in self._events:
            if random.random() < share:
                happens()
        if self._failures and random.random() < self._failures:
            stage.failing.update(sequence.id for sequence in self._some())
        stage.plan()
        if stage.launched and random.random() < self._losses:
            stage.lose()
        elif stage.launched and random.random() < 0.85:
            self._complete()

    def end(self) -> list[str]:
        for tenant in TENANTS:
            self._stage.allow(tenant, None)
        for sequence in self._sequences:
            if sequence.token_limit < sequence.request.most_tokens and sequence.status is not SequenceStatus.FINISHED:
                self._stage.extend(sequence, sequence.request.max_tokens)
        return self._stage.run()

    def _request(self, name: str) -> None:
        """Send a request, mostly of one prompt; limits refuse some, and some of these before they are read."""
        random, stage = self._random, self._stage
        tenant = random.choice(TENANTS)
        if random.random() < 0.05:
            stage.core.requested(JudgedRequest.unread(name, tenant, None, "requests/min"), stage.now)
            return
        refusal = "tokens/day" if random.random() < 0.05 else None
        prompts = tuple(
            JudgedPrompt(random.randint(1, 30), random.randint(1, 24), random.random() < 0.8)
            for _ in range(random.choice((1, 1, 1, 2)))
        )
        first, last, interval = (random.choice((None, None, limit)) for limit in (0.3, 1.5, 0.02))
        size = random.randint(50, 400)
        asked = JudgedRequest(
            name, tenant, f"key-{tenant}", random.choice((None, "flex")), size, first, last, interval, prompts
        )
        stage.core.requested(replace(asked, refusal=refusal), stage.now)
        if refusal is None:
            for index, prompt in enumerate(prompts):
                self._arrive(f"{name}-{index}", asked, prompt)

    def _arrive(self, name: str, asked: JudgedRequest, prompt: JudgedPrompt) -> None:
        random, stage = self._random, self._stage
        first, last, now = asked.first_token, asked.last_token, stage.now
        try:
            sequence = stage.arrive(
                name,
                self._prompt(asked.tenant, prompt.prompt_tokens),
                prompt.most,
                asked.tenant,
                may_have=None if prompt.is_declared else random.randint(0, 12),
                priority_class=2 if asked.service_tier else random.randrange(2),
                token_interval=asked.interval,
                first_token_target=random.choice((None, 0.05, 0.5)),
                first_token_by=None if first is None else now + random.uniform(0.3, 2) * first,
                done_by=None if last is None else now + random.uniform(0.1, 1) * last,
                body_bytes=asked.body_bytes // len(asked.prompts),
                prompt_group=self._group,
                expects_followup=self._expected(),
            )
        except AdmissionRefused:
            return
        self._sequences.append(sequence)

    def _prompt(self, tenant: str, length: int) -> int | list[int]:
        return length

    def _expected(self) -> float | None:
        return None

    def _complete(self) -> None:
        stopped = {sequence.id for sequence in self._sequences if self._random.random() < 0.04}
        self._stage.complete(stopped)

    def _cancel(self) -> None:
        for sequence in self._some():
            self._stage.finish(sequence)

    def _stop(self) -> None:
        """End an answer that has some text, as a stop string in it does."""
        for sequence in self._some():
            if sequence.output:
                self._stage.finish(sequence, FinishReason.STOP)

    def _some(self) -> list[Sequence]:
        recent = self._sequences[-16:]
        return [self._random.choice(recent)] if recent else []

    def _allow(self) -> None:
        self._stage.allow(self._random.choice(TENANTS), self._random.choice((None, None, 5, 9, 14)))

    def _extend(self) -> None:
        limited = [s for s in self._sequences[-24:] if s.token_limit < s.request.most_tokens]
        if limited:
            self._stage.extend(self._random.choice(limited), self._random.choice((1, 4, 40)))

    def _change_policy(self) -> None:
        random = self._random
        weights = {tenant: random.choice((0.5, 1.0, 3.0)) for tenant in TENANTS[: random.randint(1, 4)]}
        a_class = random.choice((0.1, 2.0))
        bounds = (QueueBounds(random.choice((None, 6))), QueueBounds(tokens=200), QueueBounds(bytes=2000, seconds=0.3))
        limits = random.choice(({}, {"acme": 2}, {"": 3, "beta": 1}))
        offsets = (0.0, a_class, 2 * a_class)
        self._stage.core.set_policy(SchedulingPolicy(weights, offsets, bounds, limits), self._stage.now)

    def _stall(self) -> None:
        """Let the process stand still, so that deadlines pass."""
        self._stage.now += 0.6


class _SharingRun(_RandomRun):
    """Tenants have system prompts, conversations that go on, and several answers to some prompts."""

    def __init__(self, stage: StagedCore, losses: float, failures: float) -> None:
        super().__init__(stage, losses, failures)
        self._words = Random(0)  # of clients, which change nothing that happens
        self._events += [(0.1, self._limit_cache), (0.1, self._pin_prefixes)]
        self._repeated: list[int] = []  # the prompt of the group that arrives now, once it has begun to

    def _arrive(self, name: str, asked: JudgedRequest, prompt: JudgedPrompt) -> None:
        answers = self._random.choice((1, 1, 1, 1, 1, 3))
        self._group, self._repeated = name if answers > 1 else None, []
        for number in range(answers):
            super()._arrive(f"{name}.{number}" if number else name, asked, prompt)

    def _prompt(self, tenant: str, length: int) -> int | list[int]:
        """Returns a turn that follows on another of the tenant, or the first of a conversation."""
        random = self._random
        if self._group is not None and self._repeated:
            return self._repeated
        earlier = [sequence for sequence in self._sequences[-20:] if sequence.tenant == tenant]
        if earlier and random.random() < 0.6:
            one = random.choice(earlier)
            before = [*one.request.prompt, *one.output]
        else:
            before = [random.choice((7, 8))] * 14
        added = [random.randrange(10, 13)] * random.randint(1, 9)
        self._repeated = [*before, *added][: self._stage.engine.max_model_len - 2]
        return self._repeated

    def _expected(self) -> float | None:
        return self._words.choice((None, 0.05, 0.5, 5.0))

    def _limit_cache(self) -> None:
        floor, ceiling = self._random.choice(((0, None), (4, None), (2, 8), (0, 3)))
        self._stage.limit_cache(self._random.choice(TENANTS), floor, ceiling)

    def _pin_prefixes(self) -> None:
        """Pin one of the two system prompts, both, or none."""
        prompts = self._random.choice(((7,), (8,), (7, 8), ()))
        self._stage.pin_prefixes(self._random.choice(TENANTS), *([word] * 12 for word in prompts))


def many_answers(seed: int = 4, count: int = 440) -> list[str]:
    """Serve more short answers than are remembered, to tenants that are nearly even; a crowd comes and goes."""
    config = CoreConfig(
        weights={"acme": 4.0},
        max_waiting=None,
    )
    stage = StagedCore(config, seed, num_blocks=200, max_num_seqs=12, max_num_batched_tokens=48)
    random = stage.random
    for number in range(count):
        fields = {"priority_class": int(random.random() < 0.9), "first_token_by": stage.now + random.choice((0.5, 5.0))}
        with suppress(AdmissionRefused):
            stage.arrive(str(number), random.randint(1, 12), random.choice((2, 3)), random.choice(TENANTS), **fields)
        if number == count // 2:
            crowd = [stage.arrive(f"crowd-{n}", 8, 8, "echo", priority_class=2) for n in range(80)]
            for sequence in crowd[2:]:
                stage.finish(sequence)
        if number % 6 == 5:
            stage.step()
    return stage.run()


def flood(seed: int = 5, seconds: float = 5.0) -> list[str]:
    """Simulate ninety tenants in three classes, of whom one sends most, on Llama-3-8B and an A100."""
    random, arrivals, now = Random(seed), list[Arrival](), 0.0
    while (now := now + random.expovariate(90)) < seconds:
        prompt, output = round(random.lognormvariate(6.0, 0.9)) + 1, round(random.lognormvariate(3.0, 0.8)) + 1
        tenant = "flood" if random.random() < 0.3 else f"tenant-{random.randrange(90)}"
        level = random.randrange(3)
        deadline = (2.0, 6.0, None)[level]
        arrivals.append(Arrival(now, min(prompt, 8000), output, tenant=tenant, priority_class=level, deadline=deadline))
    device, lines = DEVICES["llama3-8b-a100"], list[str]()
    policy = parse_simulated_policy("max_num_batched_tokens=2048,max_num_seqs=192,prefill_chunk=512", device)
    core = make_logged_core(policy.core, policy.engine, StepTimeModel.from_json(A100), lines.append)[0]
    targets = (ClassTarget(0.5, 0.05), ClassTarget(2.0, 0.1), ClassTarget())
    recorder = Recorder(device, Objective(), {})
    loop = Loop(core, device, recorder, policy.engine.max_model_len, target=targets.__getitem__)
    loop.run(arrivals, until=seconds)
    return lines
