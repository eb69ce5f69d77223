"""scripts/soak.py: what it calls flat, and a minute of it."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from backend.bound_process import bound
from labs.benchmarks.report import Report
from scripts import soak
from scripts.soak import KEPT, LEFT, Row, judge
from scripts.soak_dialects import batch, short_lived_key
from scripts.soak_load import BROKEN, Visitor

ROOT = Path(__file__).parents[2]


def rows(**grown: float) -> list[Row]:
    """Forty rows. Each named column grows by its amount between the middle of the second quarter and of the last."""
    names = [*LEFT, "spans dropped"]
    constant = dict.fromkeys(names, 0.0) | dict.fromkeys(KEPT, 400.0)
    return [
        {**constant, **{name: 400.0 + most * (number - 15) / 20 for name, most in grown.items()}}
        for number in range(40)
    ]


def missed(table: list[Row], wrong: int = 0, *complaints: str) -> list[str]:
    report = Report("soak", machine={})
    judge(report, table, Counter({("stream", 500): wrong} if wrong else {}), list(complaints))
    return [target.what for target in report.targets if not target.met]


def test_a_steady_series_is_flat_and_a_growing_one_is_not() -> None:
    assert missed(rows()) == []
    assert missed(rows(**{"RSS, MiB": 11.0, "descriptors": 0.9, "threads": 1.0, "tasks": -50.0})) == []
    assert missed(rows(**{"RSS, MiB": 14.0})) == ["RSS, MiB: median of the last quarter"]
    assert missed(rows(tasks=2.0, descriptors=2.0, threads=2.0)) == [
        f"{name}: median of the last quarter" for name in ("descriptors", "threads", "tasks")
    ]


def test_the_first_quarter_is_warm_up_and_one_row_decides_nothing() -> None:
    table = rows()
    for row in table[:10]:
        row["RSS, MiB"] = 1.0
    table[35]["RSS, MiB"] = 4000.0
    assert missed(table) == []


@pytest.mark.parametrize("column", [*LEFT, "spans dropped"])
def test_nothing_of_a_request_may_be_left_in_any_row(column: str) -> None:
    table = rows()
    table[20][column] = 1.0
    assert missed(table) == [f"{column} left, at most"]


def test_an_unexpected_answer_and_an_error_in_the_log_are_told() -> None:
    assert missed(rows(), 2, "boom") == ["answers that should not be", "errors in the log"]


async def test_a_break_of_the_network_is_expected_and_an_answer_that_does_not_come_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [httpx.ReadError("reset"), httpx.RemoteProtocolError("cut"), httpx.ReadTimeout("no answer")]

    async def manner(visitor: Visitor) -> None:
        if not errors:
            raise asyncio.CancelledError
        raise errors.pop()

    monkeypatch.setattr(soak, "MANNERS", {manner: 1.0})
    server: Any = None
    async with soak.new_client() as http:
        visitor = Visitor(server, {}, tmp_path, Random(0), http)
        gate = soak.Gate()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await soak.come_and_go(visitor, gate)
    assert visitor.wrong == {("manner: ReadTimeout", BROKEN): 1}
    assert visitor.statuses.total() == 3


async def test_a_key_whose_holder_lost_the_connection_is_revoked(tmp_path: Path) -> None:
    paths = list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        if request.url.path == "/v1/chat/completions":
            raise httpx.ReadError("reset")
        return httpx.Response(200, json={"id": "k1", "key": "secret"})

    server: Any = SimpleNamespace(url="http://gateway", admin_url="http://admin", admin_headers={})
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        with pytest.raises(httpx.ReadError):
            await short_lived_key(Visitor(server, {"steady": "key"}, tmp_path, Random(0), http))
    assert paths == ["/admin/v1/keys", "/v1/chat/completions", "/admin/v1/keys/k1/revoke"]


async def test_a_batch_that_does_not_end_is_waited_for_a_few_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float]()

    async def waited(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("scripts.soak_dialects.asyncio", SimpleNamespace(sleep=waited))
    server: Any = SimpleNamespace(url="http://gateway")
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"id": "one", "status": "in_progress"}))
    async with httpx.AsyncClient(transport=transport) as http:
        for seed in range(4):
            waits.clear()
            await batch(Visitor(server, {"steady": "key"}, tmp_path, Random(seed), http))
            assert sum(waits) in (0, 5)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_short_one_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.soak", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(**bound(command), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    targets = json.loads((tmp_path / "soak.quick.json").read_text())["targets"]
    assert [target["what"] for target in targets if not target["met"] and not target["what"].startswith("RSS")] == []
