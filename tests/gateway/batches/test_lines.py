"""Lines are found however a file is cut into chunks, and none of any bytes is more than a typed problem."""

from codecs import BOM_UTF8
from types import SimpleNamespace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batches.lines import MAX_PROBLEMS, PAUSE_SECONDS, SLICE_SECONDS, Checked, check_lines, paced, split_lines
from tests.examples import examples


@settings(max_examples=examples(200))
@given(st.binary(max_size=200).map(lambda text: text.replace(b"\x0b", b"\n")), st.integers(1, 50), st.integers(5, 40))
def test_lines_do_not_depend_on_chunks(text: bytes, size: int, most: int) -> None:
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    expected = [one if len(one) <= most else None for one in text.split(b"\n") if one.strip() or len(one) > most]
    assert list(split_lines(chunks, most)) == expected


def checked_text(text: bytes, endpoint: str, most_lines: int, most_bytes: int) -> Checked:
    lines = split_lines([text], most_bytes)
    return check_lines(lines, endpoint, most_lines=most_lines, most_bytes=most_bytes, models=frozenset("m"))


@settings(max_examples=examples(200))
@given(
    st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([b"{}", b"[[", b'{"custom_id":"\\ud800"}'])), max_size=5)
)
def test_any_bytes_are_told_by_line_and_never_raise(lines: list[bytes]) -> None:
    checked = checked_text(b"\n".join(lines), "/v1/completions", most_lines=9, most_bytes=50)
    assert checked.problems and all(one["code"] and one["message"] for one in checked.problems)


def test_work_on_many_lines_leaves_most_of_the_time_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, 0.0

    def sleep(seconds: float) -> None:
        nonlocal now, slept
        now, slept = now + seconds, slept + seconds

    monkeypatch.setattr("gateway.batches.lines.time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    for _ in paced(range(10_000)):
        now += SLICE_SECONDS / 40
    assert slept == pytest.approx(10_000 / 40 * PAUSE_SECONDS, rel=0.1)


def test_problems_are_bounded_and_lines_too() -> None:
    def checked(count: int, most: int) -> list[str]:
        line = orjson.dumps({"custom_id": "a", "method": "GET"}) + b"\n"
        found = checked_text(line * count, "/v1/completions", most_lines=most, most_bytes=500)
        return [one["code"] for one in found.problems]

    assert checked(1000, 5000) == ["invalid_method"] * MAX_PROBLEMS
    assert checked(4, 3)[-1] == "too_many_lines"


def test_what_is_told_of_a_line_is_short_however_long_it_is() -> None:
    long = "x" * 100_000
    fields = {"custom_id": "a", "method": "POST", "url": "/v1/x", "body": {"model": "m"}}
    lines = [fields | {name: long} for name in fields] + [fields | {long: 1}, fields | {"body": {"model": long}}]
    text = b"\n".join(map(orjson.dumps, lines))
    checked = checked_text(text, "/v1/x", most_lines=99, most_bytes=2**20)
    assert len(checked.problems) == len(lines)
    assert all(len(orjson.dumps(problem)) < 1000 for problem in checked.problems)


def test_a_file_may_begin_with_a_byte_order_mark() -> None:
    """Editors and shells of Windows write one."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m"}}
    text = BOM_UTF8 + orjson.dumps(line) + b"\r\n"
    assert checked_text(text, "/v1/completions", most_lines=9, most_bytes=500) == Checked(1, "m", [])
    checked = checked_text(text + text, "/v1/completions", most_lines=9, most_bytes=500)
    assert checked.problems[0]["line"] == 2 and checked.problems[0]["message"].startswith("The line is not valid JSON")
