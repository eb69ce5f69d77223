"""docs/policies.md is true."""

import re
from pathlib import Path

import pytest

from quotas.policy.schema import fields_of
from tests.quotas.policies import parsed, problems_of

DOCS = (Path(__file__).parents[1] / "docs" / "policies.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)


@pytest.mark.parametrize("text", BLOCKS)
def test_every_block_of_yaml_is_a_policy(text: str) -> None:
    assert parsed(text).tenants


def test_the_mistakes_that_are_shown_are_what_is_said_of_them() -> None:
    shown = re.findall(r"^policies/acme\.yaml(:.*)$", DOCS, re.MULTILINE)
    text = "# acme\ntenants:\n  acme:\n    limits: {tokens: 100k/mn}\n    wieght: 2\n"
    assert [problem.removeprefix("a.yaml") for problem in problems_of(text)] == shown


def test_every_field_is_in_a_table() -> None:
    rows = set(re.findall(r"^\| `([a-z_.]+)` \|", DOCS, re.MULTILINE))
    queue = {f"queue.{name}" for name in fields_of("class", "queue")}
    documented = {*fields_of("class"), *fields_of("tenant"), *fields_of("limits"), *fields_of("key")} - {"queue"}
    alone = {*fields_of("")} - {"classes", "defaults", "tenants"}  # each of these is a section
    assert rows == documented | queue | alone


def test_every_example_of_a_number_is_accepted() -> None:
    rows = dict(re.findall(r"^\| (count|size|duration|rate|budget|price) \| ([^|]*) \|", DOCS, re.MULTILINE))
    uses = {
        "count": "tenants: {a: {limits: {concurrent_requests: #}}}",
        "size": "tenants: {a: {limits: {kv_bytes: #}}}",
        "duration": "classes: {a: {ttft: #}}",
        "rate": "tenants: {a: {limits: {tokens: #}}}",
        "budget": "tenants: {a: {limits: {tokens: #}}}",
        "price": "tenants: {a: {price: {input: #, output: 1/1M, currency: USD}}}",
    }
    assert rows.keys() == uses.keys()
    for kind, examples in rows.items():
        for example in re.findall(r"`([^`]+)`", examples):
            assert not problems_of(uses[kind].replace("#", example))


def test_every_file_that_is_linked_exists() -> None:
    links = re.findall(r"\]\((\.\./[^)]+)\)", DOCS)
    assert links
    assert all((Path(__file__).parents[1] / "docs" / link).is_file() for link in links)
