import asyncio
from typing import Any

import pytest

from admission.core import CoreConfig, make_core
from admission.outcome import Outcome
from admission.step_times.step_time import StepTimeModel
from backend.scheduler.batch import StepOutput
from gateway.admin.history import (
    MAX_ENDED_REQUESTS,
    MAX_REFUSALS,
    MAX_UNAUTHENTICATED_REFUSALS,
    WINDOW_TICKS,
    History,
    Shares,
)
from gateway.admin.request_summary import MAX_SEQUENCES, MAX_TEXT_CHARS
from gateway.errors import BadRequest, InvalidApiKey, ModelNotFound, RateLimited
from gateway.telemetry.core_observer import CoreTelemetry
from gateway.telemetry.request_record import RequestRecord, Telemetry
from tests.backend.sequences import make_sequence
from tests.gateway.admin.clock import Clock
from tests.gateway.telemetry.records import a_record, a_timeline
from tests.gateway.telemetry.test_core_observer import ENGINE


class Site:
    def __init__(self, *others: StepTimeModel) -> None:
        self.clock = Clock()
        self.core = make_core(CoreConfig(), ENGINE, others=others)
        self.core_telemetry = CoreTelemetry(self.core)
        self.telemetry = Telemetry(self.clock)
        self.history = History(self.telemetry, self.core.scheduler, self.core.share.accounts)
        self.core_telemetry.on_step.append(self.history.step_completed)

    def arrive(
        self,
        name: str,
        prompt: int = 4,
        max_tokens: int = 4,
        tenant: str = "acme",
        first_token_by: float | None = None,
        model: int = 0,
    ) -> RequestRecord:
        asked = {"first_token_by": first_token_by, "model": model}
        sequence = make_sequence(name, tenant, [1] * prompt, max_tokens, (), **asked)
        self.core.arrive(sequence, self.clock())
        record = a_record(
            timelines=[self.core_telemetry.timeline(sequence)], ended=None, outcome=None, service_class="usual"
        )
        self.telemetry.live.add(record)
        return record

    def step(self, seconds: float = 0.01) -> None:
        assert self.core.schedule(self.clock()) is not None
        self.clock.now += seconds
        batch = self.core.scheduler.in_flight[0].batch
        self.core.update_from_output(StepOutput(batch.step, [5] * len(batch.sampled), seconds), self.clock())

    def point(self, name: str) -> Any:
        """Of the second that is over now."""
        self.clock.now = float(int(self.clock.now) + 1)
        self.history.tick()
        return self.history.series.to_json(0.0, [])["points"][name][-1]


@pytest.fixture
def site() -> Site:
    return Site()


def refused(**changes: Any) -> RequestRecord:
    error = RateLimited("Your tenant's limit requests/min is 2: this request asks for 1 and 0 are left.")
    return a_record(**({"error": error, "outcome": Outcome.REFUSED, "status": 429, "timelines": []} | changes))


def test_steps_tell_first_tokens_and_gaps_and_load(site: Site) -> None:
    site.arrive("a")
    for seconds in (0.02, 0.01, 0.03):
        site.step(seconds)
    site.clock.now = float(int(site.clock.now) + 1)
    site.history.tick()
    shown = site.history.series.to_json(0.0, [])["points"]
    assert shown["ttft_p50"][-1] == pytest.approx(0.02)
    assert shown["gap_p50"][-1] == pytest.approx(0.01)
    assert shown["gap_p99"][-1] == pytest.approx(0.03)
    assert site.history.series.busy == pytest.approx(0.06 / 10)


def test_a_request_without_a_first_token_counts_with_its_wait(site: Site) -> None:
    site.arrive("a")
    site.arrive("b", prompt=24)  # several steps of prefill
    site.step(7.5)
    assert site.point("oldest_wait") == pytest.approx(8.0)
    assert site.point("ttft_p50") == pytest.approx(7.5)  # of a, which b makes no shorter
    assert site.point("ttft_p99") == pytest.approx(10.0)


def test_tokens_and_blocks_are_read_off_the_scheduler(site: Site) -> None:
    site.arrive("a")
    site.step()
    site.step()
    assert site.point("output_tokens") == 2
    site.step()
    assert (site.point("output_tokens"), site.point("running")) == (1, 1)
    assert site.point("kv_blocks_used") == 2


def test_waiting_requests_are_counted_by_class(site: Site) -> None:
    for name in "abcdef":
        site.arrive(name)
    site.step()
    site.clock.now += 1
    site.history.tick()
    waiting = site.history.series.to_json(0.0, [])["points"]["waiting"]
    assert waiting["usual"][-1] == len(site.core.scheduler.waiting) > 0


def test_refusals_count_as_requests_and_apart(site: Site) -> None:
    site.history.request_ended(a_record())
    site.history.request_ended(refused())
    site.history.request_ended(a_record(outcome=Outcome.INVALID, error=BadRequest("no", "prompt")))
    assert site.point("requests") == 3
    site.history.request_ended(refused())
    assert site.point("refused") == 1


def test_probes_and_lists_of_models_are_no_requests(site: Site) -> None:
    site.history.request_ended(a_record(operation=None, timelines=[]))
    assert site.point("requests") == 0
    assert not site.history.ended and not site.history.refusals()


def test_a_tenants_sums_are_of_all_its_requests(site: Site) -> None:
    for record in (a_record(), a_record(), refused(), a_record(tenant="other")):
        site.history.request_ended(record)
    acme = site.history.totals["acme"]
    assert (acme.requests, acme.refused, acme.prompt_tokens, acme.output_tokens) == (3, 1, 20, 8)
    assert site.history.totals["other"].requests == 1


def test_a_tenants_sums_are_of_all_prompts_of_a_request_however_many_of_them_are_kept(site: Site) -> None:
    record = a_record(timelines=[a_timeline() for _ in range(MAX_SEQUENCES + 4)])
    site.history.request_ended(record)
    (summary,) = site.history.ended
    assert len(summary.sequences) == MAX_SEQUENCES
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (
        record.num_prompt_tokens,
        record.engine.num_output_tokens,
    )
    acme = site.history.totals["acme"]
    assert (acme.prompt_tokens, acme.output_tokens) == (10 * (MAX_SEQUENCES + 4), 4 * (MAX_SEQUENCES + 4))


def test_refusals_come_newest_first_and_are_bounded(site: Site) -> None:
    for number in range(MAX_REFUSALS + 10):
        site.history.request_ended(refused(request_id=f"r{number}", ended=100.0 + number))
    ids = [summary.request_id for summary in site.history.refusals()]
    assert len(ids) == MAX_REFUSALS
    assert ids[:2] == [f"r{MAX_REFUSALS + 9}", f"r{MAX_REFUSALS + 8}"]


def test_refusals_without_a_key_cannot_push_out_the_refusals_of_tenants(site: Site) -> None:
    site.history.request_ended(refused(request_id="ours", ended=100.0))
    for number in range(10_000):
        error = InvalidApiKey("Incorrect API key provided.")
        site.history.request_ended(
            a_record(tenant=None, error=error, outcome=Outcome.INVALID, timelines=[], ended=101.0 + number)
        )
    ids = [summary.request_id for summary in site.history.refusals()]
    assert ids[-1] == "ours" and len(ids) == MAX_UNAUTHENTICATED_REFUSALS + 1
    assert [summary.request_id for summary in site.history.ended] == ["ours"]
    assert None not in site.history.totals


def test_requests_that_ended_are_bounded(site: Site) -> None:
    for number in range(MAX_ENDED_REQUESTS + 5):
        site.history.request_ended(a_record(request_id=f"r{number}"))
    assert len(site.history.ended) == MAX_ENDED_REQUESTS
    assert site.history.ended[0].request_id == "r5"


def test_nothing_that_a_client_wrote_is_kept_at_length(site: Site) -> None:
    long = "x" * 100_000
    site.history.request_ended(a_record(model=long, path=f"/v1/models/{long}", error=ModelNotFound(f"no {long}")))
    (summary,) = site.history.ended
    assert summary.refusal is not None
    assert max(map(len, (summary.model or "", summary.path, summary.refusal.message))) == MAX_TEXT_CHARS


async def test_it_closes_the_seconds_by_itself(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        site.clock.now += seconds
        if len(slept) == 3:
            raise asyncio.CancelledError

    site.clock.now = 100.25
    monkeypatch.setattr("gateway.admin.history.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await site.history.run()
    assert slept == [0.75, 1.0, 1.0]
    assert site.history.series.to_json(0.0, [])["points"]["requests"][-3:] == [None, 0, 0]


def test_shares_are_of_all_service_in_the_window() -> None:
    shares = Shares()
    shares.tick({"acme": 3.0, "other": 1.0})
    assert (shares.share("acme"), shares.share("other"), shares.share("nobody")) == (0.75, 0.25, 0.0)


def test_service_leaves_the_window_after_a_minute_and_stays_in_the_total() -> None:
    shares = Shares()
    shares.tick({"acme": 5.0})
    for _ in range(WINDOW_TICKS):
        shares.tick({"acme": 5.0, "other": 1.0})
    assert (shares.share("acme"), shares.share("other")) == (0.0, 1.0)
    for _ in range(WINDOW_TICKS):
        shares.tick({"acme": 5.0, "other": 1.0})
    assert shares.share("other") == 0.0
    assert shares.total == {"acme": 5.0, "other": 1.0}


def test_a_correction_that_takes_back_more_than_was_charged_lately_is_no_negative_share() -> None:
    shares = Shares()
    shares.tick({"acme": 5.0, "other": 5.0})
    for _ in range(WINDOW_TICKS):
        shares.tick({"acme": 4.9, "other": 6.0})
    assert (shares.share("acme"), shares.share("other")) == (0.0, 1.0)
