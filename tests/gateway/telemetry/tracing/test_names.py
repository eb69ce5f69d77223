"""Dashboards, queries and other programs read the names of spans and attributes: docs/tracing.md promises them."""

import ast
import re

from tests.gateway.server_process import ROOT

NAME = r"(?:sluice|gen_ai|http|url|server|db|error)(?:\.[a-z_]+)+"
SOURCES = [*(ROOT / "gateway" / "telemetry" / "tracing").glob("*.py"), ROOT / "fleet" / "tracing.py"]


def test_the_names_in_use_are_the_promised_ones() -> None:
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    used = {text for text in strings if re.fullmatch(NAME, text)}
    promises = (ROOT / "docs" / "tracing.md").read_text()
    assert set(re.findall(rf"`({NAME})`", promises)) <= used
    assert [name for name in sorted(used) if name not in promises] == []
    assert used.isdisjoint({"gen_ai.system", "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"})
