from itertools import takewhile
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fleet.prompt_digests import BLOCK, MAX_BLOCKS, beginnings, prompt_text
from gateway.tenants.fleet_secret import fleet_secret

SECRET = fleet_secret(bytes(32))
texts = st.builds(lambda seed, size: Random(seed).randbytes(size), st.integers(0, 9), st.integers(0, 5 * BLOCK))


@given(texts, texts, texts)
def test_digests_are_common_exactly_as_far_as_whole_blocks_are(common: bytes, one: bytes, other: bytes) -> None:
    first, second = beginnings(common + one, "a", SECRET), beginnings(common + other, "a", SECRET)
    pairs = zip(common + one, common + other, strict=False)
    same = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]) // BLOCK
    agree = [left == right for left, right in zip(first, second, strict=False)]
    assert agree[:same] == [True] * min(same, len(agree))
    assert not any(agree[same:])


def test_they_tell_nothing_to_another_scope_or_without_the_secret() -> None:
    text = Random(1).randbytes(4 * BLOCK)
    known = {*beginnings(text, "a", SECRET)}
    assert len(known) == 4
    assert not known & {*beginnings(text, "b", SECRET)}
    assert not known & {*beginnings(text, "a", fleet_secret(b"another" * 5))}


def test_a_long_prompt_goes_by_its_first_part() -> None:
    assert len(beginnings(bytes(BLOCK * (MAX_BLOCKS + 9)), "a", SECRET)) == MAX_BLOCKS


def test_a_conversation_that_goes_on_begins_as_it_began() -> None:
    turns: list[dict[str, Any]] = [{"role": "system", "content": "x" * 2000}, {"role": "user", "content": "y" * 2000}]
    before = prompt_text({"messages": turns, "tools": [{"type": "function"}]})
    turns.append({"role": "assistant", "content": [{"type": "text", "text": "é"}], "tool_calls": []})
    assert prompt_text({"messages": turns, "tools": [{"type": "function"}]}).startswith(before)


def test_whatever_comes_has_some_text() -> None:
    assert prompt_text({"prompt": "é"}) == "é".encode()
    assert prompt_text({"prompt": [1, 2]}) == b"[1,2]"
    assert prompt_text({}) == b""
    assert prompt_text({"messages": ["?", {"role": 3}]}) == b"\x003\x00null\x00null"
