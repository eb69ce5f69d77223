"""Several models under one scheduler: whose turn a step is, who is passed over, and what no model sees of another."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from backend.scheduler.turns import Turns
from tests.backend.scheduler.bench import Bench, LossyMachine, make_config
from tests.backend.sequences import make_sequence
from tests.examples import examples

CONFIG = make_config()
LENGTHS = st.floats(1e-3, 1.0)


def asking(models: dict[int, dict[str, int]]) -> list:
    """Sequences by model and tenant."""
    return [
        make_sequence(f"{model} {tenant} {number}", tenant, model=model)
        for model, tenants in models.items()
        for tenant, count in tenants.items()
        for number in range(count)
    ]


@settings(max_examples=examples(200), deadline=None)
@given(
    models=st.dictionaries(
        st.integers(0, 4),
        st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3), min_size=1),
        min_size=2,
    ),
    weights=st.fixed_dictionaries({name: st.floats(0.25, 4.0) for name in "abcd"}),
    seconds=st.fixed_dictionaries(dict.fromkeys(range(5), LENGTHS)),
)
def test_no_model_with_rows_waits_longer_than_the_bound_of_fair_queuing(
    models: dict[int, dict[str, int]], weights: dict[str, float], seconds: dict[int, float]
) -> None:
    """Between two of its steps others have at most a step each, and their weights over its own times its own step."""
    turns, running = Turns(CONFIG, weights.__getitem__), asking(models)
    rows = Counter(one.tenant for one in running)
    shares = dict.fromkeys(models, 0.0)
    for one in running:
        shares[one.request.model] += weights[one.tenant] / rows[one.tenant]
    waited, longest = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0.0)
    for step in range(60 * len(models)):
        model = turns.next(running, None)
        turns.planned(model, step)
        turns.completed(model, step, seconds[model])
        for other in models:
            waited[other] = 0.0 if other == model else waited[other] + seconds[model]
            if step > 3 * len(models):  # the first steps were counted before any was measured
                longest[other] = max(longest[other], waited[other])
    for model, share in shares.items():
        others = [other for other in models if other != model]
        bound = sum(shares[other] for other in others) / share * seconds[model] + sum(
            2 * seconds[one] for one in others
        )
        assert longest[model] <= bound + 1e-9


@settings(max_examples=examples(100), deadline=None)
@given(
    weights=st.tuples(st.floats(0.25, 4.0), st.floats(0.25, 4.0)),
    seconds=st.tuples(LENGTHS, LENGTHS),
    apart=st.integers(1, 4),
)
def test_tenants_of_different_models_have_engine_time_by_their_weights(
    weights: tuple[float, float], seconds: tuple[float, float], apart: int
) -> None:
    turns = Turns(CONFIG, dict(zip("ab", weights, strict=True)).__getitem__)
    running, served = asking({0: {"a": apart}, 1: {"b": 1}}), [0.0, 0.0]
    steps = 0
    while max(served) < 30 * max(seconds):
        model = turns.next(running, None)
        turns.planned(model, steps)
        turns.completed(model, steps, seconds[model])
        served[model] += seconds[model]
        steps += 1
    apart_by = abs(served[0] / weights[0] - served[1] / weights[1])
    assert apart_by <= 2 * (seconds[0] / weights[0] + seconds[1] / weights[1]) + 0.1 / min(weights)


def test_a_model_that_was_idle_has_saved_no_turns() -> None:
    turns, step = Turns(CONFIG, lambda tenant: 1.0), 0
    both = asking({0: {"a": 1}, 1: {"b": 1}})
    for running, planned in ((both[:1], 50), (both, 4)):
        models = []
        for _ in range(planned):
            models.append(turns.next(running, None))
            turns.planned(models[-1], step)
            turns.completed(models[-1], step, 0.1)
            step += 1
    assert sorted(models) == [0, 0, 1, 1]


def test_the_spare_class_has_a_turn_only_where_no_other_request_runs() -> None:
    bench = Bench(models=2)
    line = bench.add(2, 12, priority_class=10**6, model=1)
    bench.step()
    chat = bench.add(2, 8, model=0)
    models = []
    while chat.finish_reason is None:
        bench.step()
        models.append(bench.batches[-1].model)
    assert set(models[1:-1]) == {0}
    bench.drain()
    assert len(line.output) == 12


def test_a_spare_request_runs_beside_an_answer_that_waits_at_its_token_limit() -> None:
    bench = Bench(models=2)
    answer = bench.add(2, 8, model=0)
    answer.token_limit = 4
    line = bench.add(2, 6, priority_class=10**6, model=1)
    for _ in range(30):
        if line.finish_reason is None:
            bench.step()
    assert len(line.output) == 6 and len(answer.output) == 2
    assert not bench.scheduler.counters.preemptions
    answer.token_limit = answer.request.most_tokens
    bench.drain()
    assert len(answer.output) == 8


def test_a_step_has_rows_of_one_model_and_the_next_is_the_others_turn() -> None:
    bench = Bench(models=2)
    for number in range(4):
        bench.add(3, 6, tenant="ab"[number % 2], model=number % 2)
    bench.drain()
    for batch in bench.batches:
        slots = {admitted.slot for one in bench.batches if one.model == batch.model for admitted in one.admitted}
        assert set(batch.slots) <= slots
    middle = [batch.model for batch in bench.batches[2:8]]
    assert middle in ([0, 1] * 3, [1, 0] * 3)


def test_nobody_overtakes_the_head_for_the_memory_that_it_needs_in_its_models_step() -> None:
    """Short requests of another model keep coming, and all memory is taken again and again."""
    bench = Bench(models=2, num_blocks=10)
    for _ in range(3):
        bench.add(8, 4, tenant="a", model=0)
    large = bench.add(30, 2, tenant="b", model=1)
    for _ in range(12):
        bench.add(8, 4, tenant="a", model=0)
    finished = 0
    while not large.output:
        bench.step()
        finished = sum(batch.model == 0 and bool(batch.admitted) for batch in bench.batches)
    assert finished <= 4, "those before it, and none behind it"
    bench.drain()


def test_a_line_of_a_batch_is_not_kept_waiting_by_a_head_of_another_model() -> None:
    """The head of the queue is looked for anew in each model's turn: found for one it was nobody's in another."""
    bench = Bench(models=3, steps_in_flight=2)
    bench.say([0], 4, "a", model=0)
    bench.say([1], 2, "a", model=0, priority_class=10**6)
    for model in (1, 1, 2):
        bench.say([0], 1, "b", model=model, priority_class=1)
    bench.drain()


class ModelMachine(LossyMachine):
    """Requests of two tenants for three models over one memory, with shared prompts, swaps and lost steps."""

    @initialize(
        host=st.sampled_from([0, 4, 16]),
        depth=st.integers(1, 2),
        caches=st.booleans(),
        windows=st.sampled_from([{}, {0: 2}, {1: 1}, {0: 1, 2: 3}]),
    )
    def start(self, host: int, depth: int, caches: bool, windows: dict[int, int]) -> None:
        """`windows`: by model, the groups of layers that see a few tokens."""
        groups = [(windows.get(model, 0), 3 + model if model in windows else 0) for model in range(3)]
        (own, seen), *others = groups
        fields: dict[str, object] = dict(num_host_blocks=host * caches, steps_in_flight=depth, prefix_cache=caches)
        if windows:
            fields |= dict(window_groups=own, window_tokens=seen, window_alignment=4, further_windows=tuple(others))
            fields |= dict(num_blocks=42)
        self.begin(models=3, **fields)

    @rule(
        prompt=st.integers(0, 2),
        length=st.integers(1, 20),
        output=st.integers(1, 12),
        tenant=st.sampled_from("ab"),
        model=st.integers(0, 2),
        answers=st.integers(1, 2),
        level=st.sampled_from([0, 1, 10**6]),
    )
    def ask(self, prompt: int, length: int, output: int, tenant: str, model: int, answers: int, level: int) -> None:
        tokens = [100 * prompt + place for place in range(length)]
        for _ in range(answers if len(self.sequences) < 25 else 0):
            group = f"{tenant} {model} {len(self.sequences)} {tokens}" if answers > 1 else None
            root = self.bench.names.root(tenant, str(model))
            fields = dict(cache_root=root, model=model, prompt_group=group, priority_class=level)
            self.sequences.append(self.bench.say(tokens, output, tenant, **fields))  # type: ignore[arg-type]

    @rule()
    def plan(self) -> None:
        self.bench.plan()

    @rule(tenant=st.sampled_from("ab"), more=st.sampled_from([None, 3, 5]))
    def allow(self, tenant: str, more: int | None) -> None:
        longest = max(self.bench.config.kv_blocks(32, model) for model in range(3))
        self.bench.scheduler.allow(tenant, None if more is None else longest + more, self.bench.now)


TestModels = ModelMachine.TestCase
TestModels.settings = settings(max_examples=examples(20, at_night=2000), stateful_step_count=50, deadline=None)
