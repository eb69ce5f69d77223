"""The embedded model's tool skill: asks that tools beside them answer, the calls, and what to say of the results.

As with the other skills, training and measuring never share arguments (`is_held_out`), and `tool_unseen` has names of
tools, places, things and people that are in no training text with tools.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from random import Random

from labs.benchmarks import skills
from labs.benchmarks.small_talk import REFUSAL, small_talk
from labs.benchmarks.tool_skill.asks import Ask, draw_family, joined
from labs.benchmarks.tool_skill.names import PLACE_KEYS
from labs.benchmarks.tool_skill.tools import Call, Tool, calls_text
from labs.benchmarks.words import WORDS

MAX_OTHER_TOOLS = 3
MAX_DRAWS = 40  # of one turn
TOOL_SKILLS = ("tool_call", "tool_parallel", "tool_answer", "tool_none", "tool_unseen")
SEVERAL_SHARE, NONE_SHARE = 0.45, 0.2
_PLAIN = ("count_up", "count_by", "days", "months", "alphabet", "repeat", "echo", "add")
_MAX_PLAIN = 60  # characters of an answer beside tools
_IN_SMALL_TALK = {"multiply", "weather", "time", "population"}


@dataclass(frozen=True, slots=True)
class ToolTurn:
    """An ask and what is right: the calls, and `answer` after their `results`; without calls `answer` alone."""

    prompt: str
    calls: tuple[Call, ...]
    results: tuple[str, ...]
    answer: str

    @property
    def first_text(self) -> str:
        """The text that the model is to write upon the ask."""
        return calls_text(self.calls) if self.calls else self.answer

    def messages(self, *, with_results: bool = False) -> list[dict[str, object]]:
        """The conversation as a client sends it: up to the ask, or up to the results of the calls."""
        messages: list[dict[str, object]] = [{"role": "user", "content": self.prompt}]
        if with_results:
            messages.append({"role": "assistant", "tool_calls": [call.message() for call in self.calls]})
            messages += [{"role": "tool", "content": result} for result in self.results]
        return messages


class ToolBox:
    """Tools of one conversation and turns that fit them: one or two that are asked for, and others."""

    def __init__(self, rng: Random, *, unseen: bool = False) -> None:
        self._rng = rng
        key = rng.choice(PLACE_KEYS)
        asked = [draw_family(rng, key, unseen=unseen) for _ in range(rng.choice((1, 1, 2)))]
        self._asked = asked if len({family.tool.topic for family in asked}) == len(asked) else asked[:1]
        num_others = rng.randint(0, MAX_OTHER_TOOLS)
        tools = [family.tool for family in self._asked] + [draw_family(rng, key).tool for _ in range(num_others)]
        different = list({tool.topic: tool for tool in reversed(tools)}.values())  # those asked for win
        rng.shuffle(different)
        self.tools = tuple({tool.name: tool for tool in different}.values())

    def turn(self, *, held_out: bool, skill: str = "") -> ToolTurn | None:
        """A turn of that skill, or of any; its arguments are held out of training, or none of them is.

        None where no draw is so: a tool of few arguments may have none held out, or all of them.
        """
        if skill == "tool_none" or (not skill and self._rng.random() < NONE_SHARE):
            return self._none(held_out)
        several = skill == "tool_parallel" or (not skill and self._rng.random() < SEVERAL_SHARE)
        ask = self._ask(held_out, several)
        if ask is None:
            return None
        results = tuple(_result(self._rng) for _ in ask.calls)
        spoken = (sentence.format(_spoken(result)) for sentence, result in zip(ask.sentences, results, strict=True))
        return ToolTurn(ask.prompt, ask.calls, results, " ".join(spoken))

    def _ask(self, held_out: bool, several: bool) -> Ask | None:
        for _ in range(MAX_DRAWS):
            ask = self._several() if several else self._rng.choice(self._asked).draw(self._rng)
            if held_out == is_held_out(ask) and (len(ask.calls) > 1) == several:
                return ask
        return None

    def _several(self) -> Ask:
        family = self._rng.choice(self._asked)
        if family.draw_several and self._rng.random() < 0.6:
            return family.draw_several(self._rng)
        return joined(self._rng, family.draw(self._rng), self._rng.choice(self._asked).draw(self._rng))

    def _none(self, held_out: bool) -> ToolTurn:
        """An ask that no tool is for: the answer is as without tools."""
        topics = {tool.topic for tool in self.tools}
        while True:
            if self._rng.random() < 0.4:
                family = draw_family(self._rng, PLACE_KEYS[0])
                ask = family.draw(self._rng)
                if family.tool.topic not in topics | {"add"} and held_out == is_held_out(ask):
                    return ToolTurn(ask.prompt, (), (), REFUSAL)
            else:
                prompt, answer = self._plain(held_out, topics)
                if len(answer) <= _MAX_PLAIN or answer == REFUSAL:
                    return ToolTurn(prompt, (), (), answer)

    def _plain(self, held_out: bool, topics: set[str]) -> tuple[str, str]:
        if not topics & _IN_SMALL_TALK and self._rng.random() < 0.3:
            return small_talk(self._rng)
        skill = self._rng.choice([skill for skill in _PLAIN if skill not in topics])
        while True:
            example = skills.SKILLS[skill](self._rng)
            if skills.is_held_out(example) == held_out:
                return example.prompt, example.answer


def is_held_out(ask: Ask) -> bool:
    """Return True if one of the calls has held-out arguments: one in five has, by hash, and training never calls with
    them.
    """
    return any(zlib.crc32(repr(tuple(call.arguments.values())).encode()) % 5 == 0 for call in ask.calls)


def fresh_tool_turns(n: int, seed: int, skill: str) -> list[tuple[tuple[Tool, ...], ToolTurn]]:
    """`n` turns of a tool skill with arguments that training never saw, each with its tools."""
    rng = Random(f"{seed} {skill}")
    kind = skill if skill in {"tool_parallel", "tool_none"} else "tool_call"
    fresh: list[tuple[tuple[Tool, ...], ToolTurn]] = []
    while len(fresh) < n:
        box = ToolBox(rng, unseen=skill == "tool_unseen")
        turn = box.turn(held_out=True, skill=kind)
        if turn is not None:
            fresh.append((box.tools, turn))
    return fresh


_RESULT_WORDS = (
    "sunny", "cloudy", "rainy", "windy", "clear", "cold", "warm", "snow", "ok", "done", "sent", "saved", "open",
    "closed",
)  # fmt: skip
_RESULT_KEYS = ("temperature", "sky", "wind", "unit", "value", "status")
_RESULT_UNITS = ("degrees", "C", "km", "euros", "%", "years", "people", "minutes")


def _result(rng: Random) -> str:
    """Return a tool's result: a number, a time, some words, or a flat JSON object."""
    if rng.random() < 0.12:
        keys = dict.fromkeys(rng.choice(_RESULT_KEYS) for _ in range(rng.randint(1, 3)))
        return json.dumps({key: _scalar(rng) for key in keys}, ensure_ascii=False)
    return ", ".join(str(_scalar(rng)) for _ in range(rng.choice((1, 1, 1, 2))))


def _scalar(rng: Random) -> str | int:
    kind = rng.random()
    number = rng.randint(0, rng.choice((9, 40, 99, 999, 9999)))
    if kind < 0.3:
        return number
    if kind < 0.5:
        return f"{number} {rng.choice(_RESULT_UNITS)}"
    if kind < 0.6:
        return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    if kind < 0.7:
        return f"{number}.{rng.randint(0, 99)}"
    return rng.choice(_RESULT_WORDS if kind < 0.9 else WORDS)


def _spoken(result: str) -> str:
    """A result as a sentence says it: an object without its braces and quotes."""
    if not result.startswith("{"):
        return result
    return ", ".join(f"{key} {value}" for key, value in json.loads(result).items())
