import json
from pathlib import Path

import pytest

from labs.simulation.contents import Content
from labs.simulation.errors import OptionError, TraceError
from labs.simulation.traces import read_trace, read_traffic
from tests.labs.simulation.runs import write

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_azure_times_keep_seven_decimals_and_start_at_zero(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv", HEADER, "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"
    )
    first, second = read_trace(path)
    assert (first.time, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.time == pytest.approx(4.3145790, abs=1e-6)


def test_azure_times_of_2024_have_a_zone_and_may_have_no_fraction(tmp_path: Path) -> None:
    times = ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01+00:00", "2024-05-10T02:00:02.5+02:00")
    path = write(tmp_path / "t.csv", HEADER, *(f"{time},374,44" for time in times))
    assert [arrival.time for arrival in read_trace(path)] == pytest.approx([0.0, 0.99007, 2.49007], abs=1e-6)


def test_a_table_may_come_from_a_spreadsheet(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = ('"TIMESTAMP","ContextTokens","GeneratedTokens","city"', '"2023-11-16 18:15:46","374","44","Zürich, Ö"')
    path.write_bytes("\r\n".join(rows).encode("utf-8-sig"))
    assert [(arrival.prompt_tokens, arrival.output_tokens) for arrival in read_trace(path)] == [(374, 44)]


def test_mooncake_times_are_milliseconds_and_a_session_shares_its_second_block(tmp_path: Path) -> None:
    entries = [
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]},
        {"timestamp": 3000, "input_length": 900, "output_length": 6, "hash_ids": [0, 7, 8]},
    ]
    first, second = read_trace(write(tmp_path / "t.jsonl", *map(json.dumps, entries)))
    assert second.time == 3.0 and first.session == second.session == 7
    assert (first.content, second.content) == (Content((0, 7), 512, 600), Content((0, 7, 8), 512, 900))


def test_a_trace_without_hashes_says_nothing_of_contents(tmp_path: Path) -> None:
    entry = {"timestamp": 0, "input_length": 600, "output_length": 5}
    path = write(tmp_path / "t.jsonl", *map(json.dumps, (entry, entry | {"hash_ids": ["a"]})))
    traffic = read_traffic(path)
    assert [arrival.content for arrival in traffic.arrivals] == [None, None] and not traffic.facts.has_contents


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((HEADER, "2023-11-16 18:15:46.1,10,0"), "line 2: GeneratedTokens must be an integer of at least 1"),
        ((HEADER, f"2023-11-16 18:15:46.1,{'9' * 5000},5"), "at most 15 digits, got '999"),
        ((HEADER, "2023-11-16 18:15:46.1,10,5", "2023-11-16 18:15:47.1,ten,5"), "line 3: ContextTokens"),
        ((HEADER, "yesterday,10,5"), "line 2: TIMESTAMP must be"),
        ((HEADER, "2023-11-16 18:15:46.1,10"), "line 2: GeneratedTokens must be"),
        (("TIMESTAMP,Tokens", "x,1"), "line 1: the header 'TIMESTAMP, Tokens' is of no known layout"),
        (("2023-11-16 18:15:46.1,374,44",), "374, 44' are values: the first line has the names of the columns"),
        (("",), "line 1: no header is here: is the file empty?"),
        ((HEADER,), "line 1: there are no requests"),
        (('{"timestamp": 0, "input_length": 3, "output_length": 1}', "{oops"), "line 2: not JSON"),
        (("[" * 9, "{}"), "line 1: not an entry of an event log"),
        (('{"timestamp": ' + "[" * 100_000,), "line 1: not JSON"),
        ((f'{{"timestamp": {"9" * 400}, "input_length": 1, "output_length": 1}}',), "line 1: timestamp must be"),
        (('{"timestamp": 0, "input_length": true, "output_length": 1}',), "line 1: input_length must be"),
    ],
)
def test_an_error_names_the_file_the_line_and_the_field(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    path = write(tmp_path / "trace", *lines)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}, ") and message in str(error.value)


def test_a_file_that_cannot_be_opened_or_is_not_text_is_an_error_of_the_option(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing", "binary"):
        with pytest.raises(OptionError, match="--trace"):
            read_trace(tmp_path / name)
