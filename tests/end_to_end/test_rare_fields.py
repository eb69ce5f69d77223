"""Fields that few ask for, at a live server: log probabilities, the best of answers, what may be drawn, cut prompts."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.gateway.http_workers import NUMBERS_OF_WORKERS
from tests.gateway.tenant_site import PATIENCE, TenantSite, site_fixture

EMBEDDED = Path(__file__).parents[2] / "backend" / "embedded"
POLICY = """
tenants:
  acme: {}
  metered: {limits: {input_tokens: 100k/day, output_tokens: 100k/day}}
  few: {max_n: 2, max_top_logprobs: 3}
"""
HI = [{"role": "user", "content": "Hi"}]
TEXTS = [
    ("Count from 3 to 9.", " 3, 4, 5"), ("Once upon a time", " there was a small cat."), ("日", "本 is far"),
    ("The cat sat", " on the mat. " * 30),
]  # fmt: skip


class Site(TenantSite):
    def send(self, path: str, tenant: str, **body: Any) -> httpx.Response:
        url, own = f"{self.server.url}/v1/{path}", self.authorization(tenant)
        return httpx.post(url, json={"model": "embedded", **body}, headers=own, timeout=PATIENCE)

    def ask(self, path: str, tenant: str = "acme", **body: Any) -> dict[str, Any]:
        reply = self.send(path, tenant, **body)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def refusal(self, path: str, tenant: str, **body: Any) -> dict[str, Any]:
        reply = self.send(path, tenant, **body)
        assert reply.status_code == 400
        error: dict[str, Any] = reply.json()["error"]
        return error

    def left(self) -> list[int]:
        entries = self.limits("metered")
        return [entries[name]["remaining"] for name in ("input_tokens", "output_tokens")]


site = site_fixture(Site, POLICY, "--refused-per-second", "10000", workers=NUMBERS_OF_WORKERS)


@pytest.fixture(scope="module")
def likelihoods() -> list[tuple[list[int], int, float, bool]]:
    """Token ids, how many are context, and by transformers the likelihood of the rest, and if it is the likeliest."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    model, found = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32), []
    for context, continuation in TEXTS:
        first = tokenizer.encode(context)
        ids = [*first, *tokenizer.encode(continuation, add_special_tokens=False)]
        with torch.inference_mode():
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        rest, before = torch.tensor(ids[len(first) :]), scores[len(first) - 1 : -1]
        likely = bool((before.argmax(-1) == rest).all())
        found.append((ids, len(first), float(before[range(len(rest)), rest].sum()), likely))
    return found


def test_an_evaluation_harness_gets_the_likelihoods_of_texts(
    site: Site, likelihoods: list[tuple[list[int], int, float, bool]]
) -> None:
    """As local-completions of lm-evaluation-harness asks and reads: `token_logprobs[context:-1]` of an echo."""
    for max_tokens in (1, 0):
        prompts = [ids for ids, *_ in likelihoods]
        asked = {"temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
        reply = site.ask("completions", prompt=prompts, **asked)
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        for choice, (ids, context, expected, likely) in zip(choices, likelihoods, strict=True):
            end = len(ids)
            assert len(choice["logprobs"]["tokens"]) == end + max_tokens
            logprobs = choice["logprobs"]["token_logprobs"][context:end]
            tops = choice["logprobs"]["top_logprobs"][context:end]
            assert sum(logprobs) == pytest.approx(expected, abs=1e-4 * len(logprobs))
            assert all(one == max(top.values()) for one, top in zip(logprobs, tops, strict=True)) == likely
        assert reply["usage"]["completion_tokens"] == max_tokens * len(prompts)
        assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_a_prompt_alone_is_billed_as_a_prompt(site: Site) -> None:
    before = site.left()
    reply = site.ask("completions", "metered", prompt="Count from 3 to 9.", max_tokens=0, echo=True, logprobs=0)
    num_prompt_tokens = reply["usage"]["prompt_tokens"]
    assert [one - other for one, other in zip(before, site.left(), strict=True)] == [num_prompt_tokens, 0]
    assert reply["choices"][0]["text"] == "Count from 3 to 9."


@pytest.mark.parametrize("stop", [None, [", 5"]])
def test_a_stream_tells_what_a_whole_answer_does(site: Site, stop: list[str] | None) -> None:
    said: list[Any] = [{"role": "user", "content": "Count from 3 to 9."}]
    asked: dict[str, Any] = {
        "model": "embedded",
        "messages": said,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    with site.client("acme") as client:
        whole = client.chat.completions.create(stop=stop, **asked).choices[0]
        chunks = list(client.chat.completions.create(stop=stop, stream=True, **asked))
    assert whole.logprobs is not None and whole.logprobs.content
    told = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    streamed = [entry for logprobs in told for entry in logprobs.content or []]
    assert streamed == whole.logprobs.content
    text = whole.message.content
    assert text == "".join(entry.token for entry in streamed if not entry.token.startswith("<|"))
    assert all(entry.logprob == entry.top_logprobs[0].logprob and len(entry.top_logprobs) == 2 for entry in streamed)


def test_texts_are_the_same_with_and_without_log_probabilities(site: Site) -> None:
    asked: dict[str, Any] = {
        "prompt": "Once upon a time",
        "max_tokens": 24,
        "ignore_eos": True,
        "seed": 5,
        "temperature": 1.5,
    }
    plain = site.ask("completions", **asked)["choices"][0]["text"]
    told = site.ask("completions", logprobs=5, prompt_logprobs=2, return_token_ids=True, **asked)["choices"][0]
    assert told["text"] == plain
    assert len(told["token_ids"]) == len(told["logprobs"]["tokens"]) == 24
    assert len(told["prompt_logprobs"]) == len(told["prompt_token_ids"])
    ids = told["prompt_token_ids"][1:]
    assert all(str(one) in entry for one, entry in zip(ids, told["prompt_logprobs"][1:], strict=True))


def test_the_best_of_several_answers_are_shown_and_all_are_billed(site: Site) -> None:
    asked: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8, "seed": 5, "temperature": 2, "logprobs": 0}
    each = site.ask("completions", n=4, **asked)["choices"]
    means = {choice["text"]: sum(lp := choice["logprobs"]["token_logprobs"]) / len(lp) for choice in each}
    before = site.left()
    reply = site.ask("completions", "metered", best_of=4, n=2, **asked)
    assert [choice["text"] for choice in reply["choices"]] == sorted(means, key=lambda text: -means[text])[:2]
    assert reply["usage"]["completion_tokens"] == before[1] - site.left()[1]
    assert reply["usage"]["completion_tokens"] > sum(len(c["logprobs"]["tokens"]) for c in reply["choices"])


def test_several_answers_are_told_of_one_prompt(site: Site) -> None:
    asked: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4, "n": 3, "echo": True, "logprobs": 1}
    choices = site.ask("completions", **asked)["choices"]
    length = len(choices[0]["logprobs"]["tokens"]) - 4
    assert len({tuple(choice["logprobs"]["token_logprobs"][:length]) for choice in choices}) == 1
    assert all(choice["text"].startswith("Once upon a time") for choice in choices)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"prompt": "a", "n": 3}, "n"), ("completions", {"prompt": "a", "best_of": 3}, "best_of"),
        ("completions", {"prompt": "a", "logprobs": 4}, "logprobs"),
        ("completions", {"prompt": "a", "prompt_logprobs": 4}, "prompt_logprobs"),
        ("chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 4}, "top_logprobs"),
    ],
)  # fmt: skip
def test_a_policy_bounds_what_may_be_asked(site: Site, path: str, fields: dict[str, Any], param: str) -> None:
    error = site.refusal(path, "few", **fields)
    assert error["param"] == param and "limit max_" in error["message"]


def test_more_log_probabilities_than_an_answer_may_hold_are_refused(site: Site) -> None:
    error = site.refusal("completions", "acme", prompt=[5] * 1000, n=128, max_tokens=1000, logprobs=20)
    assert error["param"] == "logprobs" and "one answer may hold" in error["message"]


def test_the_official_client_reads_completions_with_log_probabilities(site: Site) -> None:
    with site.client("acme") as client:
        reply = client.completions.create(model="embedded", prompt="Once", max_tokens=3, logprobs=2, echo=True)
        with pytest.raises(openai.BadRequestError, match="cannot fill in the middle") as refused:
            client.completions.create(model="embedded", prompt="Once", suffix="end")
    assert refused.value.param == "suffix"
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.tokens is not None
    assert logprobs.token_logprobs[0] is None and len(logprobs.tokens) == len(logprobs.text_offset or [])


def test_tokens_are_drawn_as_biases_and_lists_of_words_allow(site: Site) -> None:
    asked: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 1.5, "seed": 3}
    plain = site.ask("completions", return_token_ids=True, **asked)["choices"][0]
    first = plain["token_ids"][0]
    biased = site.ask("completions", logit_bias={"300": 100}, return_token_ids=True, **asked)["choices"][0]
    assert set(biased["token_ids"]) == {300}
    allowed = site.ask("completions", allowed_token_ids=[301, 302], ignore_eos=True, return_token_ids=True, **asked)
    assert set(allowed["choices"][0]["token_ids"]) <= {301, 302}
    assert (
        first
        not in site.ask("completions", logit_bias={str(first): -100}, return_token_ids=True, **asked)["choices"][0][
            "token_ids"
        ]
    )
    said: list[Any] = [{"role": "user", "content": "Count from 3 to 9."}]
    for bad, text in (([], "5"), (["5"], None)):
        reply = site.ask("chat/completions", messages=said, temperature=0, max_tokens=24, bad_words=bad)
        assert ("5" in reply["choices"][0]["message"]["content"]) == (text is not None)


def test_of_a_prompt_that_is_cut_the_end_is_kept(site: Site) -> None:
    prompt = list(range(5, 505)) * 2
    cut = site.ask("completions", prompt=prompt, truncate_prompt_tokens=7, return_token_ids=True, max_tokens=1)
    assert cut["choices"][0]["prompt_token_ids"] == prompt[-7:] and cut["usage"]["prompt_tokens"] == 7
    context = httpx.get(f"{site.server.url}/v1/models", headers=site.authorization("acme")).json()["data"][0]
    most = context["max_model_len"]
    long = site.ask("completions", prompt=[5] * (most + 9), truncate_prompt_tokens=-1, max_tokens=3)
    assert long["usage"]["prompt_tokens"] == most - 3
    assert context["capabilities"]["logprobs"] is True and context["capabilities"]["vision"] is False
