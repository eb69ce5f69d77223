from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labs.bench.exchange import Exchange, Outcome
from labs.bench.generator import Run
from labs.bench.remarks import remarks
from labs.bench.scenario import Scenario, Targets
from labs.bench.summary import Course, Summary, is_good, phases_of, recovery, summarise

TENANT = {"rate": 1, "workload": "reasoning"}


def answered(due: float, first: float = 0.1, chunks: int = 3, gap: float = 0.1, **fields: Any) -> Exchange:
    times = [due + first + gap * n for n in range(chunks)]
    given = {"tenant": "a", "sent": due, "attempts": 1, "token_times": times, "ended": times[-1]} | fields
    return Exchange(due=due, **{"outcome": Outcome.ANSWERED, "output_tokens": chunks, "prompt_tokens": 10} | given)


def refused(due: float, tenant: str = "a", code: str = "429 busy") -> Exchange:
    return Exchange(tenant, due, due, 1, ended=due, outcome=Outcome.REFUSED, code=code)


def scenario(seconds: float = 10.0, tenants: dict[str, Any] | None = None, **fields: Any) -> Scenario:
    return Scenario.parse({"seconds": seconds, "tenants": tenants or {"a": TENANT}, **fields}, "test")


def summed(exchanges: Sequence[Exchange], world: Scenario | None = None, **fields: Any) -> Summary:
    return summarise(Run(list(exchanges), **fields), world or scenario())


def test_figures_are_of_all_that_was_offered_after_the_warm_up() -> None:
    world = scenario(warm_up=2.0, targets={"ttft": "200ms"})
    found = summed(
        [
            answered(1.0),
            answered(3.0),
            answered(4.0, first=0.3),
            refused(5.0),
            refused(6.0),
            refused(7.0, code="503 x"),
        ],
        world,
    )
    every = found.all
    assert (every.offered, every.answered, every.good, every.goodput) == (5, 2, 1, 0.2)
    assert every.refusals == {"429 busy": 2, "503 x": 1}
    assert every.ttft.p50 == pytest.approx(0.1) and every.ttft.p99 == pytest.approx(0.3) and every.ttft.count == 2
    assert every.per_token.mean == pytest.approx(0.1) and every.request_rate == 5 / 8
    assert (every.prompt_tokens, every.output_tokens, every.output_rate) == (20, 6, pytest.approx(6 / 8))


def test_a_request_without_an_answer_has_waited_until_the_end() -> None:
    stuck = Exchange("a", 1.0, 1.0, 1, ended=70.0, outcome=Outcome.UNFINISHED)
    assert summed([answered(0.0), stuck]).all.ttft.p99 == 69.0


def test_tokens_of_the_drain_are_no_throughput() -> None:
    assert summed([answered(9.0, first=0.5, chunks=4, gap=0.4)]).all.output_rate == pytest.approx(2 / 10)


def test_clients_that_leave_or_read_slowly_spoil_no_figure() -> None:
    left = answered(1.0, outcome=Outcome.LEFT)
    slow = answered(1.0, gap=5.0, is_slow=True)
    every = summed([answered(0.0), left, slow]).all
    assert (every.goodput, every.left) == (1.0, 1)
    assert every.between.p99 == pytest.approx(0.1) and every.total.count == 1


@pytest.mark.parametrize(
    ("targets", "fields", "good"),
    [
        ({}, {}, True),
        ({"ttft": 0.1}, {"first": 0.25}, False),
        ({"per_token": 0.1}, {"gap": 0.25}, False),
        ({"per_token": 0.1}, {"chunks": 1}, True),
        ({"total": 0.25}, {}, False),
        ({}, {"is_right": False}, False),
        ({"total": 1.0}, {"is_right": True}, True),
        ({}, {"outcome": Outcome.FAILED}, False),
    ],
)
def test_a_good_answer_is_in_time_and_right(targets: dict[str, float], fields: dict[str, Any], good: bool) -> None:
    assert is_good(answered(0.0, **fields), Targets.model_validate(targets)) is good


def test_shares_are_of_the_time_in_which_all_waited() -> None:
    """Both wait from 0 to 2 s, in which one is served three times as much; later use alone is no unfairness."""
    world = scenario(tenants={"a": TENANT, "b": TENANT | {"weight": 3}})
    served = [answered(0.0, first=0.51 + n / 10, chunks=1, prompt_tokens=0, output_tokens=100) for n in range(10)]
    other = [answered(0.0, 0.51 + n / 10, 1, tenant="b", prompt_tokens=0, output_tokens=300) for n in range(10)]
    waiting = [answered(0.0, first=2.0, chunks=1, tenant=name) for name in ("a", "b")]
    alone = [answered(5.0, output_tokens=10_000)]
    found = summed([*served, *other, *waiting, *alone], world)
    shares = {one.name: (one.token_share, one.fair_share) for one in found.tenants}
    assert shares == {"a": (pytest.approx(0.25), 0.25), "b": (pytest.approx(0.75), 0.75)}
    assert found.gap_tokens is None or found.gap_tokens <= 100


@pytest.mark.parametrize(
    ("good", "seconds"),
    [
        ([4, 4, 4, 4, 4, 4], 0.0),
        ([4, 4, 4, 0, 2, 4], 1.5),
        ([4, 4, 0, 4, 0, 4], 1.5),
        ([4, 4, 4, 0, 0, 0], None),
        ([0, 0, 0, 0, 0, 0], 0.0),
    ],
)
def test_a_server_has_recovered_when_goodput_stays(good: list[int], seconds: float | None) -> None:
    assert recovery(Course((4,) * 6, tuple(good), (0.0,) * 6), fault_at=3.5, warm_up=0.0) == seconds


def test_doubts_are_told_with_their_remedies() -> None:
    uniform = [answered(n / 50, sent=n / 50 + 0.05, first=0.1, cached_tokens=5) for n in range(120)]
    slow = [answered(5.0, first=2.0, prompt_tokens=10) for _ in range(3)]
    run = Run([*uniform, *slow], cpu_share=0.9)
    said = "\n".join(remarks(run, scenario(), summarise(run, scenario())))
    for doubt in (
        "of a core",
        "sent up to 50 ms late",
        "prompts of a are all of one length",
        "p99 (2 s) is 20.0 times",
    ):
        assert doubt in said
    assert "found in a prefix cache" in said and "too few" not in said
    few = Run([answered(0.0, chunks=n, prompt_tokens=50 * n) for n in range(2, 7)])
    assert [line[:23] for line in remarks(few, scenario(), summarise(few, scenario()))] == ["5 requests are too few "]


@given(
    st.lists(
        st.builds(
            answered,
            due=st.floats(0, 12),
            first=st.floats(0.001, 5),
            chunks=st.integers(1, 5),
            tenant=st.sampled_from(["a", "b"]),
            outcome=st.sampled_from(Outcome),
        ),
        max_size=30,
    )
)
def test_every_request_is_counted_once(exchanges: list[Exchange]) -> None:
    found = summed(exchanges, scenario(tenants={"a": TENANT, "b": TENANT}))
    for one in (found.all, *found.tenants):
        parts = one.answered, sum(one.refusals.values()), sum(one.failures.values()), one.left, one.unfinished
        assert sum(parts) == one.offered and 0 <= one.goodput <= 1
    assert sum(one.offered for one in found.tenants) == found.all.offered == len(exchanges)
    assert sum(found.course.offered) + found.all.left == len(exchanges)


def test_a_phase_sums_up_what_was_due_in_it() -> None:
    world = scenario(phases={"calm": [0, "2s"], "busy": [2, 10]})
    run = Run([answered(1.0), answered(2.0, first=0.5), refused(3.0), answered(9.0, first=0.5)], fault_at=2.0)
    calm, busy = phases_of(run, world).values()
    assert (calm.all.offered, calm.all.request_rate) == (1, 0.5) and calm.all.ttft.p50 == pytest.approx(0.1)
    assert (busy.all.offered, busy.all.answered) == (3, 2) and busy.all.ttft.p50 == pytest.approx(0.5)
