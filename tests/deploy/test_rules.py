"""Prometheus' rules: valid, tested, about metrics that there are, with a remedy in each alert."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.doctor.engine_findings import NOTICED_GAP_SECONDS, SLOWDOWN_RATIO
from gateway.doctor.queue_findings import FLOODING_SHARE
from gateway.doctor.service_findings import SLOW_STORE_SECONDS
from tests.deploy.dashboard import ANNOTATIONS, QUERIES, filled_in
from tests.deploy.documented import DEPLOY, ROOT, documented_metrics, series_of, strangers

FOLDER = DEPLOY / "prometheus"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
TESTS: list[dict[str, Any]] = yaml.safe_load((FOLDER / "rules_test.yaml").read_text())["tests"]
ADAPTER = yaml.safe_load((DEPLOY / "prometheus" / "adapter.yaml").read_text())["rules"]["custom"]

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")


def run(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_promtool_takes_the_rules_and_their_tests_pass() -> None:
    run("check", "rules", FOLDER / "rules.yaml")
    run("test", "rules", FOLDER / "rules_test.yaml")


@promtool
def test_promtool_takes_the_configuration() -> None:
    run("check", "config", "--syntax-only", FOLDER / "prometheus.yaml")


@promtool
def test_promtool_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = map(filled_in, [*QUERIES, *ANNOTATIONS])
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    run("check", "rules", path)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule.get("record"))
def test_a_rule_asks_for_what_is_documented_or_recorded(rule: dict[str, Any]) -> None:
    assert series_of(rule["expr"])
    assert not strangers(rule["expr"], RECORDED)


def test_every_recording_rule_is_asked_for() -> None:
    asked = [alert["expr"] for alert in ALERTS] + [rule["seriesQuery"] for rule in ADAPTER]
    assert RECORDED.keys() <= set().union(*map(series_of, asked))


def test_the_metrics_that_a_remedy_names_exist() -> None:
    told = " ".join(text for alert in ALERTS for text in alert["annotations"].values())
    assert set(re.findall(r"\bsluice_\w+", told)) <= {metric.name for metric in documented_metrics()}


def test_the_series_that_rules_are_tested_with_exist() -> None:
    given = [entry["series"] for test in TESTS for entry in test["input_series"]]
    assert [series for series in given if strangers(series)] == []


@pytest.mark.parametrize("alert", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_what_is_wrong_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert set(alert["annotations"]) == {"summary", "description"}
    assert len(alert["annotations"]["description"]) > 40
    assert "for" in alert or "increase(" in alert["expr"]


def test_every_alert_is_tested_by_name_and_in_the_documentation() -> None:
    raised = {test["name"]: str(test["promql_expr_test"]) for test in TESTS}
    for name in (alert["alert"] for alert in ALERTS):
        assert f'alertname="{name}"' in raised[name]
    rows = re.findall(r"^\| `(Sluice\w+)` \| (\w+) \|", (ROOT / "docs" / "deploy.md").read_text(), re.MULTILINE)
    assert {(alert["alert"], alert["labels"]["severity"]) for alert in ALERTS} == set(rows)


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("SluiceStoreSlow", f"> {SLOW_STORE_SECONDS:g}"),
        ("SluiceLongPrefills", f"> {NOTICED_GAP_SECONDS:g})\n  > {SLOWDOWN_RATIO:g} *"),
        ("SluiceTenantFloods", f"> {FLOODING_SHARE:g}"),
    ],
)
def test_an_alert_has_the_threshold_of_the_finding_that_it_shares(name: str, condition: str) -> None:
    (alert,) = [alert for alert in ALERTS if alert["alert"] == name]
    assert condition in alert["expr"]


def test_a_slow_first_token_is_told_of_within_a_minute() -> None:
    (slow,) = [alert for alert in ALERTS if alert["alert"] == "SluiceSlowFirstToken"]
    assert slow["expr"] == "sluice:time_to_first_token_seconds:p99_1m > 2"
    assert slow["for"] == "1m"


def test_the_autoscalers_metric_is_recorded() -> None:
    assert set().union(*(series_of(rule["seriesQuery"]) for rule in ADAPTER)) <= {
        *RECORDED,
        *(metric.name for metric in documented_metrics()),
    }
    scaler = yaml.safe_load((DEPLOY / "kubernetes" / "horizontalpodautoscaler.yaml").read_text())
    scaled_by = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert scaled_by == {rule["name"]["as"] for rule in ADAPTER}
