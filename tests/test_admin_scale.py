"""What the admin page and its API take at scale is measured by a script, which is run here with few tenants."""

import pytest

from scripts.admin_scale import PATHS, ROWS, WIDTHS, measure
from tests.end_to_end.page.browser import find_chromium, running_chromium


def test_each_path_of_the_api_answers_the_scripts_tenants() -> None:
    found = measure(10, 100, 2, 1, None, warm=True)
    assert found["answers_s"].keys() > {*PATHS}
    assert {f"/admin/v1/{path}" for path in PATHS} < found["longest_hold_cpu_ms"].keys()
    budgets = 10 + 50 + 1  # of tenants, of teams and of a key
    assert found["lists"] == {"keys": 100 + 1, "usage?contains=tenant": 10, "budgets": budgets}, "one key is the demo's"


@pytest.mark.nightly
def test_each_view_shows_the_scripts_tenants_whole() -> None:
    binary = find_chromium()
    if binary is None:
        pytest.skip("the page is tested in Chromium, and there is none: apt-get install chromium")
    with running_chromium(binary) as chromium:
        views = measure(10, 100, 2, 1, chromium, warm=True)["views"]
    assert [(one["view"], one["cut"]) for one in views] == [(view, []) for _ in WIDTHS for view in ROWS]
