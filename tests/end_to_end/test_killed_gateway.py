"""A gateway that is killed over and over costs its tenants what they used, and no more."""

import signal
from pathlib import Path

from tests.gateway.server_process import eventually
from tests.gateway.tenant_site import TenantSite, tenant_site

AMOUNT = 1_000_000
POLICY = f"tenants: {{acme: {{limits: {{tokens: {AMOUNT}/month, requests: {AMOUNT}/day}}}}}}"
LEASE = 3


def test_a_budget_after_three_kills_lacks_only_what_was_used(tmp_path: Path) -> None:
    used = 0
    for life in range(4):
        with tenant_site(TenantSite, tmp_path, POLICY, "--quota-lease", str(LEASE)) as site:
            eventually(lambda: site.get("acme").is_success)
            limits = site.limits("acme")
            assert AMOUNT - limits["tokens"]["remaining"] == used
            assert AMOUNT - limits["requests"]["remaining"] == 5 * life
            assert limits["tokens"]["lost"] == 0
            if life == 3:
                total = site.server.admin("usage")["total"]
                assert total["input_tokens"] + total["output_tokens"] == used
                return
            used += sum(site.post("acme", max_tokens=8).json()["usage"]["total_tokens"] for _ in range(5))
            eventually(lambda: site.limits("acme")["tokens"]["set_aside"] > 0)
            site.server.process.send_signal(signal.SIGKILL)
            site.server.process.wait()
