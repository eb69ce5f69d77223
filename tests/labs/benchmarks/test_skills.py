from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labs.benchmarks.skills import DAYS, SKILLS, Example, fresh_prompts, is_held_out, training_example
from labs.benchmarks.small_talk import small_talk
from labs.benchmarks.stories import HEROES, MAX_SENTENCES, is_story, tell_story
from labs.benchmarks.words import UNSEEN_WORDS, WORDS, make_word

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


@given(generated)
def test_phrasings_are_filled_in_completely(example: Example) -> None:
    assert not set("{}") & set(example.prompt + example.answer)


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


@pytest.mark.parametrize("skill", [*SKILLS, "repeat_unseen"])
def test_every_skill_alone_has_200_fresh_prompts(skill: str) -> None:
    assert {example.skill for example in fresh_prompts(200, seed=1, skills=(skill,))} == {skill}


def test_answers_differ_widely_in_length() -> None:
    lengths = [len(example.answer) for example in fresh_prompts(900, seed=1)]
    assert min(lengths) <= 9
    assert max(lengths) >= 1000


@given(seeds)
def test_counting_moves_by_one_from_the_first_to_the_last_number(seed: int) -> None:
    for skill, step in (("count_up", 1), ("count_down", -1)):
        example = SKILLS[skill](Random(seed))
        numbers = [int(number) for number in example.answer.split(", ")]
        assert (numbers[0], numbers[-1]) == example.arguments
        assert {after - before for before, after in pairwise(numbers)} <= {step}


@given(seeds)
def test_days_follow_each_other(seed: int) -> None:
    named = SKILLS["days"](Random(seed)).answer.split(", ")
    start = DAYS.index(named[0])
    assert named == [DAYS[(start + offset) % 7] for offset in range(len(named))]


@given(seeds)
def test_sums_are_arithmetically_true(seed: int) -> None:
    left, right = SKILLS["add"](Random(seed)).answer.split(" = ")
    assert sum(map(int, left.split(" + "))) == int(right)


@given(st.sampled_from(HEROES), st.integers(1, MAX_SENTENCES), seeds)
def test_a_story_has_the_sentences_asked_for(hero: str, num_sentences: int, seed: int) -> None:
    text = tell_story(Random(seed), hero, num_sentences)
    assert text.count(".") == num_sentences
    assert is_story(text, hero, num_sentences)


@pytest.mark.parametrize(
    "text",
    [
        "Long ago a small cat lived near the river.",
        "Long ago a small dog lived near the river. In the end the dog went home and was happy.",
        "Long ago a small cat lived near the zeppelin. In the end the cat went home and was happy.",
        "Long ago a small cat lived near the river. In the end the cat went home and was",
        "",
    ],
    ids=["too short", "another hero", "unknown word", "unfinished", "empty"],
)
def test_a_text_of_another_shape_is_no_story_of_two_sentences_about_a_cat(text: str) -> None:
    assert not is_story(text, "cat", 2)


@given(seeds)
def test_a_made_word_is_never_one_kept_for_measuring(seed: int) -> None:
    assert make_word(Random(seed)) not in UNSEEN_WORDS


def test_words_kept_for_measuring_are_not_trained() -> None:
    assert not set(UNSEEN_WORDS) & set(WORDS)


@given(seeds)
def test_small_talk_has_a_prompt_and_a_whole_sentence_for_an_answer(seed: int) -> None:
    prompt, answer = small_talk(Random(seed))
    assert prompt
    assert "{" not in prompt
    assert answer[-1] in ".!"


def test_a_right_answer_is_compared_exactly() -> None:
    example = Example("count_up", (1, 3), "Count to 3.", "1, 2, 3")
    assert not example.is_right("1, 2, 3.", ended=True)
    assert not example.is_right(" 1, 2, 3", ended=True)
