"""Adapters as tenants name them, admins load them and the policy allows them, through an HTTP worker."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from backend.model.model_config import read_model_config
from labs.benchmarks.adapters import adapter_tensors, save_adapter
from tests.gateway.server_process import PATIENCE
from tests.gateway.tenant_site import TenantSite, error_of, tenant_site

POLICY = """
defaults: {models: [embedded]}
tenants:
  lawyers: {models: [embedded, law, "law-2"], default_adapter: medicine}
  doctors: {models: [medicine]}
  open: {models: ["*"]}
  early: {default_adapter: absent}
  small: {models: ["*"], limits: {kv_bytes: 256KiB}}
"""
CONFIG = read_model_config(Path("backend/embedded"))


class Site(TenantSite):
    folder: Path

    def ask(self, tenant: str, model: str, **body: object) -> httpx.Response:
        return self.post(tenant, model=model, **{"temperature": 0, "max_tokens": 12, "ignore_eos": True} | body)

    def text(self, tenant: str, model: str) -> str:
        reply = self.ask(tenant, model)
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text

    def models(self, tenant: str) -> list[str]:
        return [card["id"] for card in self.get(tenant, "/v1/models").json()["data"]]

    def load(self, name: str, path: str) -> httpx.Response:
        return self.server.ask_admin("adapters", "POST", json={"name": name, "path": path})


def save(folder: Path, seed: int) -> Path:
    return save_adapter(folder, adapter_tensors(CONFIG, 4, seed=seed, strength=2.0), 4)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("adapters")
    law, medicine = (save(folder / name, seed) for seed, name in enumerate(("law", "medicine")))
    flags = ("--adapter", f"law={law}", "--adapter", f"medicine={medicine}", "--adapter-dir", str(folder))
    with tenant_site(Site, tmp_path_factory.mktemp("site"), POLICY, *flags, "--http-workers", "1") as site:
        site.folder = folder
        yield site


def test_a_tenant_sees_and_uses_the_adapters_that_its_policy_names(site: Site) -> None:
    assert [site.models(tenant) for tenant in ("lawyers", "doctors", "open")] == [
        ["embedded", "law"],
        ["medicine"],
        ["embedded", "law", "medicine"],
    ]
    texts = {name: site.text("open", name) for name in ("embedded", "law", "medicine")}
    assert len(set(texts.values())) == 3
    assert site.text("doctors", "medicine") == texts["medicine"]
    denied = site.ask("lawyers", "medicine")
    assert denied.status_code == 404
    unknown = error_of(site.ask("lawyers", "nothing"))
    assert unknown["message"].replace("nothing", "medicine") == error_of(denied)["message"], "it tells no name"


def test_a_request_for_the_served_model_gets_the_default_adapter_of_its_tenant(site: Site) -> None:
    assert site.text("lawyers", "embedded") == site.text("open", "medicine") != site.text("open", "embedded")
    missing = site.ask("early", "embedded")
    assert missing.status_code == 404 and "'absent', your tenant's default, is not loaded" in missing.text


def test_a_cached_prompt_is_found_by_its_own_adapter_alone(site: Site) -> None:
    def cached(model: str) -> int:
        messages = [{"role": "user", "content": "One text that every adapter reads in its own way. " * 8}]
        reply = site.ask("open", model, messages=messages, max_tokens=1).json()
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(model) for model in ("embedded", "law", "medicine")] == [0, 0, 0]
    assert all(cached(model) > 0 for model in ("embedded", "law", "medicine"))


def test_an_adapter_beyond_the_memory_of_its_tenant_is_refused_by_the_arithmetic(site: Site) -> None:
    refused = site.ask("small", "law")
    assert refused.status_code == 400
    assert "kv_bytes is 256KiB, which holds 0 tokens beside the adapter" in error_of(refused)["message"]
    assert site.ask("small", "embedded", max_tokens=1).status_code == 200


def test_an_admin_loads_replaces_and_unloads_an_adapter_while_requests_run(site: Site) -> None:
    save(site.folder / "first", 11), save(site.folder / "second", 12)
    loaded = site.load("law-2", "first")
    assert loaded.status_code == 200, loaded.text
    assert "law-2" in site.models("lawyers")
    first = site.text("lawyers", "law-2")
    with httpx.stream(
        "POST",
        f"{site.server.url}/v1/completions",
        json={"model": "law-2", "prompt": "Count", "max_tokens": 200, "stream": True, "ignore_eos": True},
        headers=site.authorization("lawyers"),
        timeout=PATIENCE,
    ) as running:
        lines = running.iter_lines()
        next(lines)
        assert site.load("law-2", "second").status_code == 200
        second = site.text("lawyers", "law-2")
        assert site.server.ask_admin("adapters/law-2/unload", "POST").status_code == 200
        assert site.ask("lawyers", "law-2").status_code == 404
        assert [line for line in lines if line][-1] == "data: [DONE]", "what had named it is served to its end"
    assert second != first
    assert site.load("law-2", "first").status_code == 200
    assert site.text("lawyers", "law-2") == first, "nothing of the second is left in any cache"
    (row,) = [one for one in site.server.admin("adapters")["adapters"] if one["name"] == "law-2"]
    assert row["rank"] == 4 and row["kv_blocks"] == row["kv_blocks_on_device"] > 0
    assert site.server.ask_admin("adapters/law-2/unload", "POST").json() == {"unloaded": True}
    actions = [entry["action"] for entry in site.server.admin("audit")["entries"]]
    assert actions.count("adapters.load") >= 3 and actions.count("adapters.unload") >= 2


@pytest.mark.parametrize(
    ("name", "path", "told"),
    [
        ("embedded", "law", "is the name of a model"),
        ("new", "../..", "is not a folder in"),
        ("new", "/etc", "is not a folder in"),
        ("new", "absent", "adapter_config.json does not exist"),
        ("new", "broken", "peft_type is 'IA3'"),
        ("new", "unprintable", r"'\ud800\n' is 1"),
    ],
)
def test_a_bad_adapter_is_refused_and_changes_nothing(site: Site, name: str, path: str, told: str) -> None:
    save_adapter(site.folder / "broken", adapter_tensors(CONFIG, 1), 1, peft_type="IA3")
    save_adapter(site.folder / "unprintable", adapter_tensors(CONFIG, 1), 1, **{"\ud800\n": 1})
    before = site.models("open")
    refused = site.load(name, path)
    assert refused.status_code == 400 and told in error_of(refused)["message"]
    assert site.models("open") == before
    assert site.server.ask_admin("adapters/absent/unload", "POST").status_code == 404
