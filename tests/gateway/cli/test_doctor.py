import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.doctor import checks, live
from gateway.doctor.check import ok, problem, warning
from gateway.doctor.finding import Finding, Severity
from tests.gateway.cli.conftest import Printed, Sluice
from tests.gateway.doctor.snapshots import HEALTHY, answers, exposition
from tests.gateway.server_process import ServerProcess


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine is looked at."""
    monkeypatch.setattr(checks, "machine", lambda: [ok("python", "3.13")])
    monkeypatch.setattr(checks, "configuration", lambda settings: [warning("threads", "9 on 2 cores", "lower it")])


def test_warnings_do_not_fail_it(quick: None, printed: Printed) -> None:
    assert printed("doctor").splitlines() == [
        "ok       python      3.13",
        "warning  threads     9 on 2 cores: lower it",
    ]


def test_a_problem_does(quick: None, sluice: Sluice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "configuration", lambda settings: [problem("port", "127.0.0.1:80 is in use\x1b[2J")])
    done = sluice("doctor")
    assert (done.status, "\x1b" in done.out) == (1, False)


def test_settings_that_contradict_are_problems_and_the_machine_is_checked_all_the_same(
    quick: None, sluice: Sluice
) -> None:
    done = sluice("doctor", "--max-num-seqs", "0", "--block-size", "none")
    assert done.status == 1
    first, *rest = done.out.splitlines()
    assert first.startswith("ok       python")
    assert [line.split()[:2] for line in rest] == [["problem", "settings"]] * 2
    assert "--max-num-seqs" in rest[0]


def test_json(quick: None, printed: Printed) -> None:
    entries = json.loads(printed("doctor", "--json"))["checks"]
    assert [entry["verdict"] for entry in entries] == ["ok", "warning"]
    assert entries[1]["remedy"] == "lower it"


def test_all_checks_run_on_this_machine(tmp_path: Path, printed: Printed) -> None:
    flags = ["--state-dir", str(tmp_path / "state"), "--port", "0", "--admin-port", "0", "--device", "cpu"]
    out = printed("doctor", "--json", "--kv-memory-bytes", "16MiB", *flags)
    names = {entry["name"] for entry in json.loads(out)["checks"]}
    assert names == {
        "python",
        "torch",
        "kernels",
        "core",
        "clock",
        "gpu",
        "threads",
        "model",
        "memory",
        "open files",
        "state",
        "policy",
        "keys",
        "tls",
        "port",
        "admin port",
        "store",
        "collector",
        "otel",
    }
    assert not (tmp_path / "state").exists()


def test_a_key_file_without_a_gateway_is_a_mistake(quick: None, sluice: Sluice) -> None:
    assert sluice("doctor", "--key-file", "x").status == 2


# --live


class Gateway:
    """The admin port of a gateway with these answers."""

    def __init__(self, metrics: dict[str, float], **overview: Any) -> None:
        self.metrics = metrics
        self.past: list[dict[str, str]] = []  # what it says of itself
        self.figures: list[dict[str, str]] = []
        self.answers = answers(**overview)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.headers.get("authorization") != "Bearer the-admin-key-here":
            return httpx.Response(401)
        if request.url.path == "/metrics":
            return httpx.Response(200, text=exposition(self.metrics))
        if request.url.path == "/admin/v1/diagnosis":
            return httpx.Response(200, json={"findings": self.past, "figures": self.figures})
        answer = self.answers.get(request.url.path.removeprefix("/admin/v1/"))
        return httpx.Response(200, json=answer) if answer is not None else httpx.Response(404)


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text("the-admin-key-here\n")
    return str(path)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have a gateway stand behind every URL, and no time pass."""

    def behind(gateway: Any) -> None:
        client = httpx.Client
        monkeypatch.setattr(
            live.httpx, "Client", lambda **options: client(transport=httpx.MockTransport(gateway), **options)
        )

    monkeypatch.setattr("gateway.cli.doctor.time.sleep", lambda seconds: None)
    return behind


def test_a_gateway_that_is_well(serve: Any, key: str, printed: Printed) -> None:
    serve(Gateway(HEALTHY))
    out = printed("doctor", "--live", "http://gateway:8001", "--key-file", key)
    said = "ok       nothing is wrong, as far as 3 s and the metrics of the last minutes show\n"
    assert out == said


def test_the_last_minutes_of_a_gateway_are_no_better_known_than_its_metrics(
    serve: Any, key: str, sluice: Sluice
) -> None:
    gateway = Gateway(HEALTHY)
    serve(gateway)
    done = sluice("doctor", "--live", "--last", "15s", "--key-file", key)
    assert (done.status, done.out, "no metrics are kept yet" in done.err) == (1, "", True)
    gateway.figures = [{"name": "steps", "value": "9", "meaning": "in 16 s"}]
    done = sluice("doctor", "--live", "--last", "15s", "--key-file", key)
    assert (done.status, done.out.splitlines()[1:]) == (
        0,
        ["ok       nothing is wrong, as far as the metrics of that time show"],
    )


def test_a_gateway_that_was_in_trouble_a_minute_ago(serve: Any, key: str, printed: Printed) -> None:
    gateway = Gateway(HEALTHY)
    gateway.past = [Finding("store_away", "it was away", "in the last 5 min: 1 outage", "look").to_json()]
    serve(gateway)
    lines = printed("doctor", "--live", "--key-file", key).splitlines()
    assert lines[:2] == ["warning  it was away", "         in the last 5 min: 1 outage"]


def test_a_gateway_in_trouble(serve: Any, key: str, sluice: Sluice) -> None:
    serve(Gateway(HEALTHY | {"sluice_store_connected": 0.0}))
    done = sluice("doctor", "--live", "--key-file", key)
    assert done.status == 1
    first, second, third = done.out.splitlines()
    assert first == "serious  the quota store does not answer"
    assert second.startswith("         sluice_store_connected is 0")
    assert third.startswith("         remedy: see that it runs")


def test_a_router_speaks_for_its_replicas(serve: Any, key: str, sluice: Sluice) -> None:
    slow = Finding("store_slow", "the quota store is slow", "9 of 9 calls", "move it", replicas=("a:80", "b:80"))
    many = Finding("late_loop", "it is late", "by 1 s", "leave it a core", replicas=tuple("abcde"))
    lost = Finding("no_replica", "no replica takes requests", "of 2: 2 silent", "start some", Severity.SERIOUS)
    answers = {
        "/admin/v1/fleet": {"replicas": []},
        "/admin/v1/diagnosis": {"findings": [one.to_json() for one in (lost, slow, many)]},
    }
    serve(lambda request: httpx.Response(200, json=answers[request.url.path]))
    done = sluice("doctor", "--live", "http://router:8081", "--key-file", key)
    assert done.status == 1
    assert done.out.splitlines()[::3] == [
        "serious  no replica takes requests",
        "warning  a:80, b:80: the quota store is slow",
        "warning  a, b, c and 2 more: it is late",
    ]
    told = json.loads(sluice("doctor", "--live", "http://router:8081", "--json", "--key-file", key).out)["findings"]
    assert [one.get("replicas") for one in told] == [None, ["a:80", "b:80"], [*"abcde"]]


def test_findings_as_json(serve: Any, key: str, printed: Printed) -> None:
    serve(Gateway(HEALTHY, draining=True))
    (finding,) = json.loads(printed("doctor", "--live", "--json", "--key-file", key))["findings"]
    assert (finding["name"], finding["severity"]) == ("draining", "warning")


@pytest.mark.parametrize(
    ("behind", "said"),
    [
        (lambda request: httpx.Response(401), "does not accept this key"),
        (lambda request: httpx.Response(404), "the tenants' port?"),
        (lambda request: httpx.Response(200, text="hello"), "is no JSON"),
        (lambda request: httpx.Response(200, json={}), "answers as no gateway of this version does"),
    ],
)
def test_an_address_that_is_no_gateway_is_told(serve: Any, key: str, sluice: Sluice, behind: Any, said: str) -> None:
    serve(behind)
    done = sluice("doctor", "--live", "--key-file", key)
    assert (done.status, said in done.err) == (1, True)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:1", "nothing listens there"),
        ("foo", "it is no URL such as http://127.0.0.1:8001"),
    ],
)
def test_no_gateway_there(key: str, sluice: Sluice, url: str, reason: str) -> None:
    done = sluice("doctor", "--live", url, "--key-file", key)
    assert (done.status, f"{url} cannot be read ({reason}): name" in done.err) == (1, True)


def test_no_key(tmp_path: Path, sluice: Sluice) -> None:
    done = sluice("doctor", "--live", "--state-dir", str(tmp_path))
    assert (done.status, f"{tmp_path / 'admin-key'}: No such file" in done.err) == (1, True)


@pytest.mark.parametrize("content", [b"", b"\xb5" * 32, "Schl\u00fcssel mit Umlaut".encode()])
def test_a_file_without_an_admin_key_is_refused(tmp_path: Path, sluice: Sluice, content: bytes) -> None:
    path = tmp_path / "pepper"
    path.write_bytes(content)
    done = sluice("doctor", "--live", "--key-file", str(path))
    assert (done.status, f"{path} must hold the admin key, 16 to 512 printable ASCII" in done.err) == (1, True)


def test_the_key_is_looked_for_where_the_gateway_keeps_it(
    tmp_path: Path, sluice: Sluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_STATE_DIR", str(tmp_path))
    done = sluice("doctor", "--live")
    assert (done.status, f"{tmp_path / 'admin-key'}: No such file" in done.err) == (1, True)


def test_a_real_gateway(server: ServerProcess, sluice: Sluice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_ADMIN_KEY", server.admin_key)
    monkeypatch.setattr("gateway.cli.doctor.WINDOW_SECONDS", 0.1)
    told = json.loads(sluice("doctor", "--live", server.admin_url, "--json").out)
    found = {finding["name"] for finding in told["findings"]}
    assert not found - {"late_loop"}
