"""What a benchmark asks a server first: its model, its context, and how many tokens its words are."""

from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from labs.bench.scenario import TenantTraffic
from labs.bench.wire import error_code
from labs.bench.workloads import CHAT, EMBEDDINGS, WORKLOADS, Prose
from labs.simulation.errors import OptionError

PROBE_WORDS = (40, 240)
DEFAULT_CONTEXT_TOKENS = 4096  # where a server does not tell it
PROBE_TIMEOUT_SECONDS = 120.0  # a server may load its model at the first request


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What prompts of wanted lengths are made by."""

    name: str
    context: int  # tokens
    tokens_per_word: float
    overhead: float  # tokens of a prompt without words


def probe(base: str, tenant: TenantTraffic) -> ModelFacts:
    """Ask with the tenant's key. Raises `OptionError` when the server refuses or is no such server."""
    with httpx.Client(headers=tenant.request_headers(), timeout=PROBE_TIMEOUT_SECONDS) as client:
        cards = _ask(client, "GET", f"{base}/v1/models").get("data") or [{}]
        card = next((card for card in cards if card.get("id") == tenant.model), cards[0])
        model = tenant.model or str(card.get("id", ""))
        counts = [_count(client, base, tenant, model, words) for words in PROBE_WORDS]
    per_word = (counts[1] - counts[0]) / (PROBE_WORDS[1] - PROBE_WORDS[0])
    if per_word <= 0:  # it tells no usage
        return ModelFacts(model, int(card.get("max_model_len") or DEFAULT_CONTEXT_TOKENS), 1.3, 0.0)
    overhead = max(0.0, counts[0] - per_word * PROBE_WORDS[0])
    return ModelFacts(model, int(card.get("max_model_len") or DEFAULT_CONTEXT_TOKENS), per_word, overhead)


def _count(client: httpx.Client, base: str, tenant: TenantTraffic, model: str, words: int) -> int:
    """The tokens of a prompt of this many words."""
    text = Prose(Random(), tokens_per_word=1.0).fresh(words)
    if WORKLOADS[tenant.workload].kind == "embeddings":
        body: dict[str, Any] = {"model": model, "input": [text]}
        path = EMBEDDINGS
    else:
        body, path = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}, CHAT
    return int((_ask(client, "POST", f"{base}{path}", body).get("usage") or {}).get("prompt_tokens") or 0)


def _ask(client: httpx.Client, method: str, url: str, body: object = None) -> dict[str, Any]:
    try:
        reply = client.request(method, url, json=body)
        answer = reply.json()
    except (httpx.HTTPError, ValueError) as error:
        raise OptionError("URL", url, f"is no OpenAI-compatible server: {error}") from None
    if reply.status_code != httpx.codes.OK or not isinstance(answer, dict):
        said = error_code(answer) if isinstance(answer, dict) and answer.get("error") else ""
        remedy = ": --key, or the variable OPENAI_API_KEY, has the key" if reply.status_code == 401 else ""
        raise OptionError("URL", url, f"answers a first request with {reply.status_code} {said}{remedy}")
    return answer
