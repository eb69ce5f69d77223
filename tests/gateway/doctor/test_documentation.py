"""docs/diagnosis.md knows every trouble that can be found, and panels that there are."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "diagnosis.md").read_text()


def test_every_finding_has_a_row() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "gateway" / "doctor").glob("*_findings.py"))
    names = set(re.findall(r"return Finding\(\n?\s*f?\"(\w+)", sources))
    assert len(names) > 20
    assert {name for name in names if f"`{name}" not in TEXT} == set()


def test_the_panels_that_are_named_exist() -> None:
    panels = json.loads((ROOT / "deploy" / "grafana" / "sluice.json").read_text())["panels"]
    titles = {panel["title"] for panel in panels}
    assert set(re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", TEXT)) <= titles
    assert set(re.findall(r"^panel '([^']+)'", TEXT, re.MULTILINE)) <= titles
