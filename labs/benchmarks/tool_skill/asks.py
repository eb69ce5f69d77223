"""Families of asks for tools: look-ups, arithmetic and actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from labs.benchmarks.tool_skill.actions import ACTIONS, CHOICES
from labs.benchmarks.tool_skill.names import PEOPLE, PLACE_NOUNS, PLACES, UNSEEN_PEOPLE, UNSEEN_PLACES
from labs.benchmarks.tool_skill.tools import Call, Parameter, Tool, Value
from labs.benchmarks.words import UNSEEN_WORDS, WORDS, make_word


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, the calls it needs, and for each what is said of its result, which `{}` stands for."""

    prompt: str
    calls: tuple[Call, ...]
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """A tool and a generator of asks that it answers: for one call, or for each of several subjects."""

    tool: Tool
    draw: Callable[[Random], Ask]
    draw_several: Callable[[Random], Ask] | None = None


def draw_family(rng: Random, place_key: str, *, unseen: bool = False) -> Family:
    """A look-up of places has its parameter named `place_key`."""
    kind = rng.choices(("place", "price", "arithmetic", "action"), (52, 10, 16, 22))[0]
    match kind:
        case "place":
            return lookup(rng, rng.choice(PLACE_NOUNS), place_key, lambda rng: _place(rng, unseen))
        case "price":
            return lookup(rng, "price", "item", lambda rng: _thing(rng, unseen))
        case "arithmetic":
            return arithmetic(rng)
        case _:
            return action(rng, unseen)


def joined(rng: Random, first: Ask, second: Ask) -> Ask:
    """Both asks in one prompt."""
    head, tail = first.prompt, second.prompt
    if head.endswith(".") and rng.random() < 0.7:
        prompt = f"{head[:-1]} and {tail[0].lower()}{tail[1:]}"
    else:
        prompt = f"{head if head[-1] in '.?' else head + '.'} {tail}"
    return Ask(prompt, first.calls + second.calls, first.sentences + second.sentences)


# --- Look-ups: one subject, of which the tool knows something ---

_LOOKUP_ASKS = (
    "What is the {n} {p} {x}?", "What is the {n} {p} {x}?", "What is the {n} {p} {x}?", "What's the {n} {p} {x}?",
    "Tell me the {n} {p} {x}.", "Get the {n} {p} {x}.", "Look up the {n} {p} {x}.", "Show me the {n} {p} {x}.",
    "I need the {n} {p} {x}.", "Find the {n} {p} {x}.", "What is the current {n} {p} {x}?", "Give me the {n} {p} {x}.",
    "How is the {n} {p} {x}?", "Can you get the {n} {p} {x}?", "What is the {n} like {p} {x}?",
    "Check the {n} {p} {x}.", "What's the {n} like {p} {x}?", "I want to know the {n} {p} {x}.",
    "Do you know the {n} {p} {x}?",
)  # fmt: skip
_SPECIAL_ASKS = {
    "weather": (
        "Is it raining in {x}?", "Will it rain in {x}?", "Do I need an umbrella in {x}?", "Is it sunny in {x}?",
        "How warm is it in {x}?", "How cold is it in {x}?", "Is it cold in {x}?", "Is it warm in {x}?",
    ),
    "time": ("What time is it in {x}?", "How late is it in {x}?", "What time is it now in {x}?"),
    "temperature": ("How warm is it in {x}?", "How hot is it in {x}?", "How cold is it in {x}?"),
    "population": ("How many people live in {x}?",),
    "price": ("How much does {x} cost?", "How much is {x}?"),
}  # fmt: skip
_MOMENTS = ("today", "now", "right now", "tomorrow", "this week")


def lookup(rng: Random, noun: str, key: str, subject: Callable[[Random], str]) -> Family:
    """`get_weather(city)` and the like, at times with a unit."""
    preposition = "of" if noun == "price" else "in"
    has_unit = noun in {"weather", "temperature"} and rng.random() < 0.25
    units = Parameter("unit", ("celsius", "fahrenheit"), is_required=False)
    parameters = (Parameter(key, "string"), *((units,) if has_unit else ()))
    tool = Tool(f"get_{noun}", parameters, "weather" if noun == "temperature" else noun)  # how warm it is tell both

    def ask(rng: Random, number: int) -> Ask:
        subjects = [subject(rng) for _ in range(number)]
        unit = rng.choice(units.kind) if has_unit and rng.random() < 0.5 else ""
        prompt = _lookup_prompt(rng, noun, preposition, subjects, f" in {unit}" if unit else "")
        calls = tuple(Call(tool.name, {key: one} | ({"unit": unit} if unit else {})) for one in subjects)
        return Ask(prompt, calls, tuple(f"The {noun} {preposition} {one} is {{}}." for one in subjects))

    return Family(tool, lambda rng: ask(rng, 1), lambda rng: ask(rng, 2 if rng.random() < 0.75 else 3))


def _place(rng: Random, unseen: bool) -> str:
    if unseen:
        return rng.choice(UNSEEN_PLACES)
    return rng.choice(PLACES) if rng.random() < 0.7 else _capitalised(rng)


def _capitalised(rng: Random) -> str:
    """A made name of one or two words."""
    words = [make_word(rng).capitalize() for _ in range(1 if rng.random() < 0.8 else 2)]
    return " ".join(words)


def _thing(rng: Random, unseen: bool) -> str:
    if unseen:
        return rng.choice(UNSEEN_WORDS)
    return rng.choice(WORDS) if rng.random() < 0.7 else make_word(rng)


def _lookup_prompt(rng: Random, noun: str, preposition: str, subjects: list[str], suffix: str) -> str:
    special = _SPECIAL_ASKS.get(noun, ())
    phrasing = rng.choice(special) if special and rng.random() < 0.3 else rng.choice(_LOOKUP_ASKS)
    asked = "for" if rng.random() < 0.2 else preposition
    if not suffix and rng.random() < 0.1:
        suffix = " " + rng.choice(_MOMENTS)
    repeated = f" and {asked} " if "{p} {x}" in phrasing and rng.random() < 0.3 else " and "
    text = ", ".join(subjects[:-1]) + repeated + subjects[-1] if len(subjects) > 1 else subjects[0]
    return _styled(rng, phrasing[:-1].format(n=noun, p=asked, x=text) + suffix + phrasing[-1])


# --- Arithmetic: two numbers ---

_OPERATIONS = {
    "add": (
        "What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?",
        "Compute {a} + {b}.", "What is the sum of {a} and {b}?"),
    "multiply": (
        "What is {a} times {b}?", "Multiply {a} by {b}.", "Compute {a} * {b}.", "What is {a} * {b}?",
        "What is the product of {a} and {b}?", "How much is {a} times {b}?", "Multiply {a} and {b}."),
}  # fmt: skip


def arithmetic(rng: Random) -> Family:
    """`add(a, b)` and the like, with numbers far beyond what the model can reckon itself."""
    operation = rng.choice(list(_OPERATIONS))
    tool = Tool(operation, (Parameter("a", "integer"), Parameter("b", "integer")), operation)

    def ask(rng: Random) -> Ask:
        a, b = _number(rng), _number(rng)
        prompt = _styled(rng, rng.choice(_OPERATIONS[operation]).format(a=a, b=b))
        return Ask(prompt, (Call(tool.name, {"a": a, "b": b}),), ("The result is {}.",))

    return Family(tool, ask)


def _number(rng: Random) -> int:
    return rng.randint(0, rng.choice((9, 20, 99, 99, 999, 9999, 99999)))


# --- Actions: something is done with the arguments ---


def action(rng: Random, unseen: bool) -> Family:
    """`set_timer(minutes)` and the like."""
    name, kinds, asks = rng.choice(ACTIONS)
    tool = Tool(name, tuple(Parameter(key, _type(kind)) for key, kind in kinds.items()), name)

    def ask(rng: Random) -> Ask:
        arguments = {key: _value(rng, kind, unseen) for key, kind in kinds.items()}
        prompt = _styled(rng, rng.choice(asks).format(*arguments.values()))
        return Ask(prompt, (Call(tool.name, arguments),), ("Done: {}.",))

    return Family(tool, ask)


def _type(kind: str) -> str | tuple[str, ...]:
    if kind in {"small", "number"}:
        return "integer"
    return CHOICES[kind] if kind == "switch" else "string"


def _value(rng: Random, kind: str, unseen: bool) -> Value:
    words = UNSEEN_WORDS if unseen else WORDS
    match kind:
        case "small":
            value: Value = rng.randint(1, rng.choice((9, 30, 100)))
        case "number":
            value = _number(rng)
        case "person":
            value = rng.choice(UNSEEN_PEOPLE if unseen else PEOPLE)
        case "text":
            count = rng.randint(1, 4)
            value = " ".join(rng.choice(words) if rng.random() < 0.7 else make_word(rng) for _ in range(count))
        case _:
            value = rng.choice(CHOICES[kind])
    return value


def _styled(rng: Random, prompt: str) -> str:
    """At times with a please, a small first letter or no full stop."""
    style = rng.random()
    if style < 0.1 and not prompt.endswith("?") and not prompt.startswith("Please"):
        prompt = "Please " + prompt[0].lower() + prompt[1:]
    elif style < 0.18:
        prompt = prompt[0].lower() + prompt[1:]
    return prompt.rstrip(".?") if rng.random() < 0.1 else prompt
