"""The embedded model's skills: prompts whose answers can be checked, of lengths from a few tokens to a thousand.

Training and measuring draw from the same generators and never share a prompt's arguments: one in five combinations
of arguments is held out (`is_held_out`), training takes the others, `fresh_prompts` only those.
"""

from __future__ import annotations

import string
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from labs.benchmarks.stories import HEROES, MAX_SENTENCES, is_story, tell_story
from labs.benchmarks.words import UNSEEN_WORDS, WORDS, make_word

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
MAX_NUMBER = 999


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with a right answer; a story's `answer` is one of many and `story` holds (hero, sentences)."""

    skill: str
    arguments: tuple[object, ...]
    prompt: str
    answer: str
    story: tuple[str, int] | None = None

    def is_right(self, answer: str, *, ended: bool) -> bool:
        """Return True if `answer` is exactly right and the model `ended` it by itself, by an end token."""
        if not ended:
            return False
        return is_story(answer, *self.story) if self.story else answer == self.answer


def count_up(rng: Random) -> Example:
    start, end = _bounds(rng, _num_steps(rng))
    phrasings = _COUNT_FROM_ONE if start == 1 and rng.random() < 0.5 else _COUNT_UP
    return _example(rng, "count_up", (start, end), phrasings, _listed(range(start, end + 1)), a=start, b=end)


def count_down(rng: Random) -> Example:
    end, start = _bounds(rng, _num_steps(rng))
    return _example(rng, "count_down", (start, end), _COUNT_DOWN, _listed(range(start, end - 1, -1)), a=start, b=end)


def count_by(rng: Random) -> Example:
    step = rng.choice((2, 3, 5, 10))
    beyond = rng.choice((0, 0, step - 1, rng.randrange(step)))  # the end that is named may not be met
    start, end = _bounds(rng, step * _log_uniform(rng, 2, 40) + beyond)
    answer = _listed(range(start, end + 1, step))
    return _example(rng, "count_by", (step, start, end), _COUNT_BY, answer, s=step, a=start, b=end)


def days(rng: Random) -> Example:
    return _cycle(rng, "days", DAYS, "days of the week", max_items=21)


def months(rng: Random) -> Example:
    return _cycle(rng, "months", MONTHS, "months", max_items=24)


def alphabet(rng: Random) -> Example:
    letters = rng.choice((string.ascii_uppercase, string.ascii_lowercase))
    first, last = sorted(rng.sample(range(26), 2))
    answer = _listed(letters[first : last + 1])
    return _example(rng, "alphabet", (first, last), _ALPHABET, answer, a=letters[first], b=letters[last])


def repeat(rng: Random) -> Example:
    listed = rng.random() < 0.5
    word = rng.choice(WORDS) if listed else make_word(rng)
    return _repeat(rng, "repeat", word, _num_items(rng, 2, 24 if listed else 12))


def repeat_unseen(rng: Random) -> Example:
    """Repeating English words that are in no training text; measured, never trained."""
    return _repeat(rng, "repeat_unseen", rng.choice(UNSEEN_WORDS), rng.randint(2, 12))


def echo(rng: Random) -> Example:
    text = " ".join(_item(rng) for _ in range(_num_items(rng, 1, 12)))
    return _example(rng, "echo", (text,), _ECHO, text, text=text)


def add(rng: Random) -> Example:
    limit = rng.choice((20, 99, 99))
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    return _example(rng, "add", (min(a, b), max(a, b)), _ADD, f"{a} + {b} = {a + b}", a=a, b=b)


def story(rng: Random) -> Example:
    hero, n = rng.choice(HEROES), rng.randint(1, MAX_SENTENCES)
    text = _phrase(rng, _STORY, n=_spelled(rng, n), sentences="sentence" if n == 1 else "sentences", hero=hero)
    return Example("story", (hero, n), text, tell_story(rng, hero, n), (hero, n))


SKILLS: dict[str, Callable[[Random], Example]] = {
    "count_up": count_up, "count_down": count_down, "count_by": count_by, "days": days, "months": months,
    "alphabet": alphabet, "repeat": repeat, "echo": echo, "add": add, "story": story,
}  # fmt: skip


def is_held_out(example: Example) -> bool:
    """One in five combinations of a skill's arguments, by hash: training never sees them in any phrasing."""
    return zlib.crc32(repr((example.skill, example.arguments)).encode()) % 5 == 0


def training_example(skill: str, rng: Random) -> Example:
    return next(example for example in _draws(SKILLS[skill], rng) if not is_held_out(example))


def fresh_prompts(n: int, seed: int, skills: Sequence[str] = tuple(SKILLS)) -> list[Example]:
    """`n` different prompts that training never saw, the skills in turn; the same for the same arguments."""
    rng = Random(seed)
    generators = {**SKILLS, "repeat_unseen": repeat_unseen}
    fresh: dict[str, Example] = {}
    while len(fresh) < n:
        draws = _draws(generators[skills[len(fresh) % len(skills)]], rng)
        example = next(draw for draw in draws if is_held_out(draw) and draw.prompt not in fresh)
        fresh[example.prompt] = example
    return list(fresh.values())


def _draws(generator: Callable[[Random], Example], rng: Random) -> Iterable[Example]:
    while True:
        yield generator(rng)


_COUNT_UP = (
    "Count from {a} to {b}.",
    "Count up from {a} to {b}.",
    "Count to {b} starting from {a}.",
    "Write the numbers from {a} to {b}.",
    "List all numbers from {a} to {b}.",
    "Can you count from {a} to {b}?",
    "Start at {a} and count up to {b}.",
)
_COUNT_FROM_ONE = ("Count to {b}.", "Count up to {b}.", "Can you count to {b}?", "Count from one to {b}.")
_COUNT_DOWN = (
    "Count down from {a} to {b}.",
    "Count backwards from {a} to {b}.",
    "Count back from {a} to {b}.",
    "Write the numbers from {a} down to {b}.",
    "Start at {a} and count down to {b}.",
    "Can you count down from {a} to {b}?",
)
_COUNT_BY = (
    "Count from {a} to {b} by {s}.",
    "Count from {a} to {b} in steps of {s}.",
    "Count up by {s} from {a} to {b}.",
    "Start at {a} and count by {s} up to {b}.",
    "Can you count from {a} to {b} in steps of {s}?",
)
_CYCLE_ALL = (
    "List the {kind} starting with {first}.",
    "Say the {kind} in order, starting from {first}.",
    "Name all the {kind}, beginning with {first}.",
    "What are the {kind}, starting on {first}?",
)
_CYCLE_SOME = (
    "List {n} {kind} starting with {first}.",
    "Say {n} {kind} in order, starting from {first}.",
    "Name {n} {kind}, beginning with {first}.",
    "Starting from {first}, list {n} {kind}.",
    "Can you name {n} {kind} starting with {first}?",
)
_ALPHABET = (
    "Say the alphabet from {a} to {b}.",
    "List the letters from {a} to {b}.",
    "Write the alphabet from {a} to {b}.",
    "Recite the letters of the alphabet from {a} to {b}.",
    "What are the letters from {a} to {b}?",
    "Can you say the alphabet from {a} to {b}?",
)
_REPEAT = (
    "Repeat the word {word} {n} times.",
    'Repeat the word "{word}" {n} times.',
    'Say "{word}" {n} times.',
    "Say {word} {n} times.",
    "Write the word {word} {n} times.",
    "Can you repeat {word} {n} times?",
)
_ECHO = (
    "Echo: {text}",
    "Repeat after me: {text}",
    "Copy this: {text}",
    'Say "{text}".',
    'Repeat "{text}".',
    'Can you say "{text}"?',
)
_ADD = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "How much is {a} + {b}?",
    "Compute {a} + {b}.",
    "What is the sum of {a} and {b}?",
    "{a} + {b} = ?",
)
_STORY = (
    "Tell me a story about a {hero} in {n} {sentences}.",
    "Write a short story of {n} {sentences} about a {hero}.",
    "Tell a story of {n} {sentences} about a {hero}.",
    "Write {n} {sentences} about a {hero}.",
    "Can you tell me a story about a {hero} in {n} {sentences}?",
)


def _example(
    rng: Random, skill: str, arguments: tuple[object, ...], phrasings: Sequence[str], answer: str, **fields: object
) -> Example:
    return Example(skill, arguments, _phrase(rng, phrasings, **fields), answer)


def _phrase(rng: Random, phrasings: Sequence[str], **fields: object) -> str:
    """One phrasing filled in; at times with a please, a small first letter or no full stop."""
    phrasing = rng.choice(phrasings)
    style = rng.random()
    if style < 0.15 and not phrasing.endswith("?") and phrasing[0].isalpha():
        phrasing = "Please " + phrasing[0].lower() + phrasing[1:]
    elif style < 0.25:
        phrasing = phrasing[0].lower() + phrasing[1:]
    if rng.random() < 0.15:
        phrasing = phrasing.removesuffix(".")
    return phrasing.format(**fields)


def _cycle(rng: Random, skill: str, names: Sequence[str], kind: str, max_items: int) -> Example:
    first = rng.randrange(len(names))
    whole = rng.random() < 0.15
    n = len(names) if whole else _num_items(rng, 2, max_items)
    answer = _listed(names[(first + offset) % len(names)] for offset in range(n))
    phrasings = _CYCLE_ALL if whole else _CYCLE_SOME
    return _example(rng, skill, (first, n), phrasings, answer, kind=kind, first=names[first], n=_spelled(rng, n))


def _repeat(rng: Random, skill: str, word: str, n: int) -> Example:
    return _example(rng, skill, (word, n), _REPEAT, " ".join([word] * n), word=word, n=_spelled(rng, n))


def _item(rng: Random) -> str:
    """A listed word, a made one or a number."""
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(WORDS)
    return make_word(rng) if kind < 0.7 else str(rng.randint(0, 10 ** rng.randint(1, 3) - 1))


def _spelled(rng: Random, n: int) -> str:
    return NUMBER_WORDS[n] if n < len(NUMBER_WORDS) and rng.random() < 0.2 else str(n)


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


def _num_steps(rng: Random) -> int:
    """Mostly short counts, one in six of 40 to 150 numbers, a few of up to 300."""
    kind = rng.random()
    if kind < 0.80:
        return _log_uniform(rng, 1, 40)
    return rng.randint(40, 150) if kind < 0.97 else rng.randint(150, 300)


def _num_items(rng: Random, low: int, high: int) -> int:
    """Draw a number of items, a small one in half of the cases."""
    return rng.randint(low, high) if rng.random() < 0.5 else _log_uniform(rng, low, high)


def _bounds(rng: Random, distance: int) -> tuple[int, int]:
    """Two numbers `distance` apart; the lower one is 0, 1, below 100 or anywhere."""
    room = MAX_NUMBER - distance
    low = rng.choice((rng.randint(0, 1), rng.randint(0, min(99, room)), rng.randint(0, room)))
    return low, low + distance


def _log_uniform(rng: Random, low: int, high: int) -> int:
    return min(high, int(low * (high / low + 1 / low) ** rng.random()))
