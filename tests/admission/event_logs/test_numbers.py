import json

from hypothesis import given
from hypothesis import strategies as st

from admission.event_logs.numbers import checksum, in_seconds, moment

DAYS = 48 * 86_400  # of a clock that counts from the start of the machine: longer ones have no whole nanoseconds


@given(seconds=st.floats(0, DAYS))
def test_a_moment_is_read_as_it_was(seconds: float) -> None:
    assert in_seconds(json.loads(moment(seconds))) == seconds


@given(nanoseconds=st.integers(0, DAYS * 10**9))
def test_a_real_clocks_moment_is_written_in_whole_nanoseconds(nanoseconds: int) -> None:
    assert moment(nanoseconds / 1e9) == str(nanoseconds)


@given(rows=st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 2**20)), min_size=1), other=st.data())
def test_other_slots_or_other_starts_have_another_checksum(rows: list[tuple[int, int]], other: st.DataObject) -> None:
    def of_rows(slots: list[int], starts: list[int]) -> int:
        return checksum(starts, checksum(slots))

    slots, starts = [slot for slot, _ in rows], [start for _, start in rows]
    row = other.draw(st.integers(0, len(rows) - 1))
    moved = [number + (place == row) for place, number in enumerate(starts)]
    elsewhere = [number + (place == row) for place, number in enumerate(slots)]
    assert len({of_rows(slots, starts), of_rows(slots, moved), of_rows(elsewhere, starts)}) == 3
