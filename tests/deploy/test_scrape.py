"""A real Prometheus scrapes a real gateway by deploy/'s configuration."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from backend.bound_process import bound
from tests.deploy.dashboard import QUERIES, filled_in
from tests.deploy.documented import DEPLOY, documented_metrics
from tests.gateway.server_process import ServerProcess, eventually
from tests.ports import free_port

PROGRAM = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="prometheus is not installed")
SELECTOR = '{job="sluice"}'


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, promql: str) -> list[tuple[dict[str, str], float]]:
        """The labels and the value of each series that it yields now."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": promql}).json()
        assert answer["status"] == "success", answer
        return [(entry["metric"], float(entry["value"][1])) for entry in answer["data"]["result"]]

    def is_scraping(self) -> bool:
        try:
            return bool(self.query('up{job="sluice"} == 1'))
        except (httpx.HTTPError, ValueError):
            return False


@pytest.fixture(scope="module")
def prometheus(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has deploy/'s configuration, and has scraped the gateway once."""
    directory = tmp_path_factory.mktemp("prometheus")
    assert PROGRAM is not None
    path, key = directory / "prometheus.yaml", directory / "prometheus-key"
    key.write_text(server.admin_key)
    path.write_text(yaml.safe_dump(_config(server.admin_port, key)))
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--config.file={path}", f"--storage.tsdb.path={directory / 'tsdb'}", f"--web.listen-address={address}"]
    command = bound([PROGRAM, *flags])
    with (directory / "prometheus.log").open("wb") as log, subprocess.Popen(**command, stderr=log) as process:
        try:
            prometheus = Prometheus(f"http://{address}")
            eventually(prometheus.is_scraping)
            yield prometheus
        finally:
            process.terminate()


def _config(port: int, key: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / path) for path in config["rule_files"]]
    config["scrape_configs"] = [job for job in config["scrape_configs"] if job["job_name"] == "sluice"]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    config["scrape_configs"][0]["authorization"]["credentials_file"] = str(key)
    return config


def test_every_documented_metric_is_there_from_the_first_scrape(prometheus: Prometheus) -> None:
    documented = {name for metric in documented_metrics() for name in metric.series}
    scraped = {labels["__name__"] for labels, _ in prometheus.query(SELECTOR)}
    assert documented - scraped == set()


def test_every_query_of_the_dashboard_is_answered(prometheus: Prometheus) -> None:
    for query in QUERIES:
        prometheus.query(filled_in(query))


def test_a_gateway_that_is_well_raises_no_alert(prometheus: Prometheus) -> None:
    firing = [labels["alertname"] for labels, _ in prometheus.query('ALERTS{alertstate="firing"}')]
    assert not firing
