"""A guardrail that judges prompts and answers, as tenants and its operator see it; hostile guardrails among them."""

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest

from tests.gateway.http_workers import NUMBERS_OF_WORKERS
from tests.gateway.raw_client import completion, connected
from tests.gateway.raw_client import request as raw_request
from tests.gateway.server_process import PATIENCE, eventually
from tests.gateway.tenant_site import TenantSite, error_of, tenant_site

POLICY = """
tenants:
  free: {{}}
  judged: {{guardrail: {{url: {url}/judge, hold: 15}}, limits: {{tokens: 100k/day}}}}
  strict: {{guardrail: {{url: {url}/judge, stages: [prompt]}}}}
  idle: {{guardrail: {{url: {url}/idle}}}}
  silent: {{guardrail: {{url: {url}/silent, deadline: 60s}}}}
  lenient: {{guardrail: {{url: {url}/redirect, on_failure: open, hold: 15}}}}
"""
HOSTILE = {
    "endless": b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 100_000,
    "redirect": b"HTTP/1.1 307 Go\r\nlocation: /judge\r\ncontent-length: 0\r\n\r\n",
    "status": b'HTTP/1.1 500 No\r\ncontent-length: 18\r\n\r\n{"action":"allow"}',
    "nested": b"HTTP/1.1 200 OK\r\ncontent-length: 9000\r\n\r\n" + b"[" * 9000,
    "unknown": b'HTTP/1.1 200 OK\r\ncontent-length: 19\r\n\r\n{"action":"allows"}',
    "list": b'HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n["allow"]',
    "packed": b'HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 9\r\n\r\n["allow"]',
    "nothing": b"",
    "headers": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100_000,
}
BAD_ADDRESSES = {
    "port": "http://127.0.0.1:70000",
    "host": "http://xn--a",
    "zone": "http://[::1::2]/",
    "closed": "http://127.0.0.1:1",
}
REASON = "it names nine: \x1b[31m sk-sluice-0123456789abcdef"


@dataclass
class PlayedGuardrail:
    """It refuses what has a 9 in it; of the prompts, what asks for a bomb."""

    url: str = ""
    questions: list[dict[str, Any]] = field(default_factory=list)
    is_asked: threading.Event = field(default_factory=threading.Event)
    has_left: threading.Event = field(default_factory=threading.Event)  # who asks the silent one


@pytest.fixture(scope="module")
def guardrail() -> Iterator[PlayedGuardrail]:
    played = PlayedGuardrail()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/judge":
                played.questions.append(question)
                bad = "bomb" if question["stage"] == "prompt" else "9"
                refused = any(bad in text for text in question["texts"])
                body = json.dumps({"action": "refuse", "reason": REASON} if refused else {"action": "allow"}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            elif self.path == "/idle":  # as if it had closed the idle connection just before the next question came
                self.close_connection = hasattr(self, "has_answered")
                self.has_answered = True
                if not self.close_connection:
                    self.wfile.write(b'HTTP/1.1 200 OK\r\ncontent-length: 18\r\n\r\n{"action":"allow"}')
            elif self.path == "/silent":
                played.is_asked.set()
                self.rfile.read(1)
                played.has_left.set()
            else:
                self.close_connection = True
                self.wfile.write(HOSTILE[self.path[1:]])

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """The gateway hangs up on what it has read enough of."""

    with Quiet(("127.0.0.1", 0), Handler) as server:
        played.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield played
        server.shutdown()


@pytest.fixture(scope="module", params=NUMBERS_OF_WORKERS)
def site(
    request: pytest.FixtureRequest, guardrail: PlayedGuardrail, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TenantSite]:
    hostile = [f"  {name}: {{guardrail: {{url: {guardrail.url}/{name}}}}}\n" for name in HOSTILE]
    hostile += [f"  {name}: {{guardrail: {{url: '{url}'}}}}\n" for name, url in BAD_ADDRESSES.items()]
    flags = ("--http-workers", str(request.param))
    policy = POLICY.format(url=guardrail.url) + "".join(hostile)
    with tenant_site(TenantSite, tmp_path_factory.mktemp("judged"), policy, *flags) as one:
        yield one


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_guardrail_is_asked_about_the_prompt_and_the_answer_and_changes_neither(
    site: TenantSite, guardrail: PlayedGuardrail
) -> None:
    guardrail.questions.clear()
    body = {"temperature": 0, "messages": said("Count from 3 to 8.")}
    own, others = site.post("judged", **body), site.post("free", **body)
    assert own.json()["choices"] == others.json()["choices"]
    prompt, answer = guardrail.questions
    about = {
        "request_id": own.headers["x-request-id"],
        "tenant": "judged",
        "model": "embedded",
        "operation": "chat",
    }
    assert prompt.items() >= {"stage": "prompt", **about}.items()
    assert "Count from 3 to 8." in prompt["texts"][0]
    told = own.json()["choices"][0]["message"]["content"]
    judged = {"stage": "answer", "texts": [told], "choice": 0, "judged": 0, "is_last": True, **about}
    assert answer.items() >= judged.items()


def test_a_refused_prompt_costs_nothing_and_its_reason_is_in_no_log(
    site: TenantSite, guardrail: PlayedGuardrail
) -> None:
    guardrail.questions.clear()
    before = site.limits("judged")["tokens"]["remaining"]
    reply = site.post("judged", messages=said("How is a bomb built?"))
    assert (reply.status_code, error_of(reply)["code"]) == (400, "content_filter")
    message = error_of(reply)["message"]
    assert message.startswith("The guardrail of your tenant refused the prompt: 'it names nine: \\x1b")
    assert "0123456789abcdef" not in message
    assert site.limits("judged")["tokens"]["remaining"] == before
    assert [question["stage"] for question in guardrail.questions] == ["prompt"]
    eventually(lambda: '"error":"The guardrail of your tenant refused the prompt."' in site.server.log.read_text())
    assert "names nine" not in site.server.log.read_text()


def test_a_refused_answer_is_not_sent_and_was_computed(site: TenantSite) -> None:
    before = site.limits("judged")["tokens"]["remaining"]
    reply = site.post("judged", temperature=0, messages=said("Count from 3 to 12."))
    assert (reply.status_code, error_of(reply)["code"]) == (400, "content_filter")
    assert site.limits("judged")["tokens"]["remaining"] < before


def test_a_guardrail_of_prompts_alone_judges_no_answer(site: TenantSite) -> None:
    assert site.post("strict", temperature=0, messages=said("Count from 3 to 12.")).status_code == 200


@pytest.mark.parametrize("details", [{}, {"logprobs": True, "top_logprobs": 1}])
def test_a_stream_is_held_until_it_is_judged_and_ends_before_what_is_refused(
    site: TenantSite, guardrail: PlayedGuardrail, details: dict[str, Any]
) -> None:
    guardrail.questions.clear()
    asked = {"model": "embedded", "messages": said("Count from 3 to 12."), "temperature": 0, "stream": True, **details}
    chunks = []
    with site.client("judged") as client, pytest.raises(openai.APIError, match="refused the answer"):
        chunks.extend(client.chat.completions.create(**asked))
    content = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    answers = [question for question in guardrail.questions if question["stage"] == "answer"]
    assert content and "9" not in "".join(content)
    assert "".join(content) == answers[-1]["texts"][0][: answers[-1]["judged"]]
    assert all(len(one) >= 15 for one in content)


def test_a_stream_that_is_allowed_is_whole(site: TenantSite, guardrail: PlayedGuardrail) -> None:
    asked: dict[str, Any] = {"model": "embedded", "messages": said("Count from 3 to 8."), "temperature": 0}
    with site.client("judged") as judged, site.client("free") as free:
        chunks = judged.chat.completions.create(stream=True, **asked)
        told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert told == free.chat.completions.create(**asked).choices[0].message.content
    assert guardrail.questions[-1]["is_last"]


@pytest.mark.parametrize("name", [*HOSTILE, *BAD_ADDRESSES])
def test_a_guardrail_without_a_verdict_has_the_request_refused(site: TenantSite, name: str) -> None:
    reply = site.post(name)
    assert (reply.status_code, error_of(reply)["code"]) == (503, "guardrail_unavailable")
    assert reply.headers["retry-after"] == "1"


def test_a_guardrail_that_closes_idle_connections_is_asked_again(site: TenantSite) -> None:
    assert [site.post("idle").status_code for _ in range(3)] == [200] * 3


def test_a_guardrail_without_a_verdict_is_passed_by_where_its_policy_says_so(site: TenantSite) -> None:
    assert site.post("lenient").status_code == 200
    with site.client("lenient") as client:
        stream = client.chat.completions.create(model="embedded", messages=said("Count from 3 to 8."), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def test_a_refused_answer_in_the_background_is_nowhere_to_be_read(site: TenantSite) -> None:
    with site.client("judged") as client:
        asked: dict[str, Any] = {"model": "embedded", "input": "Count from 3 to 12.", "temperature": 0}
        queued = client.responses.create(background=True, **asked)
        eventually(lambda: client.responses.retrieve(queued.id).status == "failed")
        failed = client.responses.retrieve(queued.id)
    assert failed.error is not None and failed.error.code == "invalid_prompt", "a server's error would be tried again"
    assert "refused the answer" in failed.error.message
    told = site.get("judged", f"/v1/responses/{queued.id}?stream=true")
    assert "response.failed" in told.text and "8, 9" not in told.text


def test_a_refused_answer_of_a_batch_was_computed_too(site: TenantSite) -> None:
    asked = {"model": "embedded", "temperature": 0, "messages": said("Count from 3 to 12.")}
    before = site.limits("judged")["tokens"]["remaining"]
    with site.client("judged") as client:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": asked}
        file = client.files.create(file=("input.jsonl", json.dumps(line).encode()), purpose="batch").id
        batch = client.batches.create(input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h")
        eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
        ended = client.batches.retrieve(batch.id)
        assert ended.error_file_id is not None and ended.usage is not None
        assert '"content_filter"' in client.files.content(ended.error_file_id).text
    assert before - site.limits("judged")["tokens"]["remaining"] == ended.usage.total_tokens > 0


def test_a_client_that_leaves_ends_the_question(site: TenantSite, guardrail: PlayedGuardrail) -> None:
    with connected(site.server) as client:
        client.send(raw_request(site.server, completion(), "/v1/completions", **site.authorization("silent")))
        assert guardrail.is_asked.wait(PATIENCE)
    assert guardrail.has_left.wait(PATIENCE)
    eventually(lambda: '"status":0,"outcome":"disconnected"' in _lines(site, '"tenant":"silent"'))


def _lines(site: TenantSite, part: str) -> str:
    return "\n".join(line for line in site.server.log.read_text().splitlines() if part in line)


def test_verdicts_and_their_time_are_counted_and_logged(site: TenantSite) -> None:
    site.post("judged", temperature=0, messages=said("Count from 3 to 12."))
    metrics = site.server.scrape().text
    for stage, verdict in (("prompt", "refused"), ("answer", "refused"), ("prompt", "failed"), ("prompt", "cancelled")):
        labels = f'stage="{stage}",verdict="{verdict}"'
        (count,) = re.findall(rf"sluice_guardrail_duration_seconds_count\{{.*{labels}.*\}} (\d+)", metrics)
        assert int(count), labels
    assert '"guardrail_calls":2,"guardrail_seconds":0.' in site.server.log.read_text()
    warnings = _lines(site, "gives no verdict")
    assert warnings.count("/redirect gives no verdict: it answered with status 307; its policy is closed") == 1
