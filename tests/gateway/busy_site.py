"""A real server with one slot, which tests keep busy, and tenants that meet its limits."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.gateway.server_process import BODY, PATIENCE, eventually, in_threads
from tests.gateway.tenant_site import TenantSite, tenant_site

POLICY = """
classes:
  hurried: {service_tiers: [priority], ttft: 1ms, when_late: refuse} # sooner than a slot is given up for it
  usual: {aging: 2s}
  short: {service_tiers: [flex], aging: 4s, queue: {requests: 1}}
defaults: {default_class: usual}
tenants:
  patient: {}
  queued: {limits: {queued_requests: 1}}
  spent: {limits: {requests: 1/month}}
  exhausted: {limits: {requests: 1/month}}
"""


class Site(TenantSite):
    def send(self, client: httpx.Client, tenant: str = "patient", **changes: Any) -> httpx.Request:
        headers, url = self.authorization(tenant) | changes.pop("headers", {}), f"{self.server.url}/v1/chat/completions"
        return client.build_request("POST", url, json=BODY | changes, headers=headers)

    def post(self, tenant: str = "patient", **changes: Any) -> httpx.Response:
        with httpx.Client(timeout=PATIENCE) as client:
            return client.send(self.send(client, tenant, **changes))

    def vacate(self) -> None:
        self._leave = True
        eventually(self.server.is_idle)

    @contextmanager
    def occupied(self, waiting: int = 0) -> Iterator[None]:
        """The slot is taken by a long answer, and `waiting` more wait for it, until the block is left: each is asked
        for again when it ends, since a test on a busy machine may take longer than an answer.
        """
        self._leave = False
        with httpx.Client(timeout=PATIENCE) as client, in_threads(*[partial(self._stream, client)] * (1 + waiting)):
            eventually(lambda: self.server.metric("vllm:num_requests_running") == 1)
            eventually(lambda: self.server.metric("vllm:num_requests_waiting") == waiting)
            try:
                yield
            finally:
                self._leave = True
        self.vacate()

    def _stream(self, client: httpx.Client) -> None:
        while not self._leave:
            response = client.send(self.send(client, max_tokens=1900, ignore_eos=True, stream=True), stream=True)
            for _ in response.iter_raw():
                if self._leave:
                    break
            response.close()


@contextmanager
def busy_site(folder: Path) -> Iterator[Site]:
    with tenant_site(Site, folder, POLICY, "--max-num-seqs", "1") as site:
        for _ in range(3):
            site.post()  # so that something is known of how long things take
        yield site
