"""Prompts and answers in the log: by consent alone, redacted, bounded, and read on record."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admin.logged_texts import MAX_CHARS, LoggedTexts, redacted
from gateway.admin.request_database import MAX_PENDING_TEXTS, RequestDatabase
from gateway.admin.request_storage import SqliteStorage
from gateway.admin.request_summary import RequestSummary
from quotas.policy.policy_file import parse_policy
from tests.gateway.server_process import bearer, eventually
from tests.gateway.telemetry.records import a_record
from tests.gateway.tenant_site import TenantSite, tenant_site

POLICY = """
tenants:
  open: {log_texts: whole}
  careful: {log_texts: redacted}
  silent: {}
"""
PROMPT = "Write to ada@example.com or +49 170 1234567, card 4111 1111 1111 1111."


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (PROMPT, "Write to [email] or [number], card [number]."),
        ("0170 1234567 0170 7654321 0170 1111111", "[number]"),
        ("4111 1111 1111 1111 4222 2222 2222 2222 is", "[number] is"),
        ("IBAN DE89 3704 0044 0532 0130 00, from 192.168.0.17", "IBAN [iban], from [ip]"),
        ("key sk-proj-abcdefghijklmnop1234 and AKIAIOSFODNN7EXAMPLE1", "key *** and [secret]"),
        (
            "2026-11-28 14:00, paid 12,500.00 for 3.14 x 10",
            "2026-11-28 14:00, paid 12,500.00 for 3.14 x 10",
        ),
    ],
)
def test_what_points_at_people_is_taken_out_and_other_numbers_stay(text: str, kept: str) -> None:
    assert redacted(text) == kept


@given(st.text(alphabet="0123456789 .-+()@abAZ_:/\n", max_size=2000), st.sampled_from(["ada@example.com", "123456789"]))
def test_nothing_around_it_hides_what_is_taken_out(around: str, secret: str) -> None:
    assert secret not in redacted(f"{around}\n{secret}\n{around}")


@pytest.mark.parametrize(
    "text",
    [
        "1" * 50_000,
        "a@" * 25_000,
        "a.b" * 20_000 + "@",
        "DE12" * 10_000,
        "1.1." * 10_000,
        "1 " * 25_000,
        "1" + " " * 50_000,
    ],
)
def test_no_text_is_slow_to_redact(text: str) -> None:
    redacted(text)  # a pattern that goes back and forth would not end


def test_a_request_without_consent_or_an_answer_has_no_texts() -> None:
    policy = parse_policy({"policy.yaml": POLICY.encode()})
    texts = LoggedTexts(lambda: policy, [lambda ids: "x" * 50_000])
    assert texts.of(a_record(tenant="silent")) is None
    assert texts.of(a_record(tenant="stranger")) is None
    assert texts.of(a_record(tenant="open", timelines=[])) is None
    made = texts.of(a_record(tenant="open"))
    assert made is not None
    assert [len(text) for text in made()[0].values()] == [MAX_CHARS, MAX_CHARS]


def test_texts_are_decoded_by_the_model_of_their_request_and_once() -> None:
    policy = parse_policy({"policy.yaml": POLICY.encode()})
    asked = list[str]()

    def decoder(name: str) -> Callable[[Sequence[int]], str]:
        def decode(ids: Sequence[int]) -> str:
            asked.append(name)
            return f"{name} {len(ids)}"

        return decode

    sequence = SimpleNamespace(request=SimpleNamespace(prompt=[1, 2], model=1), output=[3])
    record = SimpleNamespace(tenant="open", engine=SimpleNamespace(timelines=[SimpleNamespace(sequence=sequence)]))
    made = LoggedTexts(lambda: policy, [decoder("first"), decoder("second")]).of(cast(Any, record))
    assert made is not None
    assert made() == made() == [{"prompt": "second 2", "answer": "second 1"}]
    assert asked == ["second", "second"]


async def test_texts_that_wait_are_bounded(tmp_path: Path) -> None:
    database = RequestDatabase(SqliteStorage(tmp_path / "requests.sqlite", 2**24), 1e12)
    for number in range(MAX_PENDING_TEXTS + 3):
        summary = RequestSummary.of(a_record(response_id=f"r{number}"))
        database.add(summary, lambda: [{"prompt": "\0lone \ud800", "answer": "<b>"}])
    assert await database.texts("r0") == [{"prompt": "\ufffdlone ?", "answer": "<b>"}]
    assert await database.texts(f"r{MAX_PENDING_TEXTS}") is None
    assert await database.texts("nobody") is None
    await database.close()


def test_texts_are_read_by_operators_on_record_as_the_policy_says(tmp_path: Path) -> None:
    with tenant_site(TenantSite, tmp_path, POLICY) as site:
        names = {}
        for tenant in ("open", "careful", "silent"):
            reply = site.post(tenant, messages=[{"role": "user", "content": PROMPT}], max_tokens=8)
            names[tenant] = reply.json()["id"], reply.json()["choices"][0]["message"]["content"]

        def asked(tenant: str) -> httpx.Response:
            return site.server.ask_admin(f"request-log/{names[tenant][0]}/texts", "POST")

        eventually(lambda: asked("open").is_success)
        copied = site.authorization("careful") | {"x-request-id": names["open"][0]}
        body = {"model": "embedded", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
        assert httpx.post(f"{site.server.url}/v1/chat/completions", headers=copied, json=body).is_success
        eventually(lambda: len(site.server.admin("request-log")["requests"]) == 4)
        (whole,), (careful,) = (asked(tenant).json()["texts"] for tenant in ("open", "careful"))
        assert PROMPT in whole["prompt"]
        assert names["open"][1] in whole["answer"]
        assert "Write to [email] or [number], card [number]." in careful["prompt"]
        assert asked("silent").status_code == 404
        assert "log_texts: none" in asked("silent").json()["error"]["message"]
        entries = site.server.admin("audit")["entries"]
        assert ("requests.read_texts", names["open"][0]) in {(one["action"], one["target"]) for one in entries}
        url = f"{site.server.admin_url}/admin/v1/request-log/{names['open'][0]}/texts"
        assert httpx.post(url, headers=bearer(site.keys["open"])).status_code == 401
        assert PROMPT not in site.server.ask_admin("request-log").text
