import asyncio

import pytest

from admission.core import PRIOR_STEP_TIME
from admission.explain import BEHIND_PREFIX, REASONS
from admission.step_times.step_time import StepTimeModel
from gateway.admin.rows import Reasons, State, state_of
from gateway.http.request_scope import RequestScope
from gateway.telemetry.request_record import RequestRecord
from tests.gateway.admin.test_history import Site
from tests.gateway.telemetry.records import a_record


@pytest.fixture
def site() -> Site:
    return Site()


def reason(site: Site, record: RequestRecord) -> str | None:
    return Reasons(site.core.scheduler).of(record)


def test_a_request_passes_through_every_state(site: Site) -> None:
    assert state_of(a_record(body_read=None, timelines=[], settling=None)) is State.READING
    assert state_of(a_record(timelines=[], settling=None)) is State.RESERVING
    record = site.arrive("a", prompt=12, max_tokens=3)
    record.engine.settling = None
    assert state_of(record) is State.WAITING
    site.step()
    assert state_of(record) is State.PREFILL
    site.step()
    assert state_of(record) is State.DECODING
    site.step()
    site.step()
    assert state_of(record) is State.ENDING
    assert state_of(a_record()) is State.ENDING


def test_the_head_and_the_rest_of_the_queue_have_the_same_cause(site: Site) -> None:
    assert reasons_of_waiting(site, prompt=2, max_tokens=4) == {REASONS["slots"], BEHIND_PREFIX + REASONS["slots"]}
    assert reasons_of_waiting(Site(), prompt=12, max_tokens=24) == {
        REASONS["budget"],
        BEHIND_PREFIX + REASONS["budget"],
    }


def reasons_of_waiting(site: Site, prompt: int, max_tokens: int) -> set[str | None]:
    records = [site.arrive(name, prompt=prompt, max_tokens=max_tokens) for name in "abcdef"]
    assert reason(site, records[-1]) == "until the next step is planned"
    site.step()
    site.step()
    waiting = [record for record in records if record.engine.timelines[0].admitted is None]
    assert all(reason(site, record) is None for record in records if record not in waiting)
    return {reason(site, record) for record in waiting}


def test_a_tenant_that_is_passed_over_is_told_its_own_limit(site: Site) -> None:
    site.core.allow("acme", 0, site.clock())
    record = site.arrive("a")
    assert site.core.schedule(site.clock()) is None
    assert reason(site, record) == "its tenant held as much KV memory as its limit allows"


def test_a_request_waits_while_the_step_is_another_models_turn() -> None:
    site = Site(StepTimeModel(PRIOR_STEP_TIME))
    site.arrive("a", model=1)
    waiting = site.arrive("b", tenant="globex")
    assert reason(site, waiting) == "until the next step is planned"
    assert site.core.schedule(site.clock()) is not None
    assert reason(site, waiting) == REASONS["model"]


def test_a_sequence_that_may_generate_no_more_for_now_is_paused(site: Site) -> None:
    record = site.arrive("a", prompt=4, max_tokens=8)
    record.engine.timelines[0].sequence.limit_to(2)
    site.step()
    site.step()
    assert site.core.schedule(site.clock()) is None
    assert reason(site, record) == "paused: its tenant's token limit had no more for it yet"


async def test_a_client_that_does_not_read_is_named(site: Site) -> None:
    scope = RequestScope({}, None, None)  # type: ignore[arg-type]  # nothing is received or sent
    record = a_record(scope=scope, timelines=[])
    assert reason(site, record) is None
    scope.writing_since = asyncio.get_running_loop().time() - 3.0
    assert str(reason(site, record)).startswith("its client reads slowly: a write has waited 3.")
