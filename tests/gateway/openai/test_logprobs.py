"""What is told of tokens: OpenAI's and vLLM's formats, to the member."""

from math import inf

import pytest

from backend.scheduler.batch import TokenLogprobs
from backend.text.tokenizer import Tokenizer
from gateway.openai.logprobs import Spelling, ToldToken, chat_logprobs, completion_logprobs, prompt_logprobs
from tests.backend import tiny_tokenizers as tiny

TOKENIZER = Tokenizer(tiny.byte_level_bpe())
SPELLING = Spelling(TOKENIZER)
(THE,) = TOKENIZER.encode_text("the", add_special_tokens=False)[:1]
FIRST, SECOND = TOKENIZER.encode_text("日", add_special_tokens=False)[:2]  # parts of a character


def spelled(token_id: int) -> str:
    return TOKENIZER.decode([token_id])


def told(token_id: int, offset: int = 0, logprob: float = -0.5) -> ToldToken:
    return ToldToken(token_id, offset, TokenLogprobs(logprob, 3, [FIRST, SECOND], [-0.25, -inf]))


def test_of_a_chat_each_token_has_its_bytes_and_the_most_likely_in_its_place() -> None:
    (entry,) = chat_logprobs([told(THE)], SPELLING, 2)["content"]
    first, second = (list(TOKENIZER.token_bytes(False)[one]) for one in (FIRST, SECOND))  # type: ignore[index]
    assert entry == {
        "token": spelled(THE), "logprob": -0.5, "bytes": list(spelled(THE).encode()),
        "top_logprobs": [
            {"token": "".join(f"\\x{byte:02x}" for byte in first), "logprob": -0.25, "bytes": first},
            {"token": "".join(f"\\x{byte:02x}" for byte in second), "logprob": -9999.0, "bytes": second},
        ],
    }  # fmt: skip
    assert chat_logprobs([told(THE)], SPELLING, 0)["content"][0]["top_logprobs"] == []
    assert chat_logprobs([], SPELLING, 2) == {"content": []}


def test_of_a_completion_the_token_itself_is_among_the_most_likely() -> None:
    part = "bytes:" + "".join(f"\\x{byte:02x}" for byte in SPELLING.data(FIRST))
    assert completion_logprobs([told(THE, 7)], SPELLING, 1) == {
        "text_offset": [7],
        "token_logprobs": [-0.5],
        "tokens": [spelled(THE)],
        "top_logprobs": [{part: -0.25, spelled(THE): -0.5}],
    }
    assert completion_logprobs([told(THE)], SPELLING, 0)["top_logprobs"] == [{spelled(THE): -0.5}]
    first = completion_logprobs([ToldToken(THE, 0, None)], SPELLING, 5)
    assert (first["token_logprobs"], first["top_logprobs"], first["tokens"]) == ([None], [None], [spelled(THE)])


def test_the_most_likely_of_tokens_that_are_spelled_alike_counts() -> None:
    same = ToldToken(THE, 0, TokenLogprobs(-2.0, 2, [THE], [-1.0]))
    assert completion_logprobs([same], SPELLING, 1)["top_logprobs"] == [{spelled(THE): -1.0}]


def test_of_a_prompt_tokens_are_told_by_id_with_their_ranks() -> None:
    found = prompt_logprobs([ToldToken(5, 0, None), told(THE, logprob=-inf)], SPELLING, 1)
    assert found["prompt_logprobs"] == [
        None,
        {
            str(THE): {"logprob": -9999.0, "rank": 3, "decoded_token": spelled(THE)},
            str(FIRST): {"logprob": -0.25, "rank": 1, "decoded_token": SPELLING.in_chat(FIRST)},
        },
    ]


@pytest.mark.parametrize("core", [tiny.byte_level_bpe(), tiny.byte_fallback_bpe(), tiny.metaspace_unigram()])
def test_every_token_has_a_spelling_and_an_id(core: object) -> None:
    tokenizer = Tokenizer(core)  # type: ignore[arg-type]
    plain, ids = Spelling(tokenizer), Spelling(tokenizer, as_ids=True)
    for token_id in range(tokenizer.vocab_size):
        assert ids.in_chat(token_id) == ids.in_completion(token_id) == f"token_id:{token_id}"
        text, data = plain.in_chat(token_id), plain.data(token_id)
        assert plain.in_completion(token_id) == (text if text.encode() == data else "bytes:" + _escaped(data))


def _escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)
