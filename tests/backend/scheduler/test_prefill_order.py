from hypothesis import given, settings
from hypothesis import strategies as st

from backend.scheduler.hooks import DefaultHooks
from backend.scheduler.prefill_order import PrefillOrder
from backend.scheduler.sequence import Sequence
from tests.backend.scheduler.bench import Bench
from tests.backend.sequences import make_sequence
from tests.examples import examples

BUDGET = 16
ROOMY = {"num_blocks": 400, "max_model_len": 200, "max_num_seqs": 12, "max_num_batched_tokens": BUDGET}


def roomy(**changes: object) -> Bench:
    """A bench where memory and slots never bind, a prompt may fill a step, and one step is in flight."""
    return Bench(**(ROOMY | {"prefill_chunk": BUDGET, "steps_in_flight": 1} | changes))


def prefilled(bench: Bench) -> dict[str, int]:
    """The tokens of prompts in the last step, by the sequence that has them, in the order of its rows."""
    step = bench.scheduler.in_flight[-1]
    start = step.batch.num_decodes
    return {s.id: length for s, length in zip(step.sequences[start:], step.batch.lengths[start:], strict=True)}


def due(bench: Bench, tokens: int, at: float) -> Sequence:
    """A sequence that is due at a time: without other hooks, when it arrived."""
    sequence = bench.add(tokens, 2)
    sequence.arrival = at
    return sequence


def begun(bench: Bench, tokens: int, at: float) -> Sequence:
    """A sequence whose prefill has begun."""
    sequence = due(bench, tokens, at)
    bench.step()
    assert 0 < sequence.num_computed_tokens < tokens
    return sequence


def test_a_waiting_prompt_due_earlier_is_computed_before_the_rest_of_a_running_one() -> None:
    bench = roomy()
    long = begun(bench, 128, at=5.0)
    shorts = [due(bench, 4, at=4.0) for _ in range(5)]
    bench.plan()
    assert prefilled(bench) == {short.id: 4 for short in shorts[:4]}
    bench.complete()
    bench.plan()
    assert prefilled(bench) == {shorts[4].id: 4, long.id: BUDGET - 4 - 4}, "beside the tokens of four decodes"
    bench.drain()


def test_a_waiting_prompt_not_due_earlier_is_computed_behind_running_ones() -> None:
    bench = roomy()
    long = begun(bench, 128, at=5.0)
    for at in (5.0, 6.0):
        due(bench, 4, at)
    bench.plan()
    assert prefilled(bench) == {long.id: BUDGET}
    bench.drain()


def test_where_whole_prompts_are_computed_none_is_cut() -> None:
    bench = roomy(prefill_chunk=None, max_num_batched_tokens=64, max_model_len=64)
    first, second = due(bench, 60, at=1.0), due(bench, 40, at=0.0)
    bench.plan()
    assert prefilled(bench) in ({first.id: 60}, {second.id: 40})
    bench.drain()


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(0, 9), max_size=12))
def test_prompts_that_run_are_served_as_they_are_due(dues: list[int]) -> None:
    config = roomy().scheduler.config
    order = PrefillOrder(config, DefaultHooks(config))
    running = [make_sequence(str(number), arrival=float(at)) for number, at in enumerate(dues)]
    served = order.served(running)
    assert [one.arrival for one in served] == sorted(map(float, dues))
    assert sorted(one.id for one in served) == sorted(one.id for one in running)
