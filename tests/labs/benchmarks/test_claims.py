"""The ledger of claims: how a figure is judged, that every choice is measured, and that the page is of this commit."""

import json
from math import inf
from pathlib import Path

import pytest

from admission.core import ORDERS, MemoryGate
from backend.config import Batching
from labs.benchmarks import claim_choices, claim_measures, claims
from labs.benchmarks.claim_rows import ROWS, Claim
from labs.benchmarks.report import RESULTS, Spread

SETTINGS = Path(claim_measures.__file__).read_text(encoding="utf-8")
OURS = {"earliest_deadline", "shortest_first", "minimum_free", "continuous"}  # beside which others are measured
QUICK = ("forecast_admission", "service_gaps", "deadline_admission")  # of CI: three seconds
RESULT = json.loads((RESULTS / "claims.json").read_text())


@pytest.mark.parametrize(
    ("claimed", "seeds", "said"),
    [
        ((3.0, 5.0), (2.5, 4.0, 5.9), "yes"),
        ((3.0, 5.0), (2.3, 4.0, 5.0), "partly"),  # one seed is further away
        ((3.0, 5.0), (5.0, 9.9, 30.0), "partly"),
        ((3.0, 5.0), (4.0, 10.1, 11.0), "no"),  # more than claimed is another figure, too
        ((-0.6, -0.6), (-0.65, -0.6, -0.5), "yes"),
        ((-0.6, -0.6), (0.5, 0.6, 0.7), "no"),  # the other way
        ((-inf, 0.05), (0.01, 0.02, 0.05), "yes"),
        ((-inf, 0.05), (0.01, 0.02, 0.06), "partly"),
        ((2.0, inf), (1.0, 1.5, 1.9), "no"),
        ((0.0, 0.0), (0.0, 0.0, 0.0), "yes"),
    ],
)
def test_a_figure_is_judged_by_all_its_seeds(claimed: tuple[float, float], seeds: tuple[float, ...], said: str) -> None:
    assert claims.judged(claimed, Spread.of(seeds)) == said


def test_a_row_of_two_figures_of_which_one_holds_is_partly_right() -> None:
    measure = claim_measures.kv_use
    claim = Claim("c", "s", "s", {"x a": (1.0, 1.0), "x b": (1.0, 1.0)}, measure, "d")
    for a, b, said in ((1.0, 1.0, "yes"), (1.0, 9.0, "partly"), (1.5, 9.0, "no")):
        found = {"kv_use": {"x a": Spread.of([a]), "x b": Spread.of([b])}}
        assert claims.verdict(claim, found) == said
    assert claims.verdict(Claim("c", "s", "s", claim.claimed, measure, "d", is_another=True), {}) == "another claim"


def test_every_choice_has_a_row_and_is_measured_beside_the_default() -> None:
    assert {choice for choice in {*ORDERS, *Batching, *MemoryGate} - OURS if choice not in SETTINGS} == set()
    names = [*claim_choices.choices()]
    assert names[0] == "order fair" and all(name.endswith("order fair") for name in names[len(ORDERS) :])
    assert {name.split(",")[0].split()[1] for name in names} == {*ORDERS, *Batching, *MemoryGate} - {
        "continuous",
        "forecast",
    }


def test_the_verdict_names_choices_that_beat_the_default() -> None:
    said = claim_choices.verdict("code", {"fair": (0.8, 0.9, 1.0), "a": (0.9, 0.95, 0.5), "b": (0.9, 0.7, 2.0)})
    assert "2 have more good requests" in said and "1 a smaller gap" in said and "and 1 all three (a)" in said


def test_rows_can_be_told_apart_and_every_claimed_figure_is_one_that_is_measured() -> None:
    assert len({claim.what for claim in ROWS}) == len(ROWS)
    measured = claims.full_form(RESULT["tables"])
    for claim in ROWS:
        own = measured[claim.measure.__name__] if claim.measure else claims.live(claim)["live"]
        assert claim.claimed and claim.claimed.keys() <= own.keys(), claim.what
        assert not any("|" in text for text in (claim.what, claim.source, claim.says, claim.differs))


def test_the_page_says_what_the_result_says() -> None:
    assert claims.PAGE.read_text() == claims.page(), "run python -m labs.benchmarks.claims"


@pytest.mark.parametrize("names", [QUICK, pytest.param((), marks=pytest.mark.nightly)], ids=["quick", "all"])
def test_the_short_form_is_that_of_this_commit(names: tuple[str, ...]) -> None:
    """Decisions that change a figure of the page change a figure of its short form."""
    recorded = claims.short_form(RESULT["tables"])
    own = {
        name: measure(claims.FIRST_SEED, claims.SHORT_SHARE)
        for name, measure in claims.measures().items()
        if name in (names or recorded)
    }
    changed = {name for name, figures in own.items() if recorded.get(name) != figures}
    assert own and not changed, "run python -m labs.benchmarks.claims, which measures these again, and performance_page"
