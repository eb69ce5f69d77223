"""The ledger of claims: what counts as reproduced, and that every choice has a row."""

from pathlib import Path

import pytest

from admission.core import ORDERS, MemoryGate
from backend.config import Batching
from labs.benchmarks import claim_choices, claim_measures, claims
from labs.benchmarks.claim_choices import Figures
from labs.benchmarks.claim_measures import Measured

SETTINGS = Path(claim_measures.__file__).read_text(encoding="utf-8")
OURS = {"earliest_deadline", "shortest_first", "minimum_free", "continuous"}  # beside which others are measured


@pytest.mark.parametrize(("figure", "reproduces"), [(0.99, False), (1.0, True), (3.0, True), (6.0, True), (6.1, False)])
def test_a_claim_reproduces_within_a_factor_of_two(figure: float, reproduces: bool) -> None:
    claim = next(claim for claim in claims.ROWS if claim.claimed is not None)
    assert claims.Claim("c", "s", "s", (2.0, 3.0), claim.measure, "d").reproduces(Measured(figure, "")) is reproduces
    assert not claims.Claim("c", "s", "s", None, claim.measure, "d").reproduces(Measured(figure, ""))


def test_every_choice_has_a_row() -> None:
    choices = {*ORDERS, *Batching, *MemoryGate} - OURS
    assert {choice for choice in choices if choice not in SETTINGS} == set()


def test_rows_name_their_claims_and_can_be_told_apart() -> None:
    assert len({claim.what for claim in claims.ROWS}) == len(claims.ROWS)
    assert all(claim.source and claim.says and claim.differs for claim in claims.ROWS)
    assert all("|" not in text for claim in claims.ROWS for text in (claim.what, claim.source, claim.says))


def test_figures_that_need_no_machine_are_computed() -> None:
    assert claim_measures.decodes_of_prefill() == pytest.approx(30.7, abs=0.1)
    assert pytest.approx(335.5, abs=0.1) == claim_measures.MEGABYTES


def test_every_choice_is_measured_beside_the_default() -> None:
    names = [choice for choice, _ in claim_choices.choices()]
    assert names[0] == "order fair" and len(set(names)) == len(names)
    assert {name.split()[1] for name in names} == {*ORDERS, *Batching, *MemoryGate} - {"continuous", "forecast"}


def test_the_verdict_names_choices_that_beat_the_default() -> None:
    found = {"order fair": Figures(0.8, 0.9, 1.0), "a": Figures(0.9, 0.95, 0.5), "b": Figures(0.9, 0.7, 2.0)}
    said = claim_choices.verdict("code", found)
    assert "2 have more good requests" in said and "1 a smaller gap" in said and "and 1 all three (a)" in said
