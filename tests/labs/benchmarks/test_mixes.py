from math import inf
from random import Random

import pytest

from labs.benchmarks import mixes
from labs.benchmarks.mixes import FAIR, Asking, Outcome, World, reason


@pytest.mark.parametrize(
    ("others", "ample", "named"),
    [(0.95, 0.5, "chance"), (0.5, 0.95, "scarce"), (0.5, 0.5, "order")],
)
def test_a_world_below_the_plain_orders_is_named_by_what_makes_it_as_good(
    others: float, ample: float, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain orders are always good; the fair one is, with other arrivals, or with ample slots and memory."""
    tenant = Asking.drawn("t0", 0.1, Random(1))._replace(leaves_after=inf)
    scarce = World(1, [tenant], "scarce", 40.0)
    plenty = scarce._replace(engine="ample")
    monkeypatch.setattr(World, "drawn", lambda number, seconds, is_ample=False: plenty if is_ample else scarce)

    def run(world: World, order: str) -> Outcome:
        good = ample if world.engine == "ample" else others
        return Outcome(good, good if order == FAIR else 1.0, 0, 0, {})

    monkeypatch.setattr(mixes, "run", run)
    assert reason(1, 40.0)["reason"] == named
