import pytest

from labs.simulation.metrics import format_duration, format_number, format_percent


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_duration(0.0), "0 s"),
        (format_duration(0.0123), "12.3 ms"),
        (format_duration(0.45), "450 ms"),
        (format_duration(1.234), "1.23 s"),
        (format_duration(12345.6), "12,346 s"),
        (format_number(1234567.8), "1,234,568"),
        (format_number(2.5), "2.5"),
        (format_percent(0.1234), "12.3 %"),
    ],
)
def test_figures_read_as_people_write_them(shown: str, expected: str) -> None:
    assert shown == expected
