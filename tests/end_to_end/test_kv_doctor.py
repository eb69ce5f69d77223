"""Troubles of KV memory that are provoked in a live gateway are named, once, and nothing is said of a healthy one."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from admission.explain import REASONS
from gateway.doctor.finding import Finding
from gateway.doctor.findings import findings
from gateway.doctor.kv_findings import LEAST_TOKENS
from gateway.doctor.live import LiveGateway
from gateway.doctor.reasons import plain_reason
from tests.gateway.server_process import eventually
from tests.gateway.tenant_site import TenantSite, tenant_site

TROUBLES = {"thrashing", "cache_never_hits", "starving_floor"}
LENGTH = 600  # tokens of a prompt
POLICY = "tenants: {keeper: {prefix_cache: {floor: 5MiB}}, other: {}}"
RNG = random.Random(5)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


class Site(TenantSite):
    def ask(self, prompt: list[int], tenant: str = "other", max_tokens: int = 1) -> None:
        extra = {"ignore_eos": True}
        with self.client(tenant) as client:
            client.completions.create(model="embedded", prompt=prompt, max_tokens=max_tokens, extra_body=extra)

    def ask_all(self, prompts: list[list[int]]) -> None:
        with ThreadPoolExecutor(4) as clients:
            for answer in [clients.submit(self.ask, prompt) for prompt in prompts]:
                answer.result()

    def told(self, happen: Callable[[], object]) -> dict[str, Finding]:
        """What the doctor says of KV memory in the time in which this happens."""
        with LiveGateway(self.server.admin_url, self.server.admin_key) as gateway:
            before = gateway.snapshot()
            happen()
            found = [finding for finding in findings(before, gateway.snapshot()) if finding.name in TROUBLES]
        assert len({finding.name for finding in found}) == len(found)
        return {finding.name: finding for finding in found}


@contextmanager
def serving(folder: Path, memory: str) -> Iterator[Site]:
    flags = ("--kv-memory-bytes", memory, "--max-model-len", "1024", "--refused-per-second", "10000")
    with tenant_site(Site, folder, POLICY, *flags) as site:
        yield site


def prompts(count: int) -> list[list[int]]:
    return [[RNG.randrange(5, 500) for _ in range(LENGTH)] for _ in range(count)]


MANY = int(LEAST_TOKENS) // LENGTH + 1


def test_conversations_that_find_what_they_had_are_no_trouble_until_they_lose_it(tmp_path: Path) -> None:
    few, others = prompts(4), prompts(60)
    with serving(tmp_path, "24MiB") as site:
        assert site.told(lambda: site.ask_all(few * (MANY // 4 + 1))) == {}
        told = site.told(lambda: site.ask_all(others))
        assert told.keys() == {"thrashing"}
        assert "of the prompt tokens were found in the prefix cache" in told["thrashing"].evidence
        assert "prefix_cache.floor" in told["thrashing"].remedy
        assert site.told(lambda: site.ask_all(others[-4:] * 10)) == {}, "they find it again"


def test_prompts_of_which_none_begins_like_another(tmp_path: Path) -> None:
    with serving(tmp_path, "24MiB") as site:
        told = site.told(lambda: site.ask_all(prompts(MANY)))
        assert told.keys() == {"cache_never_hits"}
        assert "cache_salt" in told["cache_never_hits"].remedy
        assert site.told(lambda: None) == {}, "nobody asks for anything"


def test_a_floor_beside_those_who_wait_for_memory(tmp_path: Path) -> None:
    with serving(tmp_path, "10MiB") as site:
        for prompt in prompts(3):
            site.ask(prompt, "keeper")
        with ThreadPoolExecutor(12) as clients:
            asked = [clients.submit(site.ask, prompt[:300], "other", 300) for prompt in prompts(12)]
            eventually(lambda: waits_for_memory(site))
            told = site.told(lambda: None)
            for answer in asked:
                answer.result()
        assert told.keys() == {"starving_floor"}
        assert "of keeper in the policy" in told["starving_floor"].remedy
        assert site.told(lambda: None) == {}, "nobody waits"


def waits_for_memory(site: Site) -> bool:
    with LiveGateway(site.server.admin_url, site.server.admin_key) as gateway:
        return any(plain_reason(row["reason"]) == REASONS["memory"] for row in gateway.snapshot().waiting)
