import json
import random
from collections import deque

import pytest

from admission.core import PRIOR, CoreConfig, MemoryGate, Order, Unit
from admission.event_log import LogError, make_logged_core, replay
from admission.outcome import AdmissionRefused
from admission.request import Asked, AskedPrompt
from admission.scheduling_policy import QueueBounds, SchedulingPolicy
from admission.step_time import StepTimeModel, StepWork
from backend.config import EngineConfig
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.sequence import FinishReason, Sequence
from tests.admission.sequences import make_sequence

ENGINE = EngineConfig(
    num_blocks=40, max_model_len=120, block_size=4, max_num_seqs=6, max_num_batched_tokens=32, prefill_chunk=20
)
CONFIGS = {
    "fair": CoreConfig(quantum=0.01),
    "fcfs": CoreConfig(order=Order.FCFS, memory=MemoryGate.OPTIMISTIC),
    "tokens": CoreConfig(unit=Unit.TOKENS, quantum=100, debt_limit=50, weights={"t0": 2.0}),
    "bounded": CoreConfig(max_waiting=5, prefill_share=0.5),
}


def record(config: CoreConfig, seed: int, events: int = 400, model: StepTimeModel | None = None) -> list[str]:
    """A run of random arrivals, cancellations, steps and lost steps on a clock that only moves forward."""
    rng, now, lines = random.Random(seed), 100.0, list[str]()
    core = make_logged_core(config, ENGINE, model or StepTimeModel(PRIOR), lines.append)[0]
    flying: deque[Batch] = deque()
    live: list[Sequence] = []
    for n in range(events):
        now += rng.expovariate(50)
        if rng.random() < 0.3:
            prompt, output = rng.randint(1, 60), rng.randint(1, 60)
            sequence = Sequence(
                f"r{n}", f"t{n % 3}", [rng.randrange(50)] * prompt, SamplingParams(), output, 0, frozenset([7])
            )
            sequence.priority_class = rng.randrange(3)
            sequence.token_interval = rng.choice([None, 0.05])
            sequence.first_token_by = rng.choice([None, None, now + rng.uniform(0, 0.5)])
            sequence.done_by = rng.choice([None, None, now + rng.uniform(0, 1)])
            try:
                core.arrive(sequence, now)
                live.append(sequence)
            except AdmissionRefused:
                pass
        if live and rng.random() < 0.05:
            core.finish(rng.choice(live), rng.choice([FinishReason.CANCELLED, FinishReason.STOP]), now)
        while (batch := core.schedule(now)) is not None:
            flying.append(batch)
        core.take_ended()
        if flying and rng.random() < 0.7:
            batch = flying.popleft()
            tokens = [7 if rng.random() < 0.05 else 4242 for _ in batch.sampled]
            core.update_from_output(StepOutput(batch.step, tokens, rng.uniform(0.001, 0.02)), now)
        elif flying and rng.random() < 0.1:
            core.rollback(now)
            flying.clear()
    return lines


def check_replay(lines: list[str]) -> None:
    assert [json.dumps(entry, separators=(",", ":")) for entry in replay(lines)] == lines


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("seed", range(5))
def test_a_replay_reproduces_every_decision_to_the_byte(config: CoreConfig, seed: int) -> None:
    lines = record(config, seed)
    check_replay(lines)


def test_a_deadline_that_passes_is_logged_with_the_plan_that_follows_and_no_other() -> None:
    lines: list[str] = []
    core = make_logged_core(CONFIGS["fair"], ENGINE, StepTimeModel(PRIOR), lines.append)[0]
    for name in "ab":
        core.arrive(make_sequence(name, "t", 6, 20, end=7), 1.0)
    late = make_sequence("late", "t", 6, 20, end=7)
    late.first_token_by = 2.0
    core.arrive(late, 1.0)
    plans = [core.schedule(3.0), core.schedule(3.0)]
    assert all(plans) and core.take_ended() == [late]
    assert [json.loads(line)[-1] for line in lines if line.startswith('["plan"')] == [[["late", "expired"]], []]
    check_replay(lines)


def test_the_recorded_runs_have_deadlines_that_pass_and_steps_that_are_lost() -> None:
    entries = [json.loads(line) for line in record(CONFIGS["fair"], 0)]
    assert any(entry[0] == "lost" for entry in entries)
    assert any(entry[0] == "plan" and entry[-1] for entry in entries)


@pytest.mark.parametrize("seed", range(5))
def test_a_replay_begins_with_what_earlier_runs_had_learned_of_step_times(seed: int) -> None:
    learned = {"coefficients": [5e-3, 1e-3, 1e-6, 1e-8, 1e-7, 1e-9, 1e-6], "knee": 512, "steps": 5000}
    lines = record(CONFIGS["fair"], seed, events=1500, model=StepTimeModel.from_json(learned))
    check_replay(lines)


def test_a_replay_tells_its_model_the_work_and_the_time_of_each_step() -> None:
    steps: list[float] = []

    class Learner(StepTimeModel):
        def observe(self, work: StepWork, seconds: float) -> None:
            steps.append(seconds)
            super().observe(work, seconds)

    lines = record(CONFIGS["fair"], 0)
    done = [entry[3] for entry in replay(lines, make_model=Learner) if entry[0] == "done"]
    assert steps == done


def test_a_log_that_was_tampered_with_is_noticed_at_the_line() -> None:
    lines = record(CONFIGS["fair"], 0)
    number = next(n for n, line in enumerate(lines) if line.startswith('["done"'))
    entry = json.loads(lines[number])
    entry[2] += 1
    lines[number] = json.dumps(entry, separators=(",", ":"))
    with pytest.raises(LogError) as error:
        list(replay(lines))
    assert error.value.line == number + 1


@pytest.mark.parametrize(
    ("place", "line", "message"),
    [
        (0, '["log",7]', "line 1: a log of version 7; this is version"),
        (0, '["plan",12.5]', "line 1: the log begins in the middle"),
        (3, "garbage", "line 4: not an entry of an event log"),
        (3, "7", "line 4: not an entry of an event log"),
        (3, '["arrive",1.0,"x"]', "line 4: not an entry of an event log"),
        (3, '["finish",1.0,"nobody","cancelled"]', "line 4: not an entry of an event log"),
        (3, '["request",1.0,"a","t",null,null,9,null,null,null,[],null]', "line 4: not an entry .* has prompts"),
        (
            3,
            '["request",1.0,"a","t",null,null,9,null,null,null,[[1,0,true]],null]',
            "line 4: not an entry .* one token",
        ),
        (3, '["request",1.0,"a",7,null,null,9,null,null,null,[[1,1,true]],null]', "line 4: not an entry .* names"),
        (3, '["gateway",1.0,"now","model",1]', "line 4: not an entry .* has a time"),
    ],
)
def test_a_line_that_no_gateway_wrote_there_is_named(place: int, line: str, message: str) -> None:
    lines = record(CONFIGS["fair"], 0)
    lines[place] = line
    with pytest.raises(LogError, match=message):
        list(replay(lines))


def test_no_token_of_a_prompt_or_an_answer_is_in_the_log() -> None:
    assert all("4242,4242" not in line for line in record(CONFIGS["fcfs"], 1))


def test_leases_and_extensions_are_events_too() -> None:
    lines: list[str] = []
    core = make_logged_core(CONFIGS["fair"], ENGINE, StepTimeModel(PRIOR), lines.append)[0]
    core.allow("t", 2, 1.0)
    small = make_sequence("small", "t", 6, 40, end=7)
    small.limit_to(1)
    core.arrive(small, 1.5)
    core.arrive(make_sequence("large", "t", 30, 9, end=7), 1.5)
    now = 2.0
    for event in range(12):
        while (batch := core.schedule(now)) is not None:
            now += 0.01
            core.update_from_output(StepOutput(batch.step, [4] * len(batch.sampled), 0.01), now)
        if event == 3:
            core.extend(small, 20, now)
        if event == 6:
            core.allow("t", None, now)
    assert len(small.output) > 1
    assert any('"allowance"' in line for line in lines) and any('["extend"' in line for line in lines)
    check_replay(lines)


def test_a_change_of_policy_is_an_event_too() -> None:
    lines: list[str] = []
    core = make_logged_core(CONFIGS["fair"], ENGINE, StepTimeModel(PRIOR), lines.append)[0]
    core.policy_changed(SchedulingPolicy({"a": 3.0}, (0.0, 5.0), (QueueBounds(count=9),), {"": 7}), 1.0)
    for n, tenant in enumerate("abab"):
        core.arrive(make_sequence(f"r{n}", tenant, 30, 9, end=7), 1.5)
    for step in range(8):
        while (batch := core.schedule(2.0 + step)) is not None:
            core.update_from_output(StepOutput(batch.step, [4] * len(batch.sampled), 0.01), 2.1 + step)
    assert any(line.startswith('["policy"') for line in lines)
    check_replay(lines)


def test_what_was_asked_of_limits_is_an_event_too() -> None:
    lines: list[str] = []
    core, event_log = make_logged_core(CONFIGS["fair"], ENGINE, StepTimeModel(PRIOR), lines.append)
    event_log.serves("embedded", 4096, 1.7e9, 0.5)
    core.requested(
        Asked("r", "a", "k", "flex", 80, 1.5, None, 0.1, (AskedPrompt(6, 9, True), AskedPrompt(7, 9, False))), 1.0
    )
    core.requested(Asked.unread("t", "a", None, "tokens/min"), 1.5)
    core.requested(Asked("s", "a", None, None, 80, None, None, None, (AskedPrompt(6, 9, True),), "tokens/min"), 1.0)
    check_replay(lines)
