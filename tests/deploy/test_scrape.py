"""A real Prometheus scrapes a real gateway by deploy/'s configuration."""

from collections.abc import Iterator

import pytest

from tests.deploy.dashboard import QUERIES, filled_in
from tests.deploy.documented import documented_metrics
from tests.deploy.prometheus_process import PROGRAM, Prometheus, running_prometheus
from tests.gateway.server_process import ServerProcess

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="prometheus is not installed")
SELECTOR = '{job="sluice"}'


@pytest.fixture(scope="module")
def prometheus(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), server) as running:
        yield running


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
