import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.scheduler.lost_steps import MAX_LOSSES_IN_A_ROW, RECOVERY_STEPS, TokenBudget


@given(st.integers(1, 10_000), st.lists(st.one_of(st.none(), st.integers(1, 10_000)), max_size=60))
def test_a_budget_is_never_empty_and_never_more_than_what_is_configured(most: int, steps: list[int | None]) -> None:
    budget = TokenBudget(most)
    for lost in steps:
        if lost is None:
            before = budget.tokens
            budget.computed()
            assert budget.tokens >= before
        else:
            budget.halve(lost)
            assert budget.tokens <= max(1, lost // 2)
        assert 1 <= budget.tokens <= most


@pytest.mark.parametrize("most", [1, 7, 512, 100_000])
def test_it_is_whole_again_after_as_many_steps_as_stated(most: int) -> None:
    budget = TokenBudget(most)
    for _ in range(MAX_LOSSES_IN_A_ROW):
        assert budget.halve(budget.tokens)
    assert budget.tokens <= max(1, most // 2**MAX_LOSSES_IN_A_ROW + 1)
    for _ in range(RECOVERY_STEPS):
        budget.computed()
    assert budget.tokens == most


def test_losing_without_end_is_told_and_a_step_that_was_computed_begins_anew() -> None:
    budget = TokenBudget(512)
    assert [budget.halve(512) for _ in range(MAX_LOSSES_IN_A_ROW + 1)] == [True] * MAX_LOSSES_IN_A_ROW + [False]
    budget.computed()
    assert budget.halve(1)


def test_the_whole_can_be_tried_again_where_nothing_fits_the_rest() -> None:
    budget = TokenBudget(512)
    assert not budget.restore()
    budget.halve(512)
    assert budget.restore() and budget.tokens == 512
