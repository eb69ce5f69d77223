import csv
from io import StringIO

from hypothesis import given
from hypothesis import strategies as st

from gateway.table import FORMULA, csv_text, printable, table

CELLS = st.lists(st.tuples(st.text(), st.text()), min_size=1)


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("a", "1", ""), ("long", "100", "x")]
    assert table(("name", "n", ""), rows, frozenset({"n"})) == "name    n\na       1\nlong  100  x\n"


def test_a_wide_character_takes_two_columns_and_a_mark_none() -> None:
    rows = [("東京", "1"), ("Zu\u0308", "22")]
    assert table(("name", "n"), rows, frozenset({"n"})) == "name   n\n東京   1\nZu\u0308    22\n"


@given(CELLS)
def test_a_row_is_one_line_with_any_content(rows: list[tuple[str, str]]) -> None:
    text = table(("one", "two"), rows)
    assert len(text.splitlines()) == len(rows) + 1
    assert text.replace("\n", "").isprintable()


@given(CELLS)
def test_cells_come_back_from_csv_and_none_is_a_formula(rows: list[tuple[str, str]]) -> None:
    read = list(csv.reader(StringIO(csv_text([("one", "two"), *rows]))))[1:]
    assert len(read) == len(rows)
    for cells, back in zip(rows, read, strict=True):
        for cell, read_cell in zip(cells, back, strict=True):
            assert read_cell[:1] not in FORMULA
            assert read_cell.removeprefix("'") == printable(cell).removeprefix("'")
