import pytest

from backend.errors import InvalidRequest
from backend.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASED,
    MAX_STOP_CHARS,
    MAX_STOPS,
    SamplingParams,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("param", "values"),
    {
        "temperature": (0, 0.7, 2, 2.0),
        "top_p": (0, 0.0, 1e-9, 0.5, 1),
        "top_k": (-1, 0, 1, 10**9),
        "min_p": (0, 0.1, 1.0),
        "presence_penalty": (-2, 0.5, 2),
        "frequency_penalty": (-2, 0.5, 2),
        "repetition_penalty": (0.01, 1, 1.3, 100),
        "seed": (None, 0, -(2**63), 2**63 - 1),
        "max_tokens": (None, 1, 10**9),
        "min_tokens": (0, 5),
        "stop": ((), ("a",), ("x" * MAX_STOP_CHARS,) * MAX_STOPS),
        "stop_token_ids": ((), (0, 5)),
        "logit_bias": ((), ((0, -100), (5, 100.0)), tuple((i, 1.0) for i in range(MAX_BIASED))),
        "allowed_token_ids": (None, (3,), (0, 2**31 - 1)),
        "bad_words": ((), ((1,), (1, 2)), ((1,) * MAX_BAD_WORD_TOKENS,) * MAX_BAD_WORDS),
        "logprobs": (None, 0, 20),
        "prompt_logprobs": (None, 0, 20),
    }.items(),
)
def test_values_in_range_are_taken(param: str, values: tuple[object, ...]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{param: value}), param) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("param", "values"),
    {
        "temperature": (-0.1, 2.1, NAN, INF, 10**400, "hot", None, True),
        "top_p": (-1, -1e-9, 1.1, NAN, INF),
        "top_k": (-2, 1.5, NAN, 2**64, False),
        "min_p": (-0.1, 1.1, NAN),
        "presence_penalty": (-2.1, 2.1, NAN, -INF),
        "frequency_penalty": (-2.1, 2.1, NAN, -INF),
        "repetition_penalty": (0, -1, 1e-9, 1e9, NAN, INF),
        "seed": (2**63, -(2**63) - 1, 10**5000, 1.5, "1"),
        "max_tokens": (0, -1, 1.5, 10**5000),
        "min_tokens": (-1, None),
        "stop": ("text", ["a"], ("",), (1,), ("x" * (MAX_STOP_CHARS + 1),), ("a",) * (MAX_STOPS + 1)),
        "logit_bias": (((-1, 1),), ((0, 101),), ((0, NAN),), tuple((i, 1.0) for i in range(MAX_BIASED + 1))),
        "allowed_token_ids": ((), (-1,), (0, 2**31), (5, -1, 7), (5, 2**64, 7)),
        "bad_words": (((),), ((1,) * (MAX_BAD_WORD_TOKENS + 1),), ((1,),) * (MAX_BAD_WORDS + 1)),
        "logprobs": (-1, 21, 1.5),
        "prompt_logprobs": (-1, 21, True),
        "stop_token_ids": ([1], (-1,), (2**31,), ("1",), (1,) * (MAX_STOPS + 1)),
    }.items(),
)
def test_values_out_of_range_are_refused_by_name(param: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=param) as refused:
            SamplingParams(**{param: value})  # type: ignore[arg-type]
        assert refused.value.param == param
        assert len(str(refused.value)) < 200


def test_a_refusal_names_the_value_and_the_range() -> None:
    with pytest.raises(InvalidRequest, match=r"^temperature must be between 0 and 2, got 2\.5$"):
        SamplingParams(temperature=2.5)


def test_no_mass_at_all_is_the_likeliest_token() -> None:
    assert SamplingParams(top_p=0).greedy and SamplingParams(top_p=-0.0, temperature=2).greedy
    assert not SamplingParams(top_p=1e-9).greedy


def test_a_seed_of_minus_one_is_none() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    SamplingParams(max_tokens=5, min_tokens=5)
    with pytest.raises(InvalidRequest, match="min_tokens 6 exceeds max_tokens 5"):
        SamplingParams(max_tokens=5, min_tokens=6)


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=0.01).greedy


def test_neutral_penalties_are_none() -> None:
    assert not SamplingParams().penalised
    assert SamplingParams(presence_penalty=0.1).penalised
    assert SamplingParams(frequency_penalty=-0.1).penalised
    assert SamplingParams(repetition_penalty=1.1).penalised
