from labs.simulation.page import page
from labs.simulation.report import comparison_table
from tests.labs.simulation.runs import compared

HOSTILE = "<script>alert(1)</script>&\"'$\\frac\x1b[31m"


def test_a_hostile_name_is_text_wherever_it_is_shown() -> None:
    results = compared("fair", "fcfs", tenants=f"{HOSTILE}:1,b:1")
    html = page(results, HOSTILE, HOSTILE)
    assert "<script" not in html and "\x1b" not in html and "\x1b" not in comparison_table(results)


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    html = page(compared("fair", "fcfs"), "title", "facts")
    for sign in ("http", "src=", "url(", "@import", "<link", "<script"):
        assert sign not in html
