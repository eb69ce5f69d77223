"""What Prometheus scrapes of a running gateway is what docs/metrics.md says, and the numbers are true."""

import re
from pathlib import Path

import httpx
import pytest

from tests.deploy.documented import Documented, documented_metrics
from tests.gateway.raw_client import completion
from tests.gateway.server_process import ServerProcess, eventually, running_server
from tests.gateway.telemetry.metrics_rig import Page, Rig

UNITS = {"s": "seconds", "By": "bytes", "By.s": "byte-seconds"}


@pytest.fixture(scope="module")
def documented() -> dict[str, Documented]:
    by_name = {metric.name: metric for metric in documented_metrics()}
    assert len(by_name) == len(documented_metrics()), "a metric is documented twice"
    return by_name


def scrape(server: ServerProcess) -> Page:
    reply = server.scrape()
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Page(reply.text)


def test_the_documentation_and_a_scrape_agree(server: ServerProcess, documented: dict[str, Documented]) -> None:
    page = scrape(server)
    assert {name: entry.kind for name, entry in documented.items()} == page.kinds


def test_every_documented_metric_has_a_sample_before_the_first_request(documented: dict[str, Documented]) -> None:
    page = Rig().page()
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in page.samples} | {name for name, _ in page.samples}
    assert documented.keys() <= shown


def test_labels_and_units_are_as_documented(documented: dict[str, Documented]) -> None:
    for family in Rig().metrics.registry.families:
        entry = documented[family.prometheus_name]
        assert entry.labels == set(family.prometheus_labels), family.name
        assert UNITS.get(family.unit, entry.unit) == entry.unit, family.name


def test_a_live_server_counts_what_it_did(server: ServerProcess) -> None:
    before = scrape(server)
    body = completion(prompt=[5, 6, 7], max_tokens=9, ignore_eos=True)
    for _ in range(3):
        assert server.post("/v1/completions", **body).status_code == 200
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 401
    eventually(server.is_idle)
    after = scrape(server)

    def grown(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert grown("vllm:prompt_tokens_total") == grown("sluice_prefill_tokens_total") == 9
    assert grown("vllm:generation_tokens_total") == 27
    assert grown("sluice_decode_tokens_total") >= 24
    assert grown("vllm:time_to_first_token_seconds_count") == 3
    assert grown("vllm:inter_token_latency_seconds_count") == 24
    assert grown("vllm:request_success_total", finished_reason="length") == 3
    assert grown("sluice_requests_total", outcome="completed") == 3
    assert grown("sluice_requests_total", outcome="invalid") == 1
    assert grown("sluice_refusals_total", code="invalid_api_key") == 1
    assert grown("gen_ai_server_time_to_first_token_seconds_count", gen_ai_operation_name="text_completion") == 3
    assert grown("sluice_admissions_total") == grown("sluice_batch_joined_total") == 3
    assert after.value("sluice_tenant_tokens_total", tenant="demo", kind="output") >= 27
    assert after.value("sluice_orphans") == after.value("sluice_running_sequences") == 0
    assert grown("sluice_device_busy_seconds_total") == pytest.approx(grown("sluice_step_duration_seconds_sum"))


def test_tenants_see_metrics_only_where_a_setting_says_so(server: ServerProcess, tmp_path: Path) -> None:
    assert server.get("/metrics").status_code == 404
    assert httpx.get(f"{server.admin_url}/metrics").status_code == 401
    with running_server(tmp_path, "--metrics-on-tenant-port") as open_server:
        assert Page(httpx.get(f"{open_server.url}/metrics").text).kinds == scrape(open_server).kinds
