"""What a step has brought, as a replay tells the core: tokens stand for what came of them alone."""

from collections.abc import Sequence as Listed
from typing import Any

from backend.scheduler.batch import NO_TOKEN, StepOutput

END = 1  # the token that ends a sequence in a replay; all others are 0


def output_of(
    sampled: list[str], step: int, elapsed: float, ended: list[str], failed: list[str], jumped: Listed[list[Any]] = ()
) -> StepOutput:
    """Returns the output of a step that has sampled for these ids, as its entry says what came of it: whom an end token
    ended, for whom there was none, and for how many tokens that a grammar forced.
    """
    forced = {name: [0] * (count - 1) + [END if name in ended else 0] for name, count in jumped}
    drawn = dict.fromkeys(ended, END) | dict.fromkeys(failed, NO_TOKEN) | dict.fromkeys(forced, 0)
    by_row = {row: forced[name] for row, name in enumerate(sampled) if name in forced}
    return StepOutput(step, [drawn.get(name, 0) for name in sampled], elapsed, forced=by_row or None)
