from hypothesis import given, settings
from hypothesis import strategies as st

from quotas.usage_row import MAX_PART_CHARS, REST, UsageRow, rest_name, row_name, row_of
from tests.examples import examples

TEXT = st.text(max_size=6)
TAGS = st.dictionaries(st.sampled_from(["project", "team"]), TEXT, max_size=2).map(
    lambda tags: tuple(sorted(tags.items()))
)
ROWS = st.builds(UsageRow, st.none() | TEXT.filter(bool), TEXT, TEXT, TEXT, TAGS, st.just(False))


def stored(name: str) -> str:
    return name.partition(" ")[2] if " " in name else name


@given(ROWS)
@settings(max_examples=examples(200))
def test_any_row_is_read_back_from_its_name(row: UsageRow) -> None:
    shortened = any(len(part.encode()) * 3 > MAX_PART_CHARS for part in (row.model, row.user, *map("".join, row.tags)))
    if not shortened:
        assert row_of(stored(row_name(row, 500))) == row
    rest = row_of(rest_name(row_name(row, 500)))
    assert (rest.key, rest.user, rest.tags) == (row.key, "", ())


def test_long_texts_are_cut_and_stay_apart() -> None:
    one, other = (row_of(stored(row_name(UsageRow("k", user="ü" * 400 + end), 500))).user for end in "ab")
    assert one != other
    assert (one[:5], len(one)) == ("ü" * 5, len(other))
    assert len(row_name(UsageRow("k", user="\U0001f600" * 9999, tags=(("project", "%" * 512),)))) < 200


def test_a_name_without_a_model_is_the_row_of_a_key() -> None:
    assert row_of("k1") == UsageRow("k1")
    assert row_of("*") == UsageRow(None)
    assert rest_name("k1") == "k1"
    assert row_of(f"k1|m|batch|{REST}") == UsageRow("k1", "m", "batch", is_rest=True)
    assert row_of(stored(row_name(UsageRow("k1", "m", "batch", user=REST)))).user == REST
