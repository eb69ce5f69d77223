"""What the overload benchmark asks for: lengths, rates, deadlines, and what is declared."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import pytest

from labs.benchmarks.overload_loads import (
    ALONE,
    BESIDE_4X,
    BURST,
    LIGHT,
    MIXED,
    OVERLOAD,
    Load,
    Part,
    Traffic,
    everyone,
)


@pytest.fixture(autouse=True)
def capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares simulating what the machine completes a second. Traffic is shared by all tests: nothing stays in it."""
    monkeypatch.setattr(Traffic, "capacity", property(lambda traffic: 8.0))


@pytest.fixture
def code() -> Traffic:
    return Traffic.code()


def test_requests_for_code_are_long_prompts_and_short_answers(code: Traffic) -> None:
    prompts, answers = ([getattr(a, f"{kind}_tokens") for a in code.trace] for kind in ("prompt", "output"))
    assert mean(prompts) == pytest.approx(2048, rel=0.05) and median(prompts) == pytest.approx(1500, rel=0.05)
    assert mean(answers) == pytest.approx(28, rel=0.1) and median(answers) == 13


def test_no_request_declares_the_length_of_its_answer(code: Traffic) -> None:
    for traffic in (code, Traffic.conversations(), Traffic.short()):
        assert all(arrival.output_tokens <= traffic.max_tokens for arrival in traffic.trace)
        arrivals = OVERLOAD.arrivals(traffic, 1)
        assert {arrival.declared_tokens for arrival in arrivals} == {traffic.max_tokens}


def test_each_part_comes_at_its_own_rate(code: Traffic) -> None:
    arrivals = BESIDE_4X.arrivals(code, 1)
    assert arrivals == sorted(arrivals, key=lambda arrival: arrival.time)
    assert [arrival.session for arrival in arrivals] == list(range(len(arrivals)))
    found = Counter(arrival.tenant for arrival in arrivals)
    assert found["flood"] == pytest.approx(4 * code.capacity * 300, rel=0.05)
    for tenant in LIGHT:
        assert found[tenant] == pytest.approx(0.15 * Traffic.short().capacity * 300, rel=0.15)
    assert len(ALONE.arrivals(code, 1)) == sum(found[tenant] for tenant in LIGHT)


def test_a_burst_multiplies_the_rate(code: Traffic) -> None:
    times = [arrival.time for arrival in BURST.arrivals(code, 2)]
    inside = sum(240 <= time < 300 for time in times) / 60
    assert inside / ((len(times) - inside * 60) / 540) == pytest.approx(2.5, rel=0.1)


def test_deadlines_are_mixed_evenly(code: Traffic) -> None:
    found = Counter(arrival.deadline for arrival in MIXED.arrivals(code, 1))
    assert found.keys() == {0.7, 2.0, 8.0}
    assert min(found.values()) > 0.28 * found.total()


def test_a_recorded_load_keeps_the_order_and_the_gaps(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:{n // 60:02}:{n % 60:02}.0,{20_000 if n % 2 else 10},{n % 5 + 1}" for n in range(3000)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    traffic = Traffic.recorded(trace)
    load = Load("recorded", (Part(("a",), 1.0),), seconds=100.0, is_recorded=True)
    arrivals = load.arrivals(traffic, 3)
    assert len(arrivals) == pytest.approx(100 * traffic.capacity, abs=1)
    gaps = {round(b.time - a.time, 6) for a, b in pairwise(arrivals)}
    assert len(gaps) == 1 and gaps.pop() == pytest.approx(1 / traffic.capacity, rel=1e-3)
    assert {arrival.prompt_tokens for arrival in arrivals} == {10, 16_000}
    assert all((b.output_tokens - a.output_tokens) % 5 == 1 for a, b in pairwise(arrivals))


def test_a_shorter_load_has_the_same_rate(code: Traffic) -> None:
    shorter = everyone("x", 1.0).shortened(0.5)
    assert len(shorter.arrivals(code, 1)) == pytest.approx(150 * code.capacity, rel=0.1)
