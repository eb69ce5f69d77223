"""Records the event log of a real server and its clients, for `scripts/record_logs.py`."""

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from gateway.telemetry.event_log_file import read_event_log
from tests.gateway.busy_site import POLICY, Site
from tests.gateway.server_process import PATIENCE, eventually
from tests.gateway.tenant_site import tenant_site

TENANTS = {
    "patient": "{}",
    "queued": "{limits: {queued_requests: 1}}",
    "spent": "{limits: {requests: 1/month}}",
    "metered": "{limits: {tokens: 5000/min}}",
    "roomy": "{limits: {kv_bytes: 8MiB}}",
}
EDITED = TENANTS | {"queued": "{limits: {queued_requests: 2}}", "patient": "{weight: 2}"}
FLAGS = ("--max-num-seqs=1", "--max-num-batched-tokens=64", "--max-waiting=4")


def served() -> list[str]:
    """Serve clients in one slot that is kept busy, with each refusal, limits, leases and a policy that is edited."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "events.log"
        with tenant_site(Site, folder, _policy(TENANTS), *FLAGS, f"--event-log={log}") as site:
            _visit_alone(site)
            _visit_in_a_crowd(site)
            site.policy.write_text(_policy(EDITED))
            site.server.admin("policy/reload", "POST")
            assert site.post("roomy").status_code == site.post("patient", max_tokens=9).status_code == 200
            eventually(site.server.is_idle)
        return list(read_event_log(log))


def _policy(tenants: dict[str, str]) -> str:
    classes, _, _ = POLICY.partition("tenants:")
    return classes + "tenants:\n" + "".join(f"  {name}: {terms}\n" for name, terms in tenants.items())


def _visit_alone(site: Site) -> None:
    for _ in range(3):
        assert site.post().status_code == 200
    assert site.post(stop=["7"]).json()["choices"][0]["finish_reason"] == "stop"
    assert [site.post("spent").status_code for _ in range(3)] == [200, 429, 429]
    late = site.post(headers={"x-sluice-deadline-ms": "60"}, max_tokens=1900, ignore_eos=True)
    assert late.status_code == 504
    _read(site, "metered", 40)
    two = {"model": "embedded", "prompt": ["1, 2, 3,", "4, 5,"], "max_tokens": 8}
    headers = site.authorization("roomy")
    assert httpx.post(f"{site.server.url}/v1/completions", json=two, headers=headers).status_code == 200


def _read(site: Site, tenant: str, pieces: int) -> None:
    """Ask for a stream of undeclared length, and leave after some of its lines."""
    with httpx.Client(timeout=PATIENCE) as client:
        visible = {"ignore_eos": True, "skip_special_tokens": False}
        reply = client.send(site.send(client, tenant, stream=True, **visible), stream=True)
        for _ in islice(reply.iter_lines(), pieces):
            pass
        reply.close()


def _visit_in_a_crowd(site: Site) -> None:
    asked: list[Future[httpx.Response]] = []
    with ThreadPoolExecutor(3) as clients, site.occupied(waiting=1):

        def wait(tenant: str, tier: str) -> None:
            asked.append(clients.submit(site.post, tenant, service_tier=tier))
            eventually(lambda: site.server.metric("vllm:num_requests_waiting") == 1 + len(asked))

        wait("queued", "auto")
        wait("patient", "flex")
        refused = [
            site.post("queued"),
            site.post(service_tier="flex"),
            site.post(service_tier="priority"),
            site.post(headers={"x-sluice-ttft-ms": "20"}),
        ]
        wait("roomy", "auto")
        refused.append(site.post())
        assert [reply.status_code for reply in refused] == [429, 503, 503, 503, 503]
        site.vacate()
        assert [one.result().status_code for one in asked] == [200, 200, 200]
