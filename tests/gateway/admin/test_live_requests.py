"""Finding one request among those that share its name, and what its row says."""

import pytest

from admission.outcome import Outcome
from gateway.admin.live_requests import LiveRequests
from gateway.admin.rows import MAX_ROWS
from gateway.admin.whereabouts import Reasons
from gateway.errors import BadRequest, RateLimited, RequestNotFound
from gateway.telemetry.story import Story
from tests.gateway.admin.test_history import Site
from tests.gateway.telemetry.stories import a_story


class Found(Site):
    def __init__(self) -> None:
        super().__init__()
        self.requests = LiveRequests(self.telemetry, self.history, Reasons(self.core.scheduler))

    def begin(self, request_id: str, response_id: str | None, began: float = 100.0) -> Story:
        story = a_story(request_id=request_id, response_id=response_id, began=began, ended=None, trails=[])
        self.telemetry.live.add(story)
        return story

    def end(self, story: Story) -> None:
        self.telemetry.live.discard(story)
        story.ended = 101.0
        self.history.request_ended(story)


@pytest.fixture
def found() -> Found:
    return Found()


def test_a_request_is_found_by_either_id_while_it_lives_and_after(found: Found) -> None:
    story = found.begin("mine", "cmpl-1")
    assert found.requests.live("mine") is found.requests.live("cmpl-1") is story
    assert found.requests.shown("cmpl-1")["state"] == "ending"
    found.end(story)
    assert found.requests.shown("mine")["outcome"] == "completed"
    with pytest.raises(RequestNotFound, match="'mine' is being served"):
        found.requests.live("mine")


def test_an_id_that_several_share_names_none_of_them(found: Found) -> None:
    found.begin("same", "cmpl-1")
    found.begin("same", "cmpl-2")
    with pytest.raises(BadRequest, match=r"2 requests have the id 'same': .*cmpl-1"):
        found.requests.live("same")
    assert found.requests.live("cmpl-2").response_id == "cmpl-2"


def test_a_client_that_takes_anothers_response_id_as_its_own_id_does_not_hide_it(found: Found) -> None:
    found.begin("cmpl-1", "cmpl-9")
    victim = found.begin("its-own", "cmpl-1")
    assert found.requests.live("cmpl-1") is victim


def test_what_a_tenant_has_running_is_told_oldest_first(found: Found) -> None:
    for name, began in (("late", 102.0), ("early", 101.0)):
        found.begin(name, None, began)
    story = found.begin("of another", None)
    story.tenant = "globex"
    assert [row["id"] for row in found.requests.live_of_tenant("acme", 50)] == ["early", "late"]
    assert [row["id"] for row in found.requests.live_of_tenant("acme", 1)] == ["early"]


def test_an_unknown_request_is_said_to_be_unknown(found: Found) -> None:
    with pytest.raises(RequestNotFound):
        found.requests.shown("nothing")


async def test_the_oldest_are_shown_of_more_than_a_page_can_hold(found: Found) -> None:
    for number in range(MAX_ROWS + 3):
        found.begin(f"r{number}", None, began=float(number))
    listed = await found.requests.listed()
    assert (len(listed["live"]), listed["truncated"]) == (MAX_ROWS, 3)
    assert listed["live"][0]["id"] == "r0"


async def test_those_that_ended_come_newest_first_with_their_waits(found: Found) -> None:
    for name in ("one", "two"):
        found.end(a_story(request_id=name))
    newest, _ = (await found.requests.listed())["recent"]
    assert newest["id"] == "two"
    assert newest["duration"] == pytest.approx(1.0)
    assert newest["queue_seconds"] == pytest.approx(0.006)
    assert (newest["status"], newest["code"], newest["prompt_tokens"]) == (200, None, 10)


def test_a_tenants_are_only_its_own(found: Found) -> None:
    for tenant in ("acme", "other", "acme"):
        found.end(a_story(tenant=tenant, error=RateLimited("no"), outcome=Outcome.REFUSED))
    assert [row["tenant"] for row in found.requests.of_tenant("acme", 10)] == ["acme", "acme"]
    assert len(found.requests.of_tenant("acme", 1)) == 1


async def test_what_does_not_generate_is_not_listed(found: Found) -> None:
    found.telemetry.live.add(a_story(operation=None))
    assert (await found.requests.listed())["live"] == []
