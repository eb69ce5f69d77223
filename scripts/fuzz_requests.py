"""Sends requests at random over the fields that few ask for, and sees that each is answered and nothing stays behind:
`python -m scripts.fuzz_requests [--requests 20000] [--seed 0] [--dialects 0.5] [--stored 0]`.

`sluice serve` with the embedded model and limits that count tokens. A request begins as one that is served, and some of
its fields are given values at random: in range, at the edges, beyond, of other types, too many, too long. Every answer
has to be a 200 whose choices and log probabilities agree with what was asked, or a 400 that names a field; a 429 or 503
says that the server is busy. In the end no KV block, no reservation and no sequence is left, and the limits have lost
what usage said. A share of the requests, `--dialects`, are responses and Anthropic's messages (`fuzz_dialects`), and
another one, `--stored`, are calls of a tenant of its own about what is stored, and to embed, score and rank
(`fuzz_stored`). `--results` names a folder in which the figures are written to `fuzz.json`.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx

from labs.benchmarks.embeddings import save_encoder
from labs.benchmarks.report import Report
from scripts import fuzz_dialects
from scripts.fuzz_stored import StoredCalls, store_secrets
from tests.gateway.server_process import ServerProcess, running_server
from tests.gateway.tenant_site import make_keys

POLICY = """
tenants:
  fuzz: {limits: {input_tokens: 100M/day, output_tokens: 100M/day}}
  stored: {stored_responses: {bytes: 1MiB}, batches: {file_bytes: 4MiB, open: 4}}
  other: {}
"""
FLAGS = ("--threads", "1", "--refused-per-second", "1000000", "--max-waiting", "512")
CLIENTS = 16  # at a time
ANSWER_TIMEOUT_SECONDS = 60.0  # until an answer counts as not coming
LEFT = ("sluice_live_requests", "sluice_kv_blocks_used", "sluice_reservations_outstanding", "vllm:num_requests_running")

Make = Callable[[Random], Any]

WORDS = ["the", " cat", "\n", "日", "😀", "x" * 90, "<|end|>", "sat on", "\x00", "a", "zebra", "of"]
NUMBERS: list[Any] = [
    0,
    1,
    -1,
    2,
    5,
    20,
    21,
    128,
    129,
    300,
    2**31,
    2**63,
    -(2**63),
    10**30,
    0.5,
    -0.0,
    1e308,
    100,
    -100.5,
]
OTHERS: list[Any] = [None, True, False, "", "1", [], {}, [[]], {"a": 1}, ["a"], [None], "x" * 5000]


def number(random: Random) -> Any:
    return random.choice(NUMBERS)


def anything(random: Random) -> Any:
    return random.choice([*NUMBERS, *OTHERS])


def words(random: Random) -> Any:
    return [random.choice(WORDS) for _ in range(random.choice([0, 1, 2, 4, 4, 4, 65, 130]))]


def ids(random: Random) -> Any:
    return [random.choice([0, 5, 6, 300, random.randrange(1000)]) for _ in range(random.choice([1, 2, 9, 4000]))]


def good_ids(random: Random) -> Any:
    return [random.randrange(1000) for _ in range(random.choice([1, 2, 9, 400]))]


def bias(random: Random) -> Any:
    names = [*map(str, range(300)), "x", "01", "-1", "1.0", str(10**20)]
    count = random.choice([0, 1, 3, 50, 299, 305])
    names = [str(n) for n in range(count)] if random.random() < 0.8 else random.sample(names, min(count, len(names)))
    return {name: random.choice([0, 1, -100, 100, random.uniform(-100, 100)]) for name in names}


def small(random: Random) -> Any:
    return random.choice([0, 1, 2, 3, 5, 20])


def some(random: Random) -> Any:
    return random.choice([1, 2, 3, 5, 12])


FIELDS: dict[str, list[Make]] = {
    "logprobs": [small, small, lambda random: random.random() < 0.8], "top_logprobs": [small],
    "prompt_logprobs": [small], "echo": [lambda random: random.random() < 0.7], "n": [some], "best_of": [some],
    "max_tokens": [some, some, small], "logit_bias": [bias], "allowed_token_ids": [ids, good_ids], "bad_words": [words],
    "truncate_prompt_tokens": [small, lambda random: -1], "suffix": [lambda random: random.choice(WORDS)],
    "return_token_ids": [lambda random: True], "return_tokens_as_token_ids": [lambda random: True],
    "stream": [lambda random: random.random() < 0.5], "stop": [words], "seed": [small, number],
    "temperature": [lambda random: random.uniform(0, 2)], "min_tokens": [small], "stop_token_ids": [good_ids],
    "include_stop_str_in_output": [lambda random: True], "skip_special_tokens": [lambda random: False],
    "stream_options": [lambda random: {"include_usage": True, "continuous_usage_stats": random.random() < 0.5}],
    "continue_final_message": [lambda random: random.random() < 0.5], "documents": [lambda random: []],
    "ignore_eos": [lambda random: True],
}  # fmt: skip


COMPLETIONS, CHATS = {"echo", "best_of", "suffix"}, {"top_logprobs", "continue_final_message", "documents"}  # alone


def request(random: Random) -> tuple[str, dict[str, Any]]:
    """Returns a path and a body, of which most are served."""
    body: dict[str, Any] = {"model": "embedded", "max_tokens": random.randint(1, 12)}
    is_chat = random.random() < 0.4
    if is_chat:
        body["messages"] = [{"role": "user", "content": random.choice(["Hi", "Count from 3 to 9.", "日 😀"])}]
    else:
        body["prompt"] = random.choice(["Once", "Count from 3", ["a", "b"], good_ids(random), "日 😀 <|end|>"])
    fields = [name for name in FIELDS if name not in (COMPLETIONS if is_chat else CHATS) or random.random() < 0.05]
    for name in random.sample(fields, random.choice([1, 2, 2, 3, 4, 6])):
        body[name] = anything(random) if random.random() < 0.07 else random.choice(FIELDS[name])(random)
    if body.get("top_logprobs") and random.random() < 0.9:
        body["logprobs"] = True
    if is_chat and type(body.get("logprobs")) is int:
        body["logprobs"] = bool(body["logprobs"])
    if body.get("stream") is True:
        body.setdefault("stream_options", {"include_usage": True})
    return "/v1/chat/completions" if is_chat else "/v1/completions", body


class Fuzzer:
    """Sends requests and judges answers."""

    def __init__(self, server: ServerProcess, keys: dict[str, str], seed: int, dialects: float, stored: float) -> None:
        self.random = Random(seed)
        self._dialects, self._stored = dialects, stored
        self._calls = StoredCalls(self.random, store_secrets(server.url, keys["other"]))
        self.statuses: Counter[int] = Counter()
        self.stored: Counter[int] = Counter()  # statuses of calls about what is stored
        self.wrong: list[str] = []
        self.used = [0, 0]  # tokens of input and output, by the answers' usage
        self.params: Counter[str] = Counter()  # of refusals
        self.unknown = 0  # streams without usage
        self._server = server
        self._headers = {name: {"authorization": f"Bearer {key}"} for name, key in keys.items()}

    async def send(self, client: httpx.AsyncClient, count: int) -> None:
        for _ in range(count):
            if self.random.random() < self._stored:
                await self._send_stored(client)
                continue
            make = fuzz_dialects.request if self.random.random() < self._dialects else request
            path, body = make(self.random)
            try:
                reply = await client.post(self._server.url + path, json=body, headers=self._headers["fuzz"])
            except httpx.HTTPError as error:
                self._wrong(body, f"{type(error).__name__}: {error}")
                continue
            self.statuses[reply.status_code] += 1
            try:
                self._judge(path, body, reply)
            except Exception as error:  # noqa: BLE001 - an answer that cannot be read is a wrong one
                self._wrong(body, f"{type(error).__name__}: {error}: {reply.text[:300]}")

    async def _send_stored(self, client: httpx.AsyncClient) -> None:
        call = self._calls.next()
        given = call.form or ({} if call.body is None else {"json": call.body})
        told: dict[str, Any] = {"call": f"{call.method} {call.path[:200]}", "body": call.body}
        try:
            url = self._server.url + call.path
            reply = await client.request(call.method, url, headers=self._headers["stored"], **given)
        except httpx.HTTPError as error:
            self._wrong(told, f"{type(error).__name__}: {error}")
            return
        self.stored[reply.status_code] += 1
        try:
            self._calls.judge(call, reply)
        except Exception as error:  # noqa: BLE001 - as above
            self._wrong(told, f"{type(error).__name__}: {error}: {reply.text[:300]}")

    def _judge(self, path: str, body: dict[str, Any], reply: httpx.Response) -> None:
        is_dialect = "completions" not in path
        if reply.status_code == 400 and is_dialect:
            self.params[fuzz_dialects.check_refusal(path, body, reply)] += 1
        elif reply.status_code == 400:
            error = reply.json()["error"]
            assert error["message"].endswith(".") and error["param"] is not None, error
            self.params[error["param"].split("[")[0]] += 1
        elif reply.status_code in {429, 503, 529}:
            assert reply.headers.get("retry-after")
        elif is_dialect and reply.status_code not in {404, 413}:  # another model, or too many elements
            tokens = fuzz_dialects.judge(path, body, reply)
            self.used = [count + more for count, more in zip(self.used, tokens, strict=True)]
        elif is_dialect:
            assert reply.json()["error"]["message"]
        elif body.get("stream"):
            events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
            assert events[-1] == "[DONE]", events[-1]
            usage = next((one["usage"] for event in events[:-1] if not (one := json.loads(event))["choices"]), None)
            self._use(usage)
        else:
            assert reply.status_code == 200, reply.text[:300]
            self._judge_choices(body, reply.json())
            self._use(reply.json()["usage"])

    def _judge_choices(self, body: dict[str, Any], found: dict[str, Any]) -> None:
        prompts = len(body["prompt"]) if "prompt" in body and body["prompt"] == ["a", "b"] else 1
        assert len(found["choices"]) == prompts * (body.get("n") or 1), "another number of choices"
        for choice in found["choices"]:
            logprobs = choice["logprobs"]
            assert (logprobs is not None) == (body.get("logprobs") is not None and body["logprobs"] is not False), (
                "log probabilities or none"
            )
            if logprobs and "tokens" in logprobs:
                assert (
                    len({len(logprobs[name]) for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")})
                    == 1
                )

    def _use(self, usage: dict[str, int] | None) -> None:
        if usage is None:
            self.unknown += 1
        else:
            self.used[0] += usage["prompt_tokens"]
            self.used[1] += usage["completion_tokens"]

    def _wrong(self, body: dict[str, Any], what: str) -> None:
        self.wrong.append(f"{what}\n    {json.dumps(body)[:600]}")


async def fuzz(fuzzer: Fuzzer, requests: int) -> None:
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(timeout=ANSWER_TIMEOUT_SECONDS, limits=limits) as client, asyncio.TaskGroup() as group:
        for number_of_client in range(CLIENTS):
            share = requests // CLIENTS + (number_of_client < requests % CLIENTS)
            group.create_task(fuzzer.send(client, share))


def left_behind(server: ServerProcess) -> dict[str, float]:
    """Returns the server's leftovers after time to end everything, by metric."""
    deadline = time.monotonic() + 10
    while True:
        left = {name: value for name in LEFT if (value := server.metric(name))}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--http-workers", type=int, default=0)
    parser.add_argument("--dialects", type=float, default=0.5)
    parser.add_argument("--stored", type=float, default=0.0)
    parser.add_argument("--results", type=Path, help="a folder")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "policy.yaml").write_text(POLICY)
        keys = make_keys(directory / "state", "fuzz", "stored", "other")
        encoder = save_encoder(directory / "encoder")
        flags = (*FLAGS, "--policy", str(directory / "policy.yaml"), "--embedding-model", str(encoder))
        flags += ("--http-workers", str(options.http_workers))
        with running_server(directory, *flags) as server:
            fuzzer = Fuzzer(server, keys, options.seed, options.dialects, options.stored)
            began = time.monotonic()
            asyncio.run(fuzz(fuzzer, options.requests))
            left = left_behind(server)
            reply = httpx.get(f"{server.url}/v1/limits", headers={"authorization": f"Bearer {keys['fuzz']}"})
            gone = [entry["amount"] - entry["remaining"] for entry in reply.json()["data"]]
    print(f"{options.requests} requests in {time.monotonic() - began:.0f} s: {dict(sorted(fuzzer.statuses.items()))}")
    print(f"statuses of what is stored: {dict(sorted(fuzzer.stored.items()))}")
    print(f"refused for: {dict(fuzzer.params.most_common())}")
    print(f"left behind: {left or 'nothing'}")
    print(f"tokens in and out by usage: {fuzzer.used}, by the limits: {gone}; {fuzzer.unknown} streams told no usage")
    if not fuzzer.unknown and gone != fuzzer.used:
        fuzzer.wrong.append("the limits have not lost what usage says")
    print(f"wrong answers: {len(fuzzer.wrong)}")
    for one in fuzzer.wrong[:20]:
        print(f"  {one}")
    if options.results is not None:
        _write(options, fuzzer, left)
    return 1 if fuzzer.wrong or left else 0


def _write(options: argparse.Namespace, fuzzer: Fuzzer, left: dict[str, float]) -> None:
    report = Report("fuzz")
    rows = [
        {
            "status": str(status),
            "requests to generate": fuzzer.statuses[status],
            "of what is stored": fuzzer.stored[status],
        }
        for status in sorted({*fuzzer.statuses, *fuzzer.stored})
    ]
    report.add_table(f"answers by status, seed {options.seed}, {options.http_workers} HTTP workers", rows)
    report.at_most("wrong answers, hangs, or another tenant's contents", len(fuzzer.wrong), 0)
    report.at_most("gauges of work that stayed behind", len(left), 0)
    report.finish(options.results)


if __name__ == "__main__":
    sys.exit(main())
