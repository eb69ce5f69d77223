from itertools import takewhile
from random import Random
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.replica.digests import BLOCK_BYTES, MAX_BLOCKS, beginnings, prompt_bytes

SECRET = bytes(32)
texts = st.builds(lambda seed, size: Random(seed).randbytes(size), st.integers(0, 9), st.integers(0, 5 * BLOCK_BYTES))


@given(texts, texts, texts)
def test_digests_are_common_exactly_as_far_as_whole_blocks_are(common: bytes, one: bytes, other: bytes) -> None:
    first, second = beginnings(common + one, "a", SECRET), beginnings(common + other, "a", SECRET)
    pairs = zip(common + one, common + other, strict=False)
    same = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]) // BLOCK_BYTES
    agree = [left == right for left, right in zip(first, second, strict=False)]
    assert agree[:same] == [True] * min(same, len(agree))
    assert not any(agree[same:])


def test_they_tell_nothing_to_another_scope_or_without_the_secret() -> None:
    text = Random(1).randbytes(4 * BLOCK_BYTES)
    known = {*beginnings(text, "a", SECRET)}
    assert len(known) == 4
    assert not known & {*beginnings(text, "b", SECRET)}
    assert not known & {*beginnings(text, "a", b"another" * 5)}


def test_a_long_prompt_goes_by_its_first_part() -> None:
    assert len(beginnings(bytes(BLOCK_BYTES * (MAX_BLOCKS + 9)), "a", SECRET)) == MAX_BLOCKS


def test_a_conversation_that_goes_on_begins_as_it_began() -> None:
    turns: list[dict[str, Any]] = [{"role": "system", "content": 'say "messages"'}, {"role": "user", "content": "é"}]
    before = orjson.dumps({"model": "a", "messages": turns, "stream": True})
    turns.append({"role": "assistant", "content": "y"})
    after = orjson.dumps({"model": "another", "seed": 1, "messages": turns})
    common = prompt_bytes(before).removesuffix(b'],"stream":true}')
    assert common.startswith(b'"messages":[{')
    assert common.endswith('"é"}'.encode())
    assert prompt_bytes(after).startswith(common)


def test_every_body_has_a_text_or_none() -> None:
    assert prompt_bytes(b'{"prompt": "a"}') == b'"prompt": "a"}'
    assert prompt_bytes(b'{"model": "a \\"messages\\" b", "prompt": 1}') == b'"prompt": 1}'
    assert prompt_bytes(b'{"input": "a", "model": "m"}') == b'"input": "a", "model": "m"}'
    assert prompt_bytes(b'"messages"') == prompt_bytes(b"") == prompt_bytes(b"{") == b""
