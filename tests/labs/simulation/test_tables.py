from pathlib import Path

import pytest

from labs.simulation.errors import OptionError, TraceError
from labs.simulation.tables import parse_columns
from labs.simulation.traces import read_trace, read_traffic
from tests.labs.simulation.runs import write


@pytest.mark.parametrize(
    "header",
    ["arrived_at,num_prefill_tokens,num_decode_tokens", "timestamp,input_tokens,output_tokens"],
    ids=["vidur", "servegen"],
)
def test_a_known_layout_is_recognised_by_its_header(tmp_path: Path, header: str) -> None:
    first, second = read_trace(write(tmp_path / "t.csv", header, "10.5,300,20", "12,40,5"))
    assert (first.time, first.prompt_tokens, first.output_tokens) == (0.0, 300, 20)
    assert (second.time, second.prompt_tokens, second.output_tokens) == (1.5, 40, 5)


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        ("time,prompt,output,tenant", ("10.5,300,20,ada", "12,40,5,bob")),
        ("milliseconds,prompt,output,tenant", ("10500,300,20,ada", "12000,40,5,bob")),
        ("tenant, output, time , prompt", ("ada,20,10.5,300", "bob,5,12,40")),
        ("time,milliseconds,prompt,output,tenant", ("10.5,7,300,20,ada", "12,7,40,5,bob")),
        ("time,prompt,output,tenant", ("2023-11-14 22:13:20.5,300,20,ada", "2023-11-14 22:13:22,40,5,bob")),
    ],
)
def test_a_table_may_have_the_names_of_fields_for_its_header(
    tmp_path: Path, header: str, rows: tuple[str, str]
) -> None:
    first, second = read_trace(write(tmp_path / "t.csv", header, *rows))
    assert (first.time, first.prompt_tokens, first.output_tokens, first.tenant) == (0.0, 300, 20, "ada")
    assert (second.time, second.prompt_tokens, second.output_tokens, second.tenant) == (1.5, 40, 5, "bob")


def test_given_columns_precede_columns_named_like_their_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "time,prompt,output,computed", "1,300,20,7")
    read = read_traffic(path, columns=parse_columns("prompt=computed"))
    assert (read.arrivals[0].prompt_tokens, read.facts.unread) == (7, ("prompt",))
    swapped = read_traffic(path, columns=parse_columns("prompt=output,output=prompt"))
    assert (swapped.arrivals[0].prompt_tokens, swapped.arrivals[0].output_tokens) == (20, 300)


@pytest.mark.parametrize("header", ["time,prompt", "prompt,output", "Time,Prompt,Output", "time,prompt,tokens"])
def test_a_table_that_lacks_a_field_is_told_which_headers_are_known(tmp_path: Path, header: str) -> None:
    with pytest.raises(TraceError, match=r"no known layout .*; time, prompt, output; milliseconds, prompt, output\)"):
        read_trace(write(tmp_path / "t.csv", header, "1,2,3"))


def test_columns_say_what_any_table_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "Request tokens,when,Response tokens,user", "300,2000,20,ada", "40,500,5,bob")
    columns = parse_columns("milliseconds=when,prompt=Request tokens,output=Response tokens,tenant=user")
    first, second = read_traffic(path, columns=columns).arrivals
    assert (first.time, first.prompt_tokens, first.tenant) == (0.0, 40, "bob")
    assert (second.time, second.prompt_tokens, second.tenant) == (1.5, 300, "ada")


def test_columns_named_like_a_field_are_read_beside_a_layout(tmp_path: Path) -> None:
    names = "tenant,class,deadline,done_within,max_tokens,service_tier,session"
    path = write(
        tmp_path / "t.csv",
        f"TIMESTAMP,ContextTokens,GeneratedTokens,{names}",
        "2023-11-16 18:15:46,300,20,ada,2,1.5,60,512,flex,chat-7",
        "2023-11-16 18:15:47,300,20,,,,,,,chat-7",
    )
    first, second = read_trace(path)
    assert (first.tenant, first.priority_class, first.asked_class) == ("ada", 2, 2)
    assert (first.deadline, first.done_within, first.max_tokens, first.service_tier) == (1.5, 60.0, 512, "flex")
    assert (second.tenant, second.priority_class, second.asked_class, second.max_tokens) == ("", 0, None, 0)
    assert (second.deadline, second.done_within, second.service_tier) == (None, None, None)
    assert first.session == second.session


def test_a_given_column_takes_the_place_of_the_layouts(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens,Computed"
    path = write(tmp_path / "t.csv", header, "2023-11-16 18:15:46,300,20,7")
    read = read_traffic(path, columns=parse_columns("prompt=Computed"))
    assert read.arrivals[0].prompt_tokens == 7
    assert read.facts.unread == ("ContextTokens",)


def test_the_time_of_a_table_has_a_calendar_where_it_is_a_date_or_unix_seconds(tmp_path: Path) -> None:
    header = "timestamp,input_tokens,output_tokens"
    assert read_traffic(write(tmp_path / "a.csv", header, "1700000000.5,3,2")).facts.began == 1700000000.5
    assert read_traffic(write(tmp_path / "b.csv", header, "2023-11-14 22:13:20,3,2")).facts.began == 1700000000
    assert read_traffic(write(tmp_path / "c.csv", header, "17.5,3,2")).facts.began is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("promt=x", "there is no field promt: did you mean prompt?"),
        ("prompt", "write FIELD=COLUMN"),
        ("prompt=a,output=a", "a is given twice"),
        ("time=a,milliseconds=b", "not both"),
    ],
)
def test_columns_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match="--columns") as refused:
        parse_columns(text)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("columns", "message"),
    [("tenant=usr", "no such column: did you mean user?"), ("time=when", "is of no known layout")],
)
def test_columns_that_do_not_fit_the_table_are_refused(tmp_path: Path, columns: str, message: str) -> None:
    path = write(tmp_path / "t.csv", "when,user,in,out", "1,ada,3,2")
    with pytest.raises((OptionError, TraceError)) as refused:
        read_traffic(path, columns=parse_columns(columns))
    assert message in str(refused.value)


def test_columns_of_what_is_no_table_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", '{"timestamp": 0, "input_length": 3, "output_length": 2}')
    with pytest.raises(OptionError, match="is no table: its format is mooncake"):
        read_traffic(path, columns=parse_columns("tenant=user"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("nan,3,2,1,", "line 2: arrived_at must be YYYY-MM-DD"),
        ("1,3,2,-4,", "line 2: deadline must be a number of seconds above 0"),
        ("1,3.5,2,,", "line 2: num_prefill_tokens must be an integer"),
        ("1,3,2,,17", "line 2: class must be at most 16, got 17: number the classes from 0"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, row: str, message: str) -> None:
    path = write(tmp_path / "t.csv", "arrived_at,num_prefill_tokens,num_decode_tokens,deadline,class", row)
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    assert message in str(refused.value)


def test_a_header_that_names_a_column_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "arrived_at,num_prefill_tokens,num_prefill_tokens,num_decode_tokens", "1,3,4,2")
    with pytest.raises(TraceError, match="has num_prefill_tokens twice"):
        read_trace(path)
