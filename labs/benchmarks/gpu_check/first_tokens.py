"""The engine's part of a first token's time, by a gateway's event log."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from admission.event_logs.numbers import in_seconds

KINDS = ('["arrive"', '["plan"', '["done"')


@dataclass(slots=True)
class FirstToken:
    """An admitted request; times in seconds of the engine's clock."""

    tenant: str
    arrived: float
    by: float | None
    left: int  # tokens of its prompt that are not planned
    planned: float | None = None  # first
    began: float = 0.0  # the last step of its prompt
    came: float | None = None
    steps: int = 0  # completed from its arrival to its first token

    @property
    def waited(self) -> float:
        assert self.came is not None
        return self.came - self.arrived

    @property
    def parts(self) -> tuple[float, float, float]:
        """Seconds until a step was planned with it, until the last one of its prompt began, and of that step."""
        assert self.planned is not None and self.came is not None
        return self.planned - self.arrived, max(0.0, self.began - self.planned), self.came - self.began


def lines_since(log: Path, offset: int) -> Iterator[str]:
    """Whole lines behind the first `offset` bytes."""
    with log.open("rb") as file:
        file.seek(offset)
        for line in file:
            if line.endswith(b"\n"):
                yield line.decode()


def first_tokens(lines: Iterable[str]) -> tuple[list[FirstToken], list[float]]:
    """The requests that were admitted within these lines, and the seconds of each step.

    Requests with a prefix hit, or preempted before their first token, are not followed.
    """
    found, steps = _Followed(), list[float]()
    for line in lines:
        if line.startswith(KINDS):
            found.follow(json.loads(line), steps)
    return found.requests, steps


class _Followed:
    def __init__(self) -> None:
        self.requests: list[FirstToken] = []
        self._waiting: dict[str, FirstToken] = {}
        self._ending: dict[int, list[FirstToken]] = {}  # their prompts, by step
        self._done_at = 0.0

    def follow(self, entry: list[Any], steps: list[float]) -> None:
        now = in_seconds(entry[1])
        if entry[0] == "arrive" and entry[15] is None:
            one = FirstToken(entry[3], now, entry[10], entry[4], steps=-len(steps))
            self._waiting[entry[2]] = one
            self.requests.append(one)
        elif entry[0] == "plan" and entry[2] is not None:
            self._plan(entry[2], entry[5], now)
        elif entry[0] == "done":
            steps.append(in_seconds(entry[3]))
            for one in self._ending.pop(entry[2], []):
                one.began, one.came, one.steps = max(self._done_at, now - steps[-1]), now, one.steps + len(steps)
            self._done_at = now

    def _plan(self, step: int, prefills: list[tuple[str, int]], now: float) -> None:
        for name, tokens in prefills:
            if (one := self._waiting.get(name)) is not None:
                one.planned = now if one.planned is None else one.planned
                one.left -= tokens
                if one.left <= 0:
                    self._ending.setdefault(step, []).append(self._waiting.pop(name))
