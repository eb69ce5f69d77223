import pytest

from labs.faults.expectations import Expectation, UnknownFigure

FIGURES = {"quiet.light.ttft.p95": 0.1, "loaded.light.ttft.p95": 0.35, "left.held": 0.0, "recovery": None}


@pytest.mark.parametrize(
    ("text", "is_met", "sides"),
    [
        ("loaded.light.ttft.p95 <= 4 * quiet.light.ttft.p95", True, (0.35, pytest.approx(0.4))),
        ("loaded.light.ttft.p95 < 3 * quiet.light.ttft.p95 + 0.01", False, (0.35, pytest.approx(0.31))),
        ("left.held == 0", True, (0.0, 0.0)),
        ("loaded.light.ttft.p95 - quiet.light.ttft.p95 > 0.2", True, (pytest.approx(0.25), 0.2)),
        ("recovery <= 5", False, (None, 5.0)),
        ("1 >= quiet.light.ttft.p95 / left.held", False, (1.0, None)),
    ],
)
def test_a_comparison_of_figures_is_judged(text: str, is_met: bool, sides: tuple[object, object]) -> None:
    found = Expectation(text).judge(FIGURES)
    assert (found.is_met, (found.left, found.right)) == (is_met, sides)
    assert str(found).startswith("met " if is_met else "MISS") and text in str(found)


@pytest.mark.parametrize(
    "text",
    ["", "left.held", "0 <= left.held <= 1", "left.held != 0", "f(left.held) == 0", "a <= 'b'", "a[0] <= 1", "a <"],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as: slow\.light|has more than figures, numbers and"):
        Expectation(text)


def test_an_unknown_figure_is_named_with_those_beside_it() -> None:
    with pytest.raises(UnknownFigure, match=r"no figure quiet\.light\.ttft\.p59; there are quiet\.light\.ttft\.p95"):
        Expectation("quiet.light.ttft.p59 <= 1").judge(FIGURES)
