from random import Random

from hypothesis import given
from hypothesis import strategies as st

from labs.benchmarks.skills import SKILLS, Example, fresh_prompts, is_held_out, training_example
from labs.benchmarks.words import UNSEEN_WORDS, WORDS

seeds = st.integers(0, 2**32)
skills = st.sampled_from(sorted(SKILLS))
generated = st.builds(lambda skill, seed: SKILLS[skill](Random(seed)), skills, seeds)


@given(generated)
def test_a_generated_answer_is_right_when_it_ended(example: Example) -> None:
    assert example.is_right(example.answer, ended=True)


@given(generated)
def test_an_answer_that_was_cut_off_is_wrong(example: Example) -> None:
    assert not example.is_right(example.answer, ended=False)


@given(generated)
def test_an_answer_with_a_missing_end_or_an_addition_is_wrong(example: Example) -> None:
    assert not example.is_right(example.answer[:-1], ended=True)
    assert not example.is_right(example.answer + " 1", ended=True)


@given(skills, seeds)
def test_training_never_sees_held_out_arguments(skill: str, seed: int) -> None:
    assert not is_held_out(training_example(skill, Random(seed)))


def test_fresh_prompts_are_held_out_different_and_take_the_skills_in_turn() -> None:
    fresh = fresh_prompts(200, seed=3)
    assert all(map(is_held_out, fresh))
    assert len({example.prompt for example in fresh}) == 200
    assert [example.skill for example in fresh[: len(SKILLS)]] == list(SKILLS)


def test_fresh_prompts_depend_on_nothing_but_their_seed() -> None:
    assert fresh_prompts(50, seed=5) == fresh_prompts(50, seed=5)
    assert fresh_prompts(50, seed=5) != fresh_prompts(50, seed=6)


def test_words_kept_for_measuring_are_not_trained() -> None:
    assert not set(UNSEEN_WORDS) & set(WORDS)
