from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.sampling_params import SamplingParams
from gateway.errors import ApiError, BadRequest
from gateway.http.json_body import JsonBody
from gateway.openai.limits import Limits
from gateway.openai.requests import parse_chat_request

LIMITS = Limits(vocab_size=1000, max_model_len=4096)


def sampled(**fields: Any) -> SamplingParams:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return parse_chat_request(JsonBody(orjson.dumps(body)), LIMITS).sampling


@given(st.dictionaries(st.integers(0, 999), st.floats(-100, 100) | st.integers(-100, 100), max_size=300))
def test_biases_are_by_token_id_and_ascend(bias: dict[int, float]) -> None:
    found = sampled(logit_bias={str(token_id): value for token_id, value in bias.items()}).logit_bias
    assert found == tuple(sorted(bias.items()))


@pytest.mark.parametrize(
    "bias",
    [
        {"1000": 1}, {"-1": 1}, {"x": 1}, {"": 1}, {"01": 1}, {"1.0": 1}, {" 1": 1}, {"٣": 1}, {"9" * 5000: 1},
        {"1": 101}, {"1": -100.5}, {"1": "5"}, {"1": None}, {"1": True}, [1], 5, {str(i): 1 for i in range(301)},
    ],
)  # fmt: skip
def test_a_malformed_bias_is_refused_by_name(bias: Any) -> None:
    with pytest.raises(BadRequest) as refusal:
        sampled(logit_bias=bias)
    assert str(refusal.value.param).startswith("logit_bias")


@given(st.lists(st.integers(0, 999), min_size=1, max_size=1000))
def test_allowed_tokens_ascend_and_are_there_once(allowed: list[int]) -> None:
    assert sampled(allowed_token_ids=allowed).allowed_token_ids == tuple(sorted(set(allowed)))


@pytest.mark.parametrize("allowed", [[], [1000], [-1], ["5"], [1.0], [True], "5", 5, {}, [1] * 1001])
def test_a_malformed_list_of_allowed_tokens_is_refused_by_name(allowed: Any) -> None:
    with pytest.raises(ApiError) as refusal:
        sampled(allowed_token_ids=allowed)
    assert refusal.value.param == "allowed_token_ids" and refusal.value.status == 400


def test_rare_fields_leave_the_other_parameters_unchanged() -> None:
    assert sampled(logit_bias={}, allowed_token_ids=None) is sampled()
    assert sampled(logit_bias={"5": 1}, temperature=0.5) == SamplingParams(temperature=0.5, logit_bias=((5, 1),))
