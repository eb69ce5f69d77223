"""A step's output in a replay: placeholder tokens that reproduce only their effects."""

from collections.abc import Sequence as Listed
from typing import Any

from backend.scheduler.batch import NO_TOKEN, StepOutput

END_TOKEN = 1  # ends a sequence in a replay; all other tokens are 0


def output_of(
    sampled: list[str], step: int, elapsed: float, ended: list[str], failed: list[str], jumped: Listed[list[Any]] = ()
) -> StepOutput:
    """Return the output of a step that sampled for these ids: `ended` got an end token, `failed` no token, and `jumped`
    gives the number of tokens that a grammar forced.
    """
    forced = {name: [0] * (count - 1) + [END_TOKEN if name in ended else 0] for name, count in jumped}
    drawn = dict.fromkeys(ended, END_TOKEN) | dict.fromkeys(failed, NO_TOKEN) | dict.fromkeys(forced, 0)
    by_row = {row: forced[name] for row, name in enumerate(sampled) if name in forced}
    return StepOutput(step, [drawn.get(name, 0) for name in sampled], elapsed, forced=by_row or None)
