from contextlib import suppress
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.client_deadlines import ClientDeadlines, read_deadlines, read_expected_followup
from gateway.errors import ApiError, BadRequest

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z


def read(stream: bool = False, **headers: str) -> ClientDeadlines:
    return read_deadlines([(n.replace("_", "-").encode(), v.encode()) for n, v in headers.items()], stream, NOW)


def test_without_headers_there_is_no_deadline() -> None:
    assert read(accept="*/*") == ClientDeadlines()


@pytest.mark.parametrize(
    ("header", "value", "expected"),
    [
        ("x_sluice_ttft_ms", "1500", ClientDeadlines(first_token=1.5)),
        ("x_sluice_deadline_ms", "2500", ClientDeadlines(last_token=2.5)),
        ("x_request_timeout_seconds", "2.5", ClientDeadlines(last_token=2.5)),
        ("x_llm_d_slo_ttft_ms", "250", ClientDeadlines(first_token=0.25)),
        ("x_llm_d_slo_tpot_ms", "50", ClientDeadlines(interval=0.05)),
        ("x_stainless_read_timeout", "600", ClientDeadlines(last_token=600)),
        ("x_stainless_read_timeout", "99999999", ClientDeadlines()),
        ("x_sluice_deadline_at", "2027-01-15T08:00:02Z", ClientDeadlines(last_token=2, is_relative=False)),
        ("x_sluice_deadline_at", "2027-01-15T09:00:02+01:00", ClientDeadlines(last_token=2, is_relative=False)),
        ("x_sluice_deadline_at", "1800000002.5", ClientDeadlines(last_token=2.5, is_relative=False)),
        ("x_sluice_deadline_at", "1700000000", ClientDeadlines(last_token=0, is_relative=False)),
    ],
)
def test_each_header_has_its_meaning(header: str, value: str, expected: ClientDeadlines) -> None:
    assert read(**{header: value}) == expected


def test_a_read_timeout_is_of_each_read_of_a_stream() -> None:
    assert read(stream=True, x_stainless_read_timeout="5") == ClientDeadlines(first_token=5, interval=5)


def test_the_tightest_holds() -> None:
    deadlines = read(
        x_sluice_deadline_ms="9000",
        x_request_timeout_seconds="4",
        x_stainless_read_timeout="600",
        x_sluice_deadline_at="2027-01-15T08:01:00Z",
        x_sluice_ttft_ms="1000",
        x_llm_d_slo_ttft_ms="800",
    )
    assert deadlines == ClientDeadlines(first_token=0.8, last_token=4)


@pytest.mark.parametrize("name", ["x_sluice_ttft_ms", "x_request_timeout_seconds", "x_stainless_read_timeout"])
@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "1e3", "soon", "0x10", "1.2.3", "9" * 33, "٣"])
def test_a_malformed_time_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(**{name: value})
    assert (refused.value.status, refused.value.param) == (400, name.replace("_", "-"))


@pytest.mark.parametrize("value", ["", "yesterday", "2027-01-15T08:00:00", "2027-13-15T08:00:00Z", "nan", "1e400"])
def test_a_malformed_moment_is_refused(value: str) -> None:
    with pytest.raises(ApiError, match="x-sluice-deadline-at"):
        read(x_sluice_deadline_at=value)


@given(st.dictionaries(st.sampled_from(["x_sluice_ttft_ms", "x_sluice_deadline_at"]), st.text(max_size=40)))
def test_no_value_does_worse_than_to_be_refused(headers: dict[str, str]) -> None:
    with suppress(BadRequest):
        deadlines = read(**headers)
        assert deadlines.first_token >= 0 and 0 <= deadlines.last_token <= inf


@given(st.binary(max_size=40))
def test_a_client_comes_again_within_an_hour_or_is_refused(value: bytes) -> None:
    with suppress(BadRequest):
        seconds = read_expected_followup([(b"accept", b"*/*"), (b"x-sluice-expect-followup", value)])
        assert seconds is not None and 0 < seconds <= 3600


def test_a_client_that_says_nothing_is_not_expected() -> None:
    assert read_expected_followup([(b"accept", b"*/*")]) is None
    assert read_expected_followup([(b"x-sluice-expect-followup", b"12.5")]) == 12.5


def test_a_header_is_quoted_as_it_was_sent() -> None:
    with pytest.raises(BadRequest, match=r"at most 3600; .*, got 'soon\\né'"):
        read_expected_followup([(b"x-sluice-expect-followup", b"soon\n\xe9")])
