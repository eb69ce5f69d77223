"""`sluice bench` as its users meet it, against a server whose timing and accounts are known."""

import csv
import json
from pathlib import Path
from random import Random

import pytest

from labs.bench.benchmark import traced
from labs.bench.scenario import TenantTraffic
from labs.bench.workloads import WORKLOADS, Prose, Sessions
from tests.gateway.cli.conftest import Printed, Sluice
from tests.labs.bench.conftest import KnownServer, Reply, Served, known_server

__all__ = ["known_server"]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")


def figures(path: Path) -> dict:  # type: ignore[type-arg]
    return json.loads(path.read_text())


def test_it_measures_and_writes_every_form(known_server: KnownServer, printed: Printed, tmp_path: Path) -> None:
    files = {form: tmp_path / f"report.{form}" for form in ("json", "markdown", "html")}
    flags = [part for form, path in files.items() for part in (f"--{form}", path)]
    out = printed("bench", known_server.url, "--rate", 40, "--seconds", "500ms", "--quiet", "--ttft", "1min", *flags)
    assert "known · 1 tenant · chat" in out and "Latencies" in out and "Settlement" in out
    said = figures(files["json"])
    every = said["results"][0]["summary"]["all"]
    assert every["offered"] == every["answered"] == every["good"] == len(known_server.streams)
    assert every["output_tokens"] == 3 * every["offered"] and every["ttft"]["count"] == every["offered"]
    (settled,) = said["results"][0]["settlements"]
    assert settled["told"] == settled["charged"] > 0 and settled["num_cut"] == 0
    assert "sk-test" not in "".join(path.read_text() for path in files.values()) + out
    assert files["markdown"].read_text().startswith("# Benchmark\n")
    page = files["html"].read_text()
    assert page.startswith("<!doctype html>") and "<svg" in page and "http" not in page.replace(known_server.url, "")


def test_prompts_have_the_tokens_that_were_asked_for(
    known_server: KnownServer, printed: Printed, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    flags = ["--prompt-tokens", 200, "--workload", "reasoning", "--rate", 50, "--output-tokens", 5]
    out = printed("bench", known_server.url, "--seconds", "200ms", "--quiet", "--json", report, *flags)
    every = figures(report)["results"][0]["summary"]["all"]
    assert abs(every["prompt_tokens"] / every["offered"] - 200) <= 4  # two words of two tokens
    assert {stream.body["max_tokens"] for stream in known_server.streams} == {5}
    assert "prompts of default are all of one length" in out


def test_embeddings_are_measured_by_their_answers(known_server: KnownServer, printed: Printed, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = ["--workload", "embeddings", "--rate", 50, "--seconds", "200ms", "--quiet", "--json", report]
    printed("bench", known_server.url, *flags)
    every = figures(report)["results"][0]["summary"]["all"]
    assert every["offered"] == every["answered"] == every["ttft"]["count"] > 0 and every["between"]["count"] == 0
    assert {served.path for served in known_server.served} == {"/v1/embeddings"}


def test_a_wrong_account_is_a_failure(known_server: KnownServer, sluice: Sluice) -> None:
    known_server.overcharge = 1
    done = sluice("bench", known_server.url, "--rate", 20, "--seconds", "300ms", "--quiet")
    assert done.status == 1 and "known was told" in done.out


def test_a_trace_keeps_its_times_and_lengths(known_server: KnownServer, printed: Printed, tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.csv", tmp_path / "report.json"
    rows = [("TIMESTAMP", "ContextTokens", "GeneratedTokens")]
    rows += [(f"2023-11-16 18:15:{46 + n}.0", str(100 + 40 * n), str(5 + n)) for n in range(4)]
    with trace.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    printed("bench", known_server.url, "--trace", trace, "--speed", 20, "--seconds", "1s", "--quiet", "--json", report)
    streams = sorted(known_server.streams, key=lambda one: int(one.body["max_tokens"]))
    assert [stream.body["max_tokens"] for stream in streams] == [5, 6, 7, 8]
    every = figures(report)["results"][0]["summary"]["all"]
    assert abs(every["prompt_tokens"] - sum(100 + 40 * n for n in range(4))) <= 4 * 2
    tenant = TenantTraffic(trace=trace, speed=20)
    times = [
        at for at, _ in traced("default", tenant, Sessions(WORKLOADS["chat"], Prose(Random(1)), Random(1), 4096, {}))
    ]
    assert times == pytest.approx([0.0, 0.05, 0.1, 0.15])


def test_tenants_of_a_file_are_measured_apart(known_server: KnownServer, printed: Printed, tmp_path: Path) -> None:
    scenario, report = tmp_path / "tenants.yaml", tmp_path / "report.json"
    scenario.write_text(
        "seconds: 1s\ntenants:\n  one: {key: sk-one, clients: 2, service_tier: flex}\n"
        "  two: {key: sk-two, rate: 30, weight: 3, headers: {x-a: b}, body: {temperature: 0}}\n"
    )
    out = printed("bench", known_server.url, "--scenario", scenario, "--quiet", "--json", report)
    names = [tenant["name"] for tenant in figures(report)["results"][0]["summary"]["tenants"]]
    assert names == ["one", "two"] and "share by weight" in out and "75.0 %" in out
    by_key = {stream.headers["authorization"]: stream for stream in known_server.streams}
    assert by_key["Bearer sk-one"].body["service_tier"] == "flex"
    assert by_key["Bearer sk-two"].headers["x-a"] == "b" and by_key["Bearer sk-two"].body["temperature"] == 0


def test_a_sweep_finds_the_knee(known_server: KnownServer, printed: Printed, tmp_path: Path) -> None:
    """The server refuses at the second load."""
    report = tmp_path / "report.json"
    loads: list[int] = []

    def script(served: Served) -> Reply:
        loads.append(1)
        return Reply() if served.body["max_tokens"] and not known_server.overcharge else Reply(status=429)

    known_server.script = script
    flags = ["--rate", 20, "--seconds", "400ms", "--sweep", "1:3:2", "--quiet", "--json", report]
    out = printed("bench", known_server.url, *flags)
    said = figures(report)
    assert [result["load"] for result in said["results"]] == [1.0, 3.0]
    assert said["knee"] == 3.0 and "By load; the knee" in out


def test_recovery_from_a_fault_is_measured(known_server: KnownServer, printed: Printed, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    known_server.script = lambda served: Reply(status=503) if served.number >= 40 else Reply()
    flags = ["--rate", 30, "--seconds", "2s", "--fault", "true", "--fault-at", "1s", "--quiet"]
    out = printed("bench", known_server.url, *flags, "--json", report)
    summary = figures(report)["results"][0]["summary"]
    assert summary["fault_at"] >= 1.0 and summary["recovered_after"] is None
    assert "recovered after" in out and "never" in out and "503 busy" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "exactly one of rate, trace and clients"),
        (["--rate", "0"], "rate: Input should be greater than 0"),
        (["--rate", "1", "--seconds", "5"], "seconds"),
        (["--rate", "1", "--clients", "2"], "not allowed with"),
        (["--rate", "1", "--fault", "no-such-command"], "no command that this machine has"),
        (["--rate", "1", "--fault", "true", "--fault-at", "1h"], "--fault-at"),
        (["--rate", "1", "--body", "[]"], "no JSON object"),
        (["--scenario", "x.yaml", "--rate", "1"], "--rate"),
    ],
)
def test_impossible_flags_are_refused(
    known_server: KnownServer, sluice: Sluice, flags: list[str], message: str
) -> None:
    done = sluice("bench", known_server.url, *flags)
    assert done.status == 2 and message in done.err


def test_a_server_that_is_not_there_is_named(sluice: Sluice) -> None:
    done = sluice("bench", "http://127.0.0.1:1", "--rate", 1)
    assert done.status == 2 and "nothing answers there" in done.err
