"""What lies ahead of a newcomer, among more tenants than are looked at one by one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission.controller import Controller
from admission.core import PRIOR, CoreConfig, Overload, make_core
from admission.estimate import Estimate
from admission.step_time import StepWork
from backend.config import EngineConfig
from backend.sampling import SamplingParams
from backend.sequence import Sequence
from tests.examples import examples

ENGINE = EngineConfig(num_blocks=4096, max_model_len=8192, max_num_seqs=32, prefill_chunk=512)
NOW = 10.0

Waiting = tuple[str, int, int]
WAITING = st.tuples(st.sampled_from("abcdef"), st.integers(1, 3000), st.integers(0, 2))


def sequence(name: str, tenant: str, prompt: int, level: int = 0, deadline: float | None = None) -> Sequence:
    return Sequence(
        name, tenant, [0] * prompt, SamplingParams(), 100, 0, frozenset(), NOW, level, first_token_by=deadline
    )


def core_with(waiting: list[Waiting], steps: int = 0) -> Controller:
    """The first of them came first; then some steps were planned and are in flight."""
    core = make_core(replace(CoreConfig(), overload=Overload.UNBOUNDED), ENGINE)
    for n, (tenant, prompt, level) in enumerate(waiting):
        core.arrive(sequence(str(n), tenant, prompt, level), 0.1 * n)
    for _ in range(steps):
        core.plan(NOW)
    return core


def estimate(core: Controller, asked: Sequence, looked_at: int) -> Estimate:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("admission.estimate.LOOKED_AT", looked_at)
        return core.room.control._estimator.of(asked, NOW)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(WAITING, max_size=25),
    WAITING,
    WAITING,
    st.sampled_from([None, NOW + 5.0]),
    st.integers(0, 2),
    st.integers(2, 4),
)
def test_more_backlog_never_lowers_an_estimate(
    waiting: list[Waiting], more: Waiting, newcomer: Waiting, deadline: float | None, steps: int, looked_at: int
) -> None:
    core, asked = core_with(waiting, steps), sequence("asked", *newcomer, deadline)
    before = estimate(core, asked, looked_at)
    added = sequence("more", *more)
    core.scheduler.add(added)
    core.room.backlog.add(added)
    after = estimate(core, asked, looked_at)
    nearly = 1 - 1e-9
    assert after.first_token >= nearly * before.first_token and after.last_token >= nearly * before.last_token


def decoding(core: Controller) -> float:
    """Expected seconds from a newcomer's first token to its last, the 100th."""
    expected = core.room.control._estimator.of(sequence("asked", "other", 10), NOW)
    return expected.last_token - expected.first_token


def test_an_answer_on_an_idle_machine_is_expected_in_steps_of_its_own() -> None:
    own = PRIOR.seconds(StepWork(decode_tokens=1, decode_context=10))
    assert decoding(core_with([])) == pytest.approx(99 * own)


def test_an_answer_is_expected_in_full_steps_while_prompts_wait_and_then_in_such_as_were_lately() -> None:
    few, many = (core_with([("a", 8000, 0)] * count) for count in (4, 500))
    idle, full = decoding(core_with([])), decoding(many)
    room = few.scheduler.token_budget
    assert full == pytest.approx(99 * PRIOR.seconds(StepWork(room, 0, 0, 5, room * 5)))
    share = 4 * 8000 / room / 99
    assert decoding(few) == pytest.approx(share * full + (1 - share) * idle)
    few.room._pipeline.typical = idle / 99 * 2
    assert decoding(few) == pytest.approx(share * full + (1 - share) * 2 * idle)
    few.room._pipeline.typical = full
    assert decoding(few) == pytest.approx(full), "no step is expected to be more than full"


def test_of_tenants_that_are_alike_a_few_speak_for_all() -> None:
    core = core_with([(f"tenant-{n % 40}", 500, 0) for n in range(400)])
    asked = sequence("asked", "other", 500)
    few, all_of_them = (estimate(core, asked, looked_at).first_token for looked_at in (4, 64))
    assert few == pytest.approx(all_of_them)


def test_one_that_floods_counts_for_no_more_than_its_turns_wherever_it_stands() -> None:
    flooded = [(f"tenant-{n}", 500, 0) for n in range(40)] + [("tenant-20", 500, 0)] * 2000
    asked = sequence("asked", "other", 500)
    few, all_of_them = (estimate(core_with(flooded), asked, looked_at).first_token for looked_at in (4, 64))
    assert few == pytest.approx(all_of_them, rel=0.05)
