"""The Grafana dashboard: complete, and asking for metrics that there are."""

import re
from typing import Any

import pytest

from tests.deploy.dashboard import ANNOTATIONS, DASHBOARD, PANELS, QUERIES
from tests.deploy.documented import OTHER_LABELS, all_documented, series_of, strangers, unit_of

UNITS = {  # Grafana's, by what a query yields
    "seconds": {"s"},
    "bytes": {"bytes"},
    "share": {"percentunit", "none"},
    "seconds/s": {"percentunit"},
    "byte-seconds/s": {"bytes"},
    "requests/s": {"reqps", "ops"},
}


def test_ids_are_unique_and_panels_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert all(0 <= x < 24 for x, _ in cells)


def test_every_panel_has_a_unit_a_description_and_a_query() -> None:
    for panel in PANELS:
        assert panel["title"] and len(panel["description"]) > 10, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"] and all(target["expr"] for target in panel["targets"]), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references), panel["title"]


@pytest.mark.parametrize("query", sorted(set(QUERIES)))
def test_a_query_asks_for_what_is_documented(query: str) -> None:
    assert series_of(query)
    assert not strangers(query)


def test_annotations_and_variables_ask_for_what_is_documented() -> None:
    definitions = [one["definition"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    chosen = [match.groups() for one in definitions if (match := re.fullmatch(r"label_values\((.+), (\w+)\)", one))]
    assert len(chosen) == len(definitions) == 2
    assert {label for _, label in chosen} <= OTHER_LABELS
    for query in (*ANNOTATIONS, *(series for series, _ in chosen)):
        assert series_of(query)
        assert not strangers(query)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panels_unit_is_that_of_what_it_shows(panel: dict[str, Any]) -> None:
    for yielded in (unit_of(target["expr"]) for target in panel["targets"]):
        counts = {"ops", "short"} if yielded.endswith("/s") else {"none", "short"}
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS.get(yielded, counts)


def test_every_metric_of_ours_is_shown_somewhere() -> None:
    shown = set().union(*map(series_of, QUERIES))
    ours = [metric for metric in all_documented() if metric.name.startswith("sluice_")]
    assert not [metric.name for metric in ours if not metric.series & shown]


def test_the_variables_exist_that_queries_use() -> None:
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "job", "instance"}
    assert DASHBOARD["uid"] == "sluice"
