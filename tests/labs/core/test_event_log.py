import json
from functools import cache
from random import Random

import pytest

from admission.controller import Controller
from admission.core import PRIOR_STEP_TIME, CoreConfig, MemoryGate, make_core
from admission.event_logs.event_log import LogError, make_logged_core, replay
from admission.event_logs.names import VERSION
from admission.forecast import Forecast
from admission.ledger import AdapterTime
from admission.request import JudgedPrompt, JudgedRequest
from admission.scheduling_policy import QueueBounds, SchedulingPolicy
from admission.step_times.step_time import StepTime, StepTimeModel
from backend.adapter import make_adapter
from backend.config import EngineConfig
from backend.scheduler.batch import Batch
from tests.admission.clocked_core import ClockedCore
from tests.admission.staged_core import SMALL, StagedCore
from tests.backend.sequences import TOKEN, make_sequence
from tests.examples import examples
from tests.labs.core.log_runs import random_run

CONFIGS = {
    "fair": CoreConfig(),
    "fcfs": CoreConfig(order="fcfs", memory=MemoryGate.OPTIMISTIC),
    "weighted": CoreConfig(weights={"acme": 2.0}, burst_s=0.5),
    "bounded": CoreConfig(max_waiting=5, prefill_share=0.5),
}


def record(config: CoreConfig, seed: int, learned: bool = False, rounds: int = 400) -> list[str]:
    return random_run(config, seed, learned, losses=0.03, rounds=rounds, max_model_len=120, max_num_seqs=6)


@cache
def _recorded() -> tuple[str, ...]:
    return tuple(record(CONFIGS["fair"], 0))


@pytest.fixture
def recorded() -> list[str]:
    """A log of a run, which a test may change."""
    return [*_recorded()]


def check_replay(lines: list[str]) -> None:
    assert [json.dumps(entry, separators=(",", ":")) for entry in replay(lines)] == lines


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("seed", range(examples(2)))
def test_a_replay_reproduces_every_decision_to_the_byte(config: CoreConfig, seed: int) -> None:
    check_replay(record(config, seed))


def test_a_deadline_that_passes_is_logged_with_the_plan_that_follows_and_no_other() -> None:
    stage = StagedCore(CONFIGS["fair"])
    for name in "bc":
        stage.arrive(name, 6, 20)
    late = stage.arrive("late", 6, 20, first_token_by=stage.now + 1.0)
    stage.now += 2.0
    assert stage.plan() == [late] and len(stage.launched) == 2
    told = [json.loads(line)[-1] for line in stage.lines if line.startswith('["plan"')]
    assert told == [[["late", "expired"]], []]
    check_replay(stage.lines)


def test_the_recorded_runs_have_deadlines_that_pass_and_steps_that_are_lost(recorded: list[str]) -> None:
    entries = [json.loads(line) for line in recorded]
    assert any(entry[0] == "lost" for entry in entries)
    assert any(entry[0] == "plan" and entry[-1] for entry in entries)


@pytest.mark.parametrize("seed", range(examples(1)))
def test_a_replay_begins_with_what_earlier_runs_had_learned_of_step_times(seed: int) -> None:
    check_replay(record(CONFIGS["fair"], seed, learned=True, rounds=500))


def test_a_replay_tells_its_model_the_work_and_the_time_of_each_step(recorded: list[str]) -> None:
    steps: list[float] = []

    def learner(prior: StepTime, weight: float) -> StepTimeModel:
        return StepTimeModel(prior, weight, observed=lambda work, seconds: steps.append(seconds))

    done = [entry[3] for entry in replay(recorded, make_model=learner) if entry[0] == "done"]
    assert steps == done


def test_a_log_that_was_tampered_with_is_noticed_at_the_line(recorded: list[str]) -> None:
    number = next(n for n, line in enumerate(recorded) if line.startswith('["done"'))
    entry = json.loads(recorded[number])
    entry[2] += 1
    recorded[number] = json.dumps(entry, separators=(",", ":"))
    with pytest.raises(LogError) as error:
        list(replay(recorded))
    assert error.value.line == number + 1


@pytest.mark.parametrize(
    ("place", "line", "message"),
    [
        *(
            (0, f'["log",{n}]', f"line 1: a log of version {n}; this is version {VERSION}, .* release")
            for n in (7, VERSION - 1, VERSION + 1)
        ),
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
def test_a_line_that_no_gateway_wrote_there_is_named(place: int, line: str, message: str, recorded: list[str]) -> None:
    recorded[place] = line
    with pytest.raises(LogError, match=message):
        list(replay(recorded))


def test_no_token_of_a_prompt_or_an_answer_is_in_the_log() -> None:
    assert all(f"{TOKEN},{TOKEN}" not in line for line in record(CONFIGS["fcfs"], 1))


def test_leases_and_extensions_are_events_too() -> None:
    stage = StagedCore(CONFIGS["fair"], max_model_len=120)
    stage.allow("t", 2)
    small = stage.arrive("small", 6, 40, "t", may_have=1)
    stage.arrive("large", 30, 9, "t")
    stage.steps(4)
    stage.extend(small, 20)
    stage.steps(3)
    stage.allow("t", None)
    stage.run()
    assert len(small.output) > 1
    assert any('"allowance"' in line for line in stage.lines) and any('["extend"' in line for line in stage.lines)
    check_replay(stage.lines)


def test_work_beside_the_steps_is_replayed_on_the_account_of_its_class() -> None:
    stage = StagedCore(CONFIGS["fair"])
    stage.core.charge_side_work("a", 2.0, stage.now)
    stage.core.charge_side_work("a", 3.0, stage.now, is_spare=True)
    stage.run()
    assert [share.account("a").charged for share in (stage.core.share, stage.core.ledger.spare)] == [2.0, 3.0]
    check_replay(stage.lines)


def test_a_change_of_policy_is_an_event_too() -> None:
    stage = StagedCore(CONFIGS["fair"])
    policy = SchedulingPolicy({"a": 3.0}, (0.0, 5.0), (QueueBounds(count=9),), {"": 7})
    stage.core.set_policy(policy, stage.now)
    for n, tenant in enumerate("abab"):
        stage.arrive(f"r{n}", 30, 9, tenant)
    stage.run()
    assert any(line.startswith('["policy"') for line in stage.lines)
    check_replay(stage.lines)


def test_a_request_judged_by_its_limits_is_an_event() -> None:
    stage = StagedCore(CONFIGS["fair"])
    stage.log.serves("embedded", 4096, 1.7e9, 0.5)
    two = (JudgedPrompt(6, 9, True), JudgedPrompt(7, 9, False))
    stage.core.requested(JudgedRequest("r", "a", "k", "flex", 80, 1.5, None, 0.1, two), 1.0)
    stage.core.requested(JudgedRequest.unread("t", "a", None, "tokens/min"), 1.5)
    stage.core.requested(JudgedRequest("s", "a", None, None, 80, None, None, None, two[:1], "tokens/min"), 1.0)
    check_replay(stage.lines)


def decisions(core: Controller, seed: int) -> list[Batch]:
    """Every plan of a run that is the same for all cores."""
    random = Random(seed)
    run, plans, live = ClockedCore(core, lambda step: random.uniform(0.001, 0.02)), [], []
    for n in range(300):
        run.now = float(n)
        if random.random() < 0.4:
            prompt, output, level = random.randint(1, 30), random.randint(1, 20), random.randrange(2)
            live.append(run.add(make_sequence(f"r{n}", f"t{n % 3}", prompt, output, priority_class=level)))
        if live and random.random() < 0.1:
            run.finish(random.choice(live))
        run.plan()
        plans += [step.batch for step in run.launched]
        if run.launched and random.random() < 0.7:
            run.complete()
    return plans


@pytest.mark.parametrize("seed", range(examples(3)))
def test_recording_a_core_changes_no_decision(seed: int) -> None:
    config, engine = CoreConfig(), EngineConfig(**SMALL)
    recorded = make_logged_core(config, engine, StepTimeModel(PRIOR_STEP_TIME), lambda line: None)[0]
    assert decisions(recorded, seed) == decisions(make_core(config, engine), seed)


@pytest.mark.parametrize("seed", range(examples(2)))
def test_a_replay_finds_and_gives_up_the_same_cached_blocks(seed: int) -> None:
    lines = random_run(CONFIGS["fair"], seed, losses=0.03, rounds=300, is_shared=True, num_blocks=24)
    assert any(isinstance(json.loads(line)[-1], dict) for line in lines)
    check_replay(lines)


def test_blocks_are_told_by_runs_of_ordinals_and_output_as_it_is_left() -> None:
    stage = StagedCore(CONFIGS["fair"], num_blocks=12, max_model_len=48)
    stage.arrive("first", [7] * 9, 4)
    stage.drain()
    stage.arrive("second", [7] * 9 + [TOKEN] * 4 + [8] * 5, 2)
    stage.arrive("apart", 9, 1)
    stage.drain()
    stage.limit_cache("a", 2, None)
    stage.arrive("large", [9] * 30, 4, tenant="b")
    stage.drain()
    entries = [json.loads(line) for line in stage.lines]
    assert [entry[16] for entry in entries if entry[0] == "arrive"] == [[[1, 2]], [[1, 4]], [], [[5, 7]]]
    said = [entry[-1] for entry in entries if isinstance(entry[-1], dict)]
    assert {"blocks": {"first": [[3, 1]]}} in said and {"found": {"second": 3}} in said
    assert {"evicted": 1, "idle": 3} in said
    assert ["cache", "a", 2, None] in [[kind, *rest] for kind, _, *rest in entries]
    check_replay(stage.lines)


def test_no_decision_depends_on_a_name_that_the_log_has_not_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that was named as it filled is known to the core, which lost the step that was to compute it again."""
    monkeypatch.setattr("backend.scheduler.block_tables.BLOCKS_NAMED_AT_ONCE", 1)
    stage = StagedCore(CoreConfig(memory=MemoryGate.OPTIMISTIC), max_num_seqs=2, num_blocks=60)
    other = stage.arrive("other", [5] * 3, 40, priority_class=1)
    low = stage.arrive("low", [7] * 5, 20, priority_class=2)
    while len(low.output) < 2:
        stage.plan()
        while stage.launched:
            stage.complete()
    stage.arrive("high", 3, 1, first_token_by=stage.now + 5)
    stage.steps(4)
    assert low.num_preemptions == 1
    stage.plan()
    stage.lose()
    assert len(low.block_names) > low.block_table.num_told_names
    stage.finish(other)
    follower = stage.arrive("follower", [*low.request.prompt, *low.output, TOKEN, TOKEN], 2, priority_class=2)
    stage.drain()
    assert follower.num_cached_tokens
    check_replay(stage.lines)


def test_a_log_that_does_not_say_a_setting_is_refused() -> None:
    stage = StagedCore(CONFIGS["fair"])
    stage.arrive("one", 6, 2)
    header, *_ = stage.run()
    entry = json.loads(header)
    del entry[2]["prefix_cache"]
    with pytest.raises(LogError, match=r"line 1: not an entry .* 'prefix_cache'"):
        list(replay([json.dumps(entry)]))


def test_a_run_with_adapters_is_decided_and_charged_again() -> None:
    """Three tenants with more adapters than fit: some are evicted, brought back, and passed over meanwhile."""
    small = {"max_num_batched_tokens": 8, "prefill_chunk": 8}
    core = StagedCore(CoreConfig(), max_adapter_rank=4, adapter_block_seconds=(1e-5, 1e-6, 1e-4), **small)
    adapters, random = [make_adapter(f"adapter {number}", "", number, 4 + number) for number in range(1, 7)], Random(2)
    for number in range(40):
        adapter = random.choice([*adapters, None])
        core.arrive(f"{number}", random.randint(1, 3), 12, tenant=random.choice("abc"), adapter=adapter)
        for _ in range(random.randint(1, 6) if number % 4 == 3 else 0):
            core.plan()
            if core.launched:
                core.complete()
    assert core.scheduler.kv_manager.cache.evictions > 0
    assert any('"adapter"' in line for line in core.lines if line.startswith('["plan"'))
    check_replay(core.lines)


def test_the_rows_with_an_adapter_are_charged_what_it_adds() -> None:
    core = StagedCore(CoreConfig(), max_adapter_rank=4, adapter_block_seconds=(0.5, 0.25, 2.0))
    adapter = make_adapter("law", "", 1, 3)
    core.arrive("with", 8, 2, tenant="a", adapter=adapter)
    core.arrive("without", 8, 2, tenant="b")
    core.plan()
    step = core.launched[0]
    assert AdapterTime(core.engine).of_rows(step) == [3 * (8 * 0.25 + 2.0), 0.0]


def test_a_forecast_has_the_seconds_of_its_adapter_and_of_those_that_decode() -> None:
    adapter = make_adapter("law", "", 1, 3)

    def forecasts(seconds: tuple[float, float, float]) -> list[Forecast]:
        core = StagedCore(CoreConfig(), max_adapter_rank=4, adapter_block_seconds=seconds)
        core.arrive("decodes", 8, 20, tenant="a", adapter=adapter)
        for _ in range(2):
            core.plan()
            core.complete()
        core.plan()
        forecaster = core.core.control.forecaster
        asking = [make_sequence("b", "b", 8, 1, (), adapter=one) for one in (adapter, None)]
        assert [forecaster.alone(one) for one in asking] == pytest.approx([alone + 3 * 8 * seconds[1], alone])
        return [forecaster.of(one, 0, core.now) for one in asking]

    core = StagedCore(CoreConfig(), max_adapter_rank=4)
    alone = core.core.control.forecaster.alone(make_sequence("b", "b", 8, 1, ()))
    free, costly = forecasts((0.0, 0.0, 0.0)), forecasts((0.5, 0.25, 2.0))
    with_one, without = (after.first_token - before.first_token for before, after in zip(free, costly, strict=True))
    assert with_one - without == pytest.approx(3 * 8 * 0.25)
    assert without > 3 * 0.5 / 2, "half of a step and its own prompt, beside a decode with an adapter"
