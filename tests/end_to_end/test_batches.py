"""Files and batches, as OpenAI's client uses them: each line once, across kills, and no tenant learns of another's."""

import json
import re
import signal
import socket
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch
from redis import Redis

from gateway.tenants.auth import new_key
from tests.gateway.server_process import PATIENCE, ROOT, bearer, eventually
from tests.gateway.tenant_site import TenantSite, error_of, site_fixture, tenant_site

POLICY = """
aliases: {quick: [embedded]}
tenants:
  acme: {limits: {tokens: 10M/min, concurrent_requests: 2}}
  globex: {price: {input: 1/1M, output: 2/1M, currency: EUR, batch: 0.5}}
  small: {batches: {file_bytes: 20kB, lines: 3, open: 1}}
  none: {batches: {file_bytes: 0B}}
  away: {}
"""
CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
LEASE = 3
UNKNOWN_FILE, UNKNOWN_BATCH = f"file-{'0' * 32}", f"batch_{'0' * 32}"


FLAGS = ("--quota-lease", str(LEASE), "--refused-per-second", "1000")
WORKERS = (pytest.param(0, id="alone", marks=pytest.mark.nightly), pytest.param(2, id="with HTTP workers"))
site = site_fixture(TenantSite, POLICY, *FLAGS, workers=WORKERS)


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"model": "embedded", "messages": [{"role": "user", "content": "Count from 3 to 6."}], "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": asked | body}


def upload(client: openai.OpenAI, *lines: Any) -> str:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    return client.files.create(file=("input.jsonl", text.encode()), purpose="batch").id


def create(client: openai.OpenAI, file: str, endpoint: Any = CHAT, **options: Any) -> Batch:
    given: Any = {"completion_window": "24h"} | options
    return client.batches.create(input_file_id=file, endpoint=endpoint, **given)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    found = [batch]

    def has_ended() -> bool:
        found[0] = client.batches.retrieve(batch.id)
        return found[0].status in ENDED

    eventually(has_ended)
    return found[0]


def results(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    return [] if file is None else [json.loads(one) for one in client.files.content(file).text.splitlines()]


def used_by(site: TenantSite, tenant: str) -> Counter[str]:
    rows = site.server.admin("usage")["rows"]
    return Counter({k: v for row in rows if row["tenant"] == tenant for k, v in row.items() if isinstance(v, int)})


def test_the_flow_of_the_official_client(site: TenantSite) -> None:
    with site.client("acme") as client:
        models = ["embedded", "quick"]
        lines = [line(f"a-{n}", max_tokens=4 + n, model=models[n % 2]) for n in range(6)]
        lines.append(line("bad", temperature=9))
        file = client.files.create(file=("naïve.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        assert (file.object, file.filename, file.purpose, file.status) == ("file", "naïve.jsonl", "batch", "processed")
        batch = create(client, file.id, metadata={"night": "1"})
        assert batch.status == "validating" and batch.metadata == {"night": "1"} and batch.endpoint == CHAT
        batch = ended(client, batch)
        assert batch.status == "completed" and batch.errors is None and batch.completed_at is not None
        assert batch.request_counts is not None
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (7, 6, 1)
        output, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)
        assert [one["custom_id"] for one in output] == [f"a-{n}" for n in range(6)]
        assert all(one["response"]["status_code"] == 200 and one["error"] is None for one in output)
        assert output[0]["response"]["body"]["choices"][0]["message"]["content"].startswith("3")
        (bad,) = errors
        assert bad["custom_id"] == "bad" and bad["response"]["status_code"] == 400
        assert bad["response"]["body"]["error"]["param"] == "temperature"
        assert client.batches.list(limit=5).data[0].id == batch.id
        assert {one.id for one in client.files.list()} >= {file.id, batch.output_file_id, batch.error_file_id}
        assert client.files.content(file.id).read() == "\n".join(map(json.dumps, lines)).encode()
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)


def test_every_endpoint_of_a_line_and_the_ledger_adds_up(site: TenantSite) -> None:
    before = used_by(site, "globex")
    total: Counter[str] = Counter()
    with site.client("globex") as client:
        for endpoint, body in (
            ("/v1/completions", {"prompt": "One, two, three", "max_tokens": 5}),
            ("/v1/responses", {"input": "Count from 1 to 3.", "temperature": 0}),
            (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "stop": ["."], "max_tokens": 9}),
        ):
            asked = [
                {"custom_id": f"{n}", "method": "POST", "url": endpoint, "body": {"model": "embedded", **body}}
                for n in range(3)
            ]
            batch = ended(client, create(client, upload(client, *asked), endpoint))
            assert batch.status == "completed", batch
            for one in results(client, batch.output_file_id):
                usage = one["response"]["body"]["usage"]
                total["input_tokens"] += usage.get("prompt_tokens", usage.get("input_tokens"))
                total["output_tokens"] += usage.get("completion_tokens", usage.get("output_tokens"))
                total["requests"] += 1
            assert batch.error_file_id is None
        told = client.get(f"/batches/{batch.id}", cast_to=httpx.Response).json()["usage"]
        assert told["total_tokens"] > 0
    used = used_by(site, "globex")
    used.subtract(before)
    assert {name: used[name] for name in ("input_tokens", "output_tokens")} == {
        name: total[name] for name in ("input_tokens", "output_tokens")
    }
    costs = [row["costs"] for row in site.server.admin("usage")["rows"] if row["tenant"] == "globex"]
    assert sum(Decimal(cost["EUR"]) for cost in costs) * 10**6 * 2 == total["input_tokens"] + 2 * total["output_tokens"]


PROBLEMS: tuple[tuple[list[Any], str, int | None, str | None], ...] = (
    ([line("a"), "not json"], "invalid_json_line", 2, None),
    (["[" * 5000], "invalid_json_line", 1, None),
    (
        [line("a") | {"body": {"model": "embedded", "x": json.loads("[" * 200 + "]" * 200)}}],
        "invalid_request",
        1,
        "body",
    ),
    (["[1]"], "invalid_json_line", 1, None),
    ([line("a", url="/v1/completions")], "mismatched_endpoint", 1, "url"),
    ([line("a") | {"method": "GET"}], "invalid_method", 1, "method"),
    ([line("a") | {"more": 1}], "unknown_field", 1, "more"),
    ([line("a") | {"custom_id": 7}], "invalid_custom_id", 1, "custom_id"),
    ([line(""), line("b")], "invalid_custom_id", 1, "custom_id"),
    ([line("a"), "", line("a")], "duplicate_custom_id", 3, "custom_id"),
    ([line("a", model="gpt-4")], "model_not_found", 1, "body.model"),
    ([line("a", stream=True)], "invalid_request", 1, "body.stream"),
    ([line("a") | {"body": "text"}], "invalid_request", 1, "body"),
    ([line(str(n)) for n in range(4)], "too_many_lines", 4, None),
    (["\n \n"], "empty_file", None, None),
)


@pytest.mark.parametrize(("lines", "code", "number", "param"), PROBLEMS)
def test_a_file_with_a_wrong_line_fails_as_a_whole_and_names_line_and_field(
    site: TenantSite, lines: list[Any], code: str, number: int | None, param: str | None
) -> None:
    with site.client("small") as client:
        file = upload(client, *lines)
        batch = ended(client, create(client, file))
        assert batch.status == "failed" and batch.failed_at is not None and batch.output_file_id is None
        assert batch.errors is not None and batch.errors.data is not None
        problem = batch.errors.data[0]
        assert (problem.code, problem.line, problem.param) == (code, number, param), problem.message
        client.files.delete(file)


def test_a_tenant_learns_nothing_of_anothers_files_and_batches(site: TenantSite) -> None:
    with site.client("acme") as mine, site.client("globex") as theirs:
        file = upload(mine, line("a", max_tokens=2))
        batch = create(mine, file)
        calls: tuple[tuple[Callable[[str], object], str, str], ...] = (
            (theirs.files.retrieve, file, UNKNOWN_FILE),
            (theirs.files.content, file, UNKNOWN_FILE),
            (theirs.files.delete, file, UNKNOWN_FILE),
            (theirs.batches.retrieve, batch.id, UNKNOWN_BATCH),
            (theirs.batches.cancel, batch.id, UNKNOWN_BATCH),
            (lambda name: create(theirs, name), file, UNKNOWN_FILE),
        )
        for call, foreign, unknown in calls:
            said = []
            for name in (foreign, unknown):
                with pytest.raises(openai.NotFoundError) as refused:
                    call(name)
                said.append(refused.value.message.replace(name, "X"))
            assert said[0] == said[1]
        assert batch.id not in {one.id for one in theirs.batches.list()}
        assert file not in {one.id for one in theirs.files.list()}
        assert ended(mine, batch).status == "completed"


def test_the_time_of_an_answer_does_not_tell_a_foreign_file_or_batch_from_an_unknown_one(site: TenantSite) -> None:
    with site.client("acme") as mine:
        file = upload(mine, line("a", max_tokens=2))
        batch = ended(mine, create(mine, file)).id
    files = [("GET", "/v1/files/{}"), ("GET", "/v1/files/{}/content"), ("DELETE", "/v1/files/{}")]
    site.check_alike("globex", files, file, UNKNOWN_FILE)
    site.check_alike("globex", [("GET", "/v1/batches/{}"), ("POST", "/v1/batches/{}/cancel")], batch, UNKNOWN_BATCH)


def test_a_cancelled_and_an_expired_batch_keep_what_is_done(site: TenantSite) -> None:
    with site.client("globex") as client:
        many = upload(client, *[line(f"{n}", max_tokens=60, ignore_eos=True) for n in range(400)])
        batch = create(client, many)
        eventually(lambda: num_completed(client, batch.id) > 2)
        assert client.batches.cancel(batch.id).status == "cancelling"
        cancelled = ended(client, batch)
        expired = ended(client, create(client, many, completion_window="2s"))
        for one, status in ((cancelled, "cancelled"), (expired, "expired")):
            assert one.status == status and one.request_counts is not None
            output, errors = results(client, one.output_file_id), results(client, one.error_file_id)
            assert len(output) == one.request_counts.completed
            assert sorted(each["custom_id"] for each in (*output, *errors)) == sorted(map(str, range(400)))
            assert all(each["error"]["code"] == f"batch_{status}" and each["response"] is None for each in errors)
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled any more"):
            client.batches.cancel(expired.id)
    assert site.server.metric("sluice_requests_total", 'outcome="disconnected",class="spare"') > 0
    assert 'outcome="failed",class="spare"' not in site.server.scrape().text


def test_limits_of_files_and_batches(site: TenantSite) -> None:
    with site.client("small") as client:
        with pytest.raises(openai.BadRequestError, match=r"batches\.file_bytes is 20kB") as refused:
            upload(client, "x" * 30_000)
        assert (refused.value.code, refused.value.param) == ("quota_unsatisfiable", "file")
        file = upload(client, "x" * 15_000)
        with pytest.raises(openai.BadRequestError, match=r"batches\.file_bytes is 20kB"):
            upload(client, "x" * 15_000)
        client.files.delete(file)
        file = upload(client, *[line(str(n), max_tokens=400, ignore_eos=True) for n in range(3)])
        batch = create(client, file)
        with pytest.raises(openai.BadRequestError, match=r"batches\.open is 1"):
            create(client, file)
        client.batches.cancel(batch.id)
        ended(client, batch)
    with site.client("none") as client, pytest.raises(openai.BadRequestError, match=r"batches\.file_bytes is 0B"):
        upload(client, line("a"))


FORM = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n'
HOSTILE: tuple[tuple[str, bytes], ...] = (
    ("application/json", b"{}"),
    ("multipart/form-data", FORM + FILE + b"--x--\r\n"),
    ("multipart/form-data; boundary=" + "x" * 100, b""),
    ("multipart/form-data; boundary=x", b""),
    ("multipart/form-data; boundary=x", FORM + FILE),
    ("multipart/form-data; boundary=x", FORM + FILE[:-6]),
    ("multipart/form-data; boundary=x", FORM + b"--x--\r\n"),
    ("multipart/form-data; boundary=x", FILE + b"--x--\r\n"),
    ("multipart/form-data; boundary=x", FORM + FILE + FILE + b"--x--\r\n"),
    ("multipart/form-data; boundary=x", FORM * 20 + FILE + b"--x--\r\n"),
    ("multipart/form-data; boundary=x", FORM + FILE.replace(b"{}", b"") + b"--x--\r\n"),
    ("multipart/form-data; boundary=x", FORM + FILE.replace(b'"f"', b'"\x00"') + b"--x--\r\n"),
    ("multipart/form-data; boundary=x", FORM + FILE.replace(b'"f"', b'"\xff"') + b"--x--\r\n"),
    ("multipart/form-data; boundary=x", FORM + FILE.replace(b'"f"', b'"' + b"f" * 5000 + b'"') + b"--x--\r\n"),
    ("multipart/form-data; boundary=x", FORM + FILE.replace(b'"file"', b'"\x00evil"') + b"--x--\r\n"),
    ("multipart/form-data; boundary=x", FORM + b"--x\r\nno: name\r\n\r\n\r\n--x--\r\n"),
    ("multipart/form-data; boundary=x", FORM.replace(b"batch", b"fine-tune") + FILE + b"--x--\r\n"),
    ("multipart/form-data; boundary=x", FORM.replace(b"batch", b"b" * 9000) + FILE + b"--x--\r\n"),
    ("multipart/form-data; boundary=x", FORM + FILE + b"--xyz\r\n"),
    ("multipart/form-data; boundary=x", b"\x00" * 100_000),
    ("multipart/form-data; boundary=x", b"--x\r\n" + b"a" * 100_000),
)


@pytest.mark.parametrize(("content_type", "body"), HOSTILE)
def test_a_malformed_upload_is_a_typed_error_and_leaves_nothing(
    site: TenantSite, content_type: str, body: bytes
) -> None:
    headers = site.authorization("globex") | {"content-type": content_type}
    before = site.get("globex", "/v1/files?limit=100").json()["data"]
    reply = httpx.post(f"{site.server.url}/v1/files", content=body, headers=headers, timeout=PATIENCE)
    assert reply.status_code == 400 and error_of(reply)["message"]
    assert site.get("globex", "/v1/files?limit=100").json()["data"] == before


@pytest.mark.parametrize("length", ["10", "999999999999", "-1", "5, 6", "x"])
def test_a_content_length_that_lies_is_a_typed_error(site: TenantSite, length: str) -> None:
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {site.keys['globex']}\r\n"
        f"content-type: multipart/form-data; boundary=x\r\ncontent-length: {length}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(site.server.url.rpartition(":")[2])), PATIENCE) as connection:
        connection.sendall(head.encode() + FORM + FILE + b"--x--\r\n")
        answer = connection.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/batches", b"{"),
        ("/v1/batches", b"[]"),
        ("/v1/batches", b'{"input_file_id": 7}'),
        ("/v1/batches", b'{"input_file_id": "\\u0000", "endpoint": "/v1/messages", "completion_window": "24h"}'),
        ("/v1/batches", b'{"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "8d"}'),
        ("/v1/batches", b'{"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h", "x": 1}'),
        ("/v1/batches/..%2f..%2fx/cancel", b""),
    ],
)
def test_a_malformed_batch_is_a_typed_error(site: TenantSite, path: str, body: bytes) -> None:
    headers = site.authorization("globex") | {"content-type": "application/json"}
    reply = httpx.post(f"{site.server.url}{path}", content=body, headers=headers, timeout=PATIENCE)
    assert reply.status_code in (400, 404) and error_of(reply)["message"]


@pytest.mark.parametrize(
    "path", ["files?limit=0", "files?limit=x", "batches?limit=101", "batches?after=%00", "files/%00", "batches/x%0a"]
)
def test_a_malformed_question_is_a_typed_error(site: TenantSite, path: str) -> None:
    reply = site.get("globex", f"/v1/{path}")
    assert reply.status_code in (400, 404) and error_of(reply)["message"]


def test_what_is_stored_is_sealed_and_private(site: TenantSite) -> None:
    with site.client("acme") as client:
        file = upload(client, line("a", messages=[{"role": "user", "content": "a secret of acme"}]))
    folder = (
        site.store.directory / "files" if hasattr(site.store, "directory") else site.policy.parent / "state" / "files"
    )
    (path,) = folder.glob(f"*/{file}")
    assert path.stat().st_mode & 0o777 == 0o600 and b"secret" not in path.read_bytes()


def test_a_disk_that_takes_no_file_is_told(site: TenantSite) -> None:
    folder = site.policy.parent / "state" / "files"
    folder.mkdir(exist_ok=True)
    (folder / "t-away").symlink_to("/nowhere")
    with site.client("away") as client, pytest.raises(openai.InternalServerError) as refused:
        upload(client, line("a"))
    assert (refused.value.status_code, refused.value.code) == (503, "files_unavailable")
    assert site.get("away", "/v1/files").json()["data"] == []
    (folder / "t-away").unlink()


def test_all_that_is_stored_is_told_of_upgrades(site: TenantSite) -> None:
    """docs/operations.md has a row for each file of the state directory and for the keys of the store."""
    section = (ROOT / "docs" / "operations.md").read_text().split("## Upgrade and rollback")[1].split("\n## ")[0]
    state = site.policy.parent / "state"
    told = {*re.findall(r"`([^`]+)`", section)}
    assert {path.name.removesuffix("-wal").removesuffix("-shm") for path in state.iterdir()} - {"lock"} <= told
    with Redis(unix_socket_path=str(state / "store" / "socket")) as store:
        assert all(key.startswith(b"sluice:") for key in store.scan_iter())


def num_completed(client: openai.OpenAI, batch: str) -> int:
    counts = client.batches.retrieve(batch).request_counts
    return 0 if counts is None else counts.completed


def test_each_line_is_answered_and_settled_once_across_kills(tmp_path: Path) -> None:
    policy, total, batch = "tenants: {acme: {limits: {tokens: 10M/day}}}", 60, ""
    for least in (10, 25, total):
        site_of_life = tenant_site(TenantSite, tmp_path, policy, "--quota-lease", str(LEASE))
        with site_of_life as site, site.client("acme") as client:
            if not batch:
                lines = [line(f"{n}", max_tokens=12 + n % 9, ignore_eos=True) for n in range(total)]
                batch = create(client, upload(client, *lines)).id
            eventually(partial(lambda least: num_completed(client, batch) >= least, least))  # noqa: B023
            if least < total:
                site.server.process.send_signal(signal.SIGKILL)
                site.server.process.wait()
                continue
            done = ended(client, client.batches.retrieve(batch))
            output = results(client, done.output_file_id)
            assert done.status == "completed" and [one["custom_id"] for one in output] == [*map(str, range(total))]
            usages = [one["response"]["body"]["usage"] for one in output]
            used = used_by(site, "acme")
            assert used["input_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
            assert used["output_tokens"] == sum(usage["completion_tokens"] for usage in usages)


def test_a_budget_of_a_keys_own_settings_counts_the_lines_of_its_batches(site: TenantSite) -> None:
    key, record = new_key("globex", site.store.pepper(), settings='{"limits": {"tokens": "100k/day"}}')
    site.store.add(record)
    with openai.OpenAI(base_url=f"{site.server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE) as client:

        def limits() -> Any:
            return httpx.get(f"{site.server.url}/v1/limits", headers=bearer(key), timeout=PATIENCE)

        eventually(lambda: limits().status_code == 200)
        batch = ended(client, create(client, upload(client, line("one", max_tokens=5))))
        used = client.get(f"/batches/{batch.id}", cast_to=httpx.Response).json()["usage"]["total_tokens"]
        (left,) = [one["remaining"] for one in limits().json()["data"] if one["resource"] == "tokens"]
    assert left == 100_000 - used < 100_000
