"""What a router asks its replicas when it is asked for a diagnosis, on a virtual clock."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from fleet.admin import diagnosis as diagnosis_module
from fleet.admin.diagnosis import FleetDiagnosis
from fleet.retries import RetryBudget
from gateway.doctor.finding import Finding
from gateway.doctor.snapshot import WINDOW_SECONDS
from tests.fleet.test_fleet import Three

SLOW_STORE = Finding("store_slow", "the store is slow", "9 of 9 calls", "move it")
Answer = Callable[[httpx.Request], httpx.Response]


def saying(*found: Finding) -> Answer:
    return lambda request: httpx.Response(200, json={"findings": [one.to_json() for one in found]})


def failing(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("reset")


class Diagnosed:
    """Three replicas and their diagnosis; `answers` say what a replica answers by its host, others find nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Answer) -> None:
        self.fleet, self.asked, self.slept, self.answers = Three(), list[httpx.Request](), list[float](), answers
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._handle))
        self.diagnosis = FleetDiagnosis(self.fleet, RetryBudget(), client, "the-key")
        monkeypatch.setattr(diagnosis_module.asyncio, "sleep", self._sleep)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self.answers.get(request.url.host, saying())(request)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.fleet.pass_time(seconds)
        self.fleet.tell("abc")

    async def found(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in (await self.diagnosis.report())["findings"]}


async def test_each_replica_is_asked_with_the_key_and_its_findings_have_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diagnosed = Diagnosed(monkeypatch, b=saying(SLOW_STORE))
    assert await diagnosed.found() == {"store_slow": SLOW_STORE.to_json() | {"replicas": ["b:8000"]}}
    assert {str(one.url) for one in diagnosed.asked} == {f"http://{name}:8001/admin/v1/diagnosis" for name in "abc"}
    assert {one.headers["authorization"] for one in diagnosed.asked} == {"Bearer the-key"}
    assert diagnosed.slept == [WINDOW_SECONDS]


async def test_questions_within_seconds_share_an_answer_and_a_later_look_needs_no_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diagnosed = Diagnosed(monkeypatch)
    await asyncio.gather(diagnosed.found(), diagnosed.found())
    assert len(diagnosed.asked) == 3
    diagnosed.fleet.pass_time(WINDOW_SECONDS)
    diagnosed.fleet.tell("abc")
    await diagnosed.found()
    assert (len(diagnosed.asked), diagnosed.slept) == (6, [WINDOW_SECONDS])
    diagnosed.fleet.pass_time(100.0)
    diagnosed.fleet.tell("abc")
    await diagnosed.found()
    assert diagnosed.slept == [WINDOW_SECONDS, WINDOW_SECONDS]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (failing, "reset"),
        (lambda request: httpx.Response(404), "its admin port answers 404"),
        (lambda request: httpx.Response(200, text="hello"), "its answer is invalid (JSONDecodeError"),
        (lambda request: httpx.Response(200, json={"findings": [{}]}), "its answer is invalid (KeyError"),
        (lambda request: httpx.Response(200, json=[]), "its answer is invalid (TypeError"),
    ],
)
async def test_a_replica_that_gives_no_diagnosis_is_named_with_why(
    monkeypatch: pytest.MonkeyPatch, answer: Answer, why: str
) -> None:
    found = await Diagnosed(monkeypatch, a=saying(SLOW_STORE), b=answer).found()
    assert found["replica_undiagnosed"]["evidence"].startswith(why)
    assert found["replica_undiagnosed"]["replicas"] == ["b:8000"]
    assert found["store_slow"]["replicas"] == ["a:8000"]


async def test_a_replica_that_hangs_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosed = Diagnosed(monkeypatch)

    async def hang(*arguments: object, **options: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(diagnosis_module, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(diagnosed.diagnosis._client, "get", hang)
    found = await diagnosed.found()
    assert found["replica_undiagnosed"]["replicas"] == ["a:8000", "b:8000", "c:8000"]


async def test_a_lost_replica_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosed = Diagnosed(monkeypatch)
    diagnosed.fleet.set_replicas([one.replica for one in diagnosed.fleet.views.values()][:2])
    diagnosed.fleet.lost(diagnosed.fleet.views["b:8000"])
    monkeypatch.setattr(diagnosed.fleet, "tell", lambda names: Three.tell(diagnosed.fleet, "a"))
    found = await diagnosed.found()
    assert [one.url.host for one in diagnosed.asked] == ["a"]
    assert [*found] == ["replica_silent"]
