"""Several models in one process, as clients, admins and tenants' policies see them, through an HTTP worker."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from backend.config import EngineOptions
from backend.llm import LLM
from backend.model.hub import resolve_model
from backend.model.model_config import read_model_config
from backend.sampling_params import SamplingParams
from labs.benchmarks.adapters import adapter_tensors, save_adapter
from tests.gateway.server_process import PATIENCE
from tests.gateway.tenant_site import TenantSite, error_of, tenant_site
from tests.model_variants import make_variant

POLICY = """
tenants:
  one: {models: [first]}
  two: {models: [second, third], default_adapter: sharp}
  open: {models: ["*"]}
"""
ADAPTERS = {"tuned": "first", "sharp": "second", "late": "third"}  # the models that they are of
QUESTIONS = [f"Count from {first} to {first + 4}." for first in range(3, 9)]


class Site(TenantSite):
    folders: dict[str, str]
    adapters: Path

    def load(self, name: str, model: str, path: str | None = None) -> httpx.Response:
        return self.server.ask_admin("adapters", "POST", json={"name": name, "path": path or name, "model": model})

    def ask(self, tenant: str, model: str | None, question: str, **body: object) -> httpx.Response:
        named = {} if model is None else {"model": model}
        messages = [{"role": "user", "content": question}]
        return self.post(
            tenant, messages=messages, **{"temperature": 0, "max_tokens": 24, "ignore_eos": True} | named | body
        )

    def text(self, tenant: str, model: str | None, question: str) -> str:
        reply = self.ask(tenant, model, question)
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("models")
    second, third = make_variant(folder / "a", [0, 1, 3, 4, 5]), make_variant(folder / "third", [0, 1, 2, 3, 3, 5])
    folders = {"first": "embedded", "second": str(second), "third": str(third)}
    for seed, (name, model) in enumerate(ADAPTERS.items()):
        tensors = adapter_tensors(read_model_config(resolve_model(folders[model])), 2, seed=seed, strength=2.0)
        save_adapter(folder / name, tensors, 2)
    flags = ("--model", "first=embedded", "--model", f"second={second}", "--model", str(third))
    adapted = ("--adapter", f"tuned={folder / 'tuned'}", "--adapter", f"sharp=second={folder / 'sharp'}")
    own = ("--http-workers", "1", "--kv-memory-bytes", "3MiB", "--max-num-seqs", "6", "--swap-space-bytes", "1MiB")
    own += ("--max-model-len", "512", "--awake-bytes", "20MiB", "--adapter-dir", str(folder))
    with tenant_site(Site, tmp_path_factory.mktemp("site"), POLICY, *flags, *adapted, *own) as site:
        site.folders, site.adapters = folders, folder
        assert site.load("late", "third").status_code == 200
        yield site


@pytest.fixture(scope="module")
def alone(site: Site) -> dict[tuple[str, str], str]:
    """What each model answers to each question by itself, and with its adapter to some."""
    found, of_model = {}, {model: name for name, model in ADAPTERS.items()}
    for name, folder in site.folders.items():
        adapter, options = of_model[name], EngineOptions(kv_memory_bytes=2**23, max_model_len=512, max_adapter_rank=2)
        llm = LLM(folder, options, device="cpu")
        llm.load_adapter(adapter, site.adapters / adapter)
        asked = [(name, one) for one in QUESTIONS] + [(adapter, one) for one in QUESTIONS[:2]]
        answers = llm.generate(
            [[{"role": "user", "content": question}] for _, question in asked],
            SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
            progress=False,
            adapters=[None if one == name else adapter for one, _ in asked],
        )
        found |= {one: answer.text for one, answer in zip(asked, answers, strict=True)}
    return found


def test_texts_are_those_of_each_model_alone_whatever_runs_beside_them(
    site: Site, alone: dict[tuple[str, str], str]
) -> None:
    """Little memory: sequences of all models preempt each other, swapped blocks come back, adapters of each are evicted
    and brought again, and one model sleeps.
    """
    assert len({alone[name, QUESTIONS[0]] for name in (*site.folders, *ADAPTERS)}) == 6
    asked = [*alone] * 3
    with ThreadPoolExecutor(18) as threads:
        texts = [*threads.map(lambda one: site.text("open", *one), asked)]
    assert texts == [alone[one] for one in asked]


def test_a_request_without_a_model_is_the_first_ones(site: Site, alone: dict[tuple[str, str], str]) -> None:
    assert site.text("open", "first", QUESTIONS[1]) == alone["first", QUESTIONS[1]]
    reply = httpx.post(
        f"{site.server.url}/tokenize", json={"prompt": "one"}, headers=site.authorization("open"), timeout=PATIENCE
    )
    assert reply.status_code == 200


def test_a_tenant_sees_and_uses_the_models_of_its_policy(site: Site) -> None:
    seen = {
        tenant: [card["id"] for card in site.get(tenant, "/v1/models").json()["data"]]
        for tenant in ("one", "two", "open")
    }
    everything = [*site.folders, *ADAPTERS]
    assert seen == {"one": ["first"], "two": ["second", "third"], "open": everything}
    parents = {card["id"]: card["parent"] for card in site.get("open", "/v1/models").json()["data"] if card["parent"]}
    assert parents == ADAPTERS
    denied = error_of(site.ask("two", "first", QUESTIONS[0]))
    assert denied["code"] == "model_not_found" and "'second', 'third'" not in denied["message"]
    unknown = error_of(site.ask("open", "fourth", QUESTIONS[0]))
    assert "this server has 'first', 'second', 'third'" in unknown["message"]


def test_the_default_adapter_of_a_tenant_is_that_of_its_model_alone(
    site: Site, alone: dict[tuple[str, str], str]
) -> None:
    assert site.text("two", "second", QUESTIONS[0]) == alone["sharp", QUESTIONS[0]] != alone["second", QUESTIONS[0]]
    assert site.text("two", "third", QUESTIONS[0]) == alone["third", QUESTIONS[0]]
    assert site.server.ask_admin("adapters/sharp/unload", "POST").status_code == 200
    for model in ("second", "third"):  # nobody knows which model it was of
        missing = error_of(site.ask("two", model, QUESTIONS[0]))
        assert missing["message"] == "The adapter 'sharp', your tenant's default, is not loaded."
    assert site.load("sharp", "second").status_code == 200
    assert site.text("two", "second", QUESTIONS[0]) == alone["sharp", QUESTIONS[0]]


def test_an_adapter_is_loaded_for_the_model_that_it_fits_and_is_refused_for_another(site: Site) -> None:
    other = site.load("unfit", "second", path="tuned")
    assert other.status_code == 400 and "in one of this model's 5 layers" in other.text
    taken = site.load("tuned", "second", path="sharp")
    assert taken.status_code == 400 and "'tuned' is an adapter of the model 'first': unload it first" in taken.text
    unknown = site.load("sharp", "fourth")
    assert unknown.status_code == 400 and "'fourth' is no model that has adapters: 'first', 'second'" in unknown.text
    assert {one["name"]: one["model"] for one in site.server.admin("adapters")["adapters"]} == ADAPTERS


def test_an_answer_of_each_model_can_be_bound_to_a_schema(site: Site) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [3, 4]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    for model in site.folders:
        reply = site.ask("open", model, QUESTIONS[0], response_format=form, ignore_eos=False)
        assert reply.status_code == 200, reply.text
        assert json.loads(reply.json()["choices"][0]["message"]["content"])["n"] in (3, 4)


def test_use_is_told_for_each_model(site: Site) -> None:
    site.text("two", "second", QUESTIONS[2])
    assert site.server.ask_admin("overview").json()["model"] == "first, second, third"

    def told() -> set[object]:
        report = site.server.ask_admin("usage?by=model").json()
        return {value for row in report["rows"] for value in row.values() if isinstance(value, str)}

    while not {"first", "second", "third"} <= told():
        time.sleep(0.05)


def test_a_stream_that_its_client_leaves_frees_its_memory(site: Site) -> None:
    body = {"model": "second", "messages": [{"role": "user", "content": "Count from 1 to 500."}], "stream": True}
    url, own = f"{site.server.url}/v1/chat/completions", site.authorization("open")
    with httpx.stream("POST", url, json=body | {"max_tokens": 400}, headers=own, timeout=PATIENCE) as reply:
        next(reply.iter_lines())
    assert site.text("open", "first", QUESTIONS[0])
