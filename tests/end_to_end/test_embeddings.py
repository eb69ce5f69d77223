"""An embedding and a score model beside the generating one, through the official client."""

import math
import re
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

from labs.benchmarks.embeddings import save_encoder
from tests.gateway.http_workers import NUMBERS_OF_WORKERS
from tests.gateway.server_process import PATIENCE
from tests.gateway.tenant_site import TenantSite, tenant_site

POLICY = """
tenants:
  acme: {limits: {input_tokens: 1M/day}}
  poor: {limits: {input_tokens: {rate: 10/min, burst: 10}}}
  globex: {}
"""
TEXTS = ["1 2 3", "7", "1 2 4 5 6 7 8"]
WIDTH = 32


def save_bert(directory: Path, *, scores: bool) -> Any:
    """A small BERT with random weights; its words are numbers."""
    save_encoder(directory)  # for its tokenizer
    config = BertConfig(
        vocab_size=2004,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=1,
    )
    torch.manual_seed(0)
    model: Any = BertForSequenceClassification(config) if scores else BertModel(config)
    model.eval().save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("models")
    return {name: (folder / name, save_bert(folder / name, scores=name == "scorer")) for name in ("embedder", "scorer")}


@pytest.fixture(scope="module", params=NUMBERS_OF_WORKERS)
def site(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    models: dict[str, tuple[Path, Any]],
) -> Iterator[TenantSite]:
    flags = ["--http-workers", str(request.param)]
    flags += ["--embedding-model", str(models["embedder"][0]), "--score-model", str(models["scorer"][0])]
    with tenant_site(TenantSite, tmp_path_factory.mktemp("site"), POLICY, *flags) as site:
        yield site


def ids_of(text: str) -> list[int]:
    return [2, *[4 + int(word) for word in text.split()], 3]


def test_embeddings_are_the_models_own_and_its_tokens_count_as_input(site: TenantSite, models: Any) -> None:
    before = site.limits("acme")["input_tokens"]["remaining"]
    with site.client("acme") as client:
        assert {card.id for card in client.models.list().data} == {"embedded", "embedder", "scorer"}
        reply = client.embeddings.create(model="embedder", input=TEXTS)
        assert [one.index for one in reply.data] == [0, 1, 2]
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(len(ids_of(text)) for text in TEXTS)
        for text, one in zip(TEXTS, reply.data, strict=True):
            with torch.no_grad():
                expected = models["embedder"][1](torch.tensor([ids_of(text)])).last_hidden_state[0].mean(0)
            assert torch.allclose(torch.tensor(one.embedding), expected, atol=1e-5)
        ids = client.embeddings.create(model="embedder", input=[ids_of(text) for text in TEXTS])
        assert [one.embedding for one in ids.data] == [one.embedding for one in reply.data]
        plain = client.embeddings.create(model="embedder", input=TEXTS[0], encoding_format="float")
        assert plain.data[0].embedding == pytest.approx(reply.data[0].embedding)
        short = client.embeddings.create(model="embedder", input=TEXTS[0], dimensions=8).data[0].embedding
        assert len(short) == 8 and math.hypot(*short) == pytest.approx(1.0)
        assert [a / b for a, b in zip(short, plain.data[0].embedding, strict=False)] == pytest.approx(
            [short[0] / plain.data[0].embedding[0]] * 8, rel=1e-4
        )
    used = 2 * reply.usage.total_tokens + 2 * plain.usage.total_tokens
    assert before - site.limits("acme")["input_tokens"]["remaining"] == used


def post(site: TenantSite, path: str, tenant: str = "globex", **body: object) -> httpx.Response:
    headers = site.authorization(tenant)
    return httpx.post(site.server.url + path, json=body, headers=headers, timeout=PATIENCE)


def test_pairs_are_scored_by_the_model_that_reads_both_or_by_their_embeddings(site: TenantSite, models: Any) -> None:
    query, documents = "1 2", ["7 8 9", "1 2 3", "5"]
    ranked = post(site, "/v1/rerank", model="scorer", query=query, documents=documents, top_n=2).json()
    scores = post(site, "/v1/score", model="scorer", text_1=query, text_2=documents).json()["data"]
    by_score = sorted(scores, key=lambda one: -one["score"])
    assert [(one["index"], one["relevance_score"]) for one in ranked["results"]] == [
        (one["index"], one["score"]) for one in by_score[:2]
    ]
    assert ranked["results"][0]["document"] == {"text": documents[by_score[0]["index"]]}
    first, second = ids_of(query), ids_of(documents[0])[1:]
    with torch.no_grad():
        types = torch.tensor([[0] * len(first) + [1] * len(second)])
        logit = models["scorer"][1](torch.tensor([first + second]), token_type_ids=types).logits[0, 0]
    assert scores[0]["score"] == pytest.approx(torch.sigmoid(logit).item(), abs=1e-5)
    cosines = post(site, "/v1/score", model="embedder", text_1="1 2", text_2=["1 2", "9"]).json()["data"]
    assert cosines[0]["score"] == pytest.approx(1.0) and cosines[1]["score"] < 1.0


def test_an_input_that_cannot_be_encoded_is_refused_by_name(site: TenantSite) -> None:
    long = " ".join(["1"] * 80)
    for path, body, status, words in (
        ("/v1/embeddings", {"model": "embedder", "input": ["1", long]}, 400, "64 tokens of an input, and input\\[1\\]"),
        ("/v1/embeddings", {"model": "embedder", "input": []}, 400, "input must be a string"),
        ("/v1/embeddings", {"model": "embedder", "input": [[5, 9999]]}, 400, "between 0 and 2003, got 9999"),
        ("/v1/embeddings", {"model": "embedder", "input": "1", "dimensions": 33}, 400, "at most 32"),
        ("/v1/embeddings", {"model": "embedded", "input": "1"}, 400, "generates text and embeds none"),
        ("/v1/embeddings", {"model": "scorer", "input": "1"}, 400, "scores pairs of texts"),
        (
            "/v1/embeddings",
            {"model": "none", "input": "1"},
            404,
            "does not exist; this server has 'embedder', 'scorer'",
        ),
        (
            "/v1/chat/completions",
            {"model": "embedder", "messages": [{"role": "user", "content": "1"}]},
            400,
            "embeds or scores texts and generates none",
        ),
        ("/v1/rerank", {"model": "scorer", "query": "1", "documents": [5]}, 400, "documents\\[0\\] must be a string"),
        ("/v1/score", {"model": "scorer", "text_1": ["1", "2"], "text_2": ["1"]}, 400, "text_1 must be one text"),
    ):
        reply = post(site, path, **body)
        assert reply.status_code == status, reply.text
        assert re.search(words, reply.json()["error"]["message"]), reply.text
    cut = post(site, "/v1/embeddings", model="embedder", input=long, truncate_prompt_tokens=-1).json()
    whole = post(site, "/v1/embeddings", model="embedder", input=[[*ids_of(long)[:63], 3]]).json()
    assert cut["data"] == whole["data"], "the token that closes an input stays"
    assert post(site, "/v1/embeddings", "poor", model="embedder", input=TEXTS[:1]).status_code == 200
    refused = post(site, "/v1/embeddings", "poor", model="embedder", input=TEXTS)
    assert refused.status_code in (400, 429) and refused.json()["error"]["limit"] == "input_tokens/min"


def test_many_at_once_are_right_beside_answers_that_are_generated(site: TenantSite) -> None:
    def embedded(number: int) -> bytes:
        body = {"model": "embedder", "input": [str(number), str(number + 1)], "encoding_format": "base64"}
        return b64decode(post(site, "/v1/embeddings", "acme", **body).json()["data"][1]["embedding"])

    with ThreadPoolExecutor(12) as pool:
        chat = pool.submit(site.post, "globex", max_tokens=200, ignore_eos=True)
        found = list(pool.map(embedded, range(60)))
        assert chat.result().json()["usage"]["completion_tokens"] == 200
    with site.client("acme") as client:
        inputs = [str(number + 1) for number in range(60)]
        alone = client.embeddings.create(model="embedder", input=inputs, encoding_format="base64").data
    assert found == [b64decode(str(one.embedding)) for one in alone], "to the bit, beside any others in a batch"
