from typing import Any

import pytest
from gateway.api.prompt_form import LOOKED_AT, MOST_MESSAGES, form_of
from hypothesis import given
from hypothesis import strategies as st

SYSTEM = {"role": "system", "content": "You sum up what you are given."}


def conversation(text: str, *before: dict[str, Any]) -> list[dict[str, Any]]:
    return [*before, {"role": "user", "content": text}]


def shared(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> int:
    return len(set(form_of(one)) & set(form_of(other)))


def test_conversations_that_begin_alike_under_one_instruction_are_of_one_form() -> None:
    one, other = (conversation(f"Sum up {topic} for me", SYSTEM) for topic in ("whales", "stars."))
    assert form_of(one) == form_of(other)
    assert shared(one, conversation("Sum up whales for me")) == len(form_of(one)) - 2, "no instruction, other roles"
    assert shared(one, conversation("Translate into French", SYSTEM)) < len(form_of(one))
    assert form_of([]) == ()


def test_turns_count_up_to_a_number() -> None:
    turns = [conversation("and then", *[{"role": "assistant", "content": "so"}] * n) for n in range(MOST_MESSAGES + 2)]
    assert form_of(turns[1]) != form_of(turns[2])
    assert form_of(turns[MOST_MESSAGES]) == form_of(turns[MOST_MESSAGES + 1])


def test_only_the_beginning_of_an_instruction_is_looked_at() -> None:
    one, other = ({"role": "system", "content": "x" * LOOKED_AT + more} for more in ("a", "b"))
    assert form_of([one, *conversation("go on")]) == form_of([other, *conversation("go on")])


@given(st.lists(st.fixed_dictionaries({}, optional={"role": st.text(), "content": st.none() | st.text()})))
def test_any_conversation_has_a_form_of_few_small_numbers(messages: list[dict[str, Any]]) -> None:
    form = form_of(messages)
    assert len(form) <= 5 and all(0 <= number < 2**32 for number in form)


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "parts"}]])
def test_what_is_no_text_counts_as_none(content: object) -> None:
    assert form_of([{"role": "user", "content": content}]) == form_of([{"role": "user", "content": ""}])
