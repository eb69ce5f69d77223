from random import Random
from unittest.mock import patch

import httpx
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from openai._models import FinalRequestOptions

from labs.bench.retries import retry_delay, should_retry

NUMBERS = st.sampled_from(["", "0", "-1", "3", "0.5", "119", "121", "1e9", "inf", "nan", "soon", "99999999"])
HEADERS = st.dictionaries(st.sampled_from(["retry-after", "retry-after-ms"]), NUMBERS) | st.builds(
    lambda said: {"x-should-retry": said}, st.sampled_from(["true", "false", "TRUE", ""])
)
CLIENT = OpenAI(api_key="sk", base_url="http://localhost", max_retries=5)


@given(status=st.sampled_from([400, 401, 404, 408, 409, 422, 429, 500, 503, 529]), headers=HEADERS)
def test_the_same_responses_are_tried_again_as_by_openais_package(status: int, headers: dict[str, str]) -> None:
    assert should_retry(status, headers) == CLIENT._should_retry(httpx.Response(status, headers=headers))  # type: ignore[arg-type]


@given(attempts=st.integers(1, 5), headers=HEADERS, share=st.floats(0, 1, exclude_max=True))
def test_the_wait_is_the_one_of_openais_package(attempts: int, headers: dict[str, str], share: float) -> None:
    random = Random()
    options = FinalRequestOptions(method="post", url="/")
    with patch.object(random, "random", return_value=share), patch("openai._base_client.random", return_value=share):
        mine = retry_delay(attempts, headers, random)
        theirs = CLIENT._calculate_retry_timeout(5 - (attempts - 1), options, httpx.Headers(headers))  # type: ignore[arg-type]
    assert mine == theirs
