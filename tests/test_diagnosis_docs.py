"""docs/diagnosis.md knows every trouble that can be found, and panels that there are."""

import re

from tests.deploy.dashboard import PANELS
from tests.deploy.documented import ROOT

TEXT = (ROOT / "docs" / "diagnosis.md").read_text()


def test_every_finding_has_a_row() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "gateway" / "doctor").glob("*_findings.py"))
    names = set(re.findall(r"return Finding\(\n?\s*f?\"(\w+)", sources))
    assert len(names) > 20
    assert {name for name in names if f"`{name}" not in TEXT} == set()


def test_the_panels_that_are_named_exist() -> None:
    titles = {panel["title"] for panel in PANELS}
    table = TEXT.partition("| what is seen | panel |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| [^|]+ \| ([^|]+) \|", table, re.MULTILINE)
    assert len(named) == 8
    assert {title for titles_of_row in named for title in titles_of_row.split("; ")} <= titles
    assert set(re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", TEXT)) <= titles
    assert set(re.findall(r"^panel '([^']+)'", TEXT, re.MULTILINE)) <= titles
