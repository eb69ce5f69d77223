"""Short stories of exactly n sentences from a small grammar, and the check that a text is one of that shape."""

from __future__ import annotations

import re
from random import Random

HEROES = (
    "cat", "dog", "fox", "bear", "mouse", "rabbit", "bird", "frog", "horse", "lion", "duck", "wolf",
    "turtle", "robot", "king", "queen", "girl", "boy", "farmer", "dragon",
)  # fmt: skip
MAX_SENTENCES = 10

_SLOTS = {
    "adjective": ("small", "brave", "kind", "young", "wise", "clever", "quiet", "happy"),
    "place": ("river", "forest", "hill", "lake", "garden", "sea", "village", "mountain"),
    "thing": ("key", "lamp", "coin", "map", "shell", "bell", "book", "flower"),
    "friend": ("child", "baker", "sailor", "teacher", "neighbour", "stranger"),
    "food": ("bread", "soup", "apples", "honey", "cake", "berries"),
    "weather": ("sun", "rain", "snow", "wind", "fog", "moon"),
}
_OPENINGS = (
    "Once there was a {adjective} {hero} who lived by the {place}.",
    "Long ago a {adjective} {hero} lived near the {place}.",
    "There was a {hero} who loved the {place}.",
)
_MIDDLES = (
    "One morning the {hero} found a {thing} in the grass.",
    "The {hero} walked to the {place} to look for a friend.",
    "On the way the {hero} met a {adjective} {friend}.",
    "They shared some {food} and talked for a long time.",
    "Then the {weather} came and the road was hard to see.",
    "The {friend} showed the {hero} a secret door.",
    "Behind the door there was a room full of {food}.",
    "The {hero} was afraid but did not run away.",
    "An old {friend} asked for the {thing}.",
    "The {hero} gave it away with a smile.",
    "At night they slept under the stars.",
    "The next day they sang a song about the {place}.",
)
_CLOSINGS = (
    "In the end the {hero} went home and was happy.",
    "From that day on the {hero} was never alone.",
)
_SLOT_NAME = re.compile(r"\{(\w+)\}")
_WORD = re.compile(r"[A-Za-z]+")


def tell_story(rng: Random, hero: str, num_sentences: int) -> str:
    """An opening, middle sentences in the order of the grammar, and from two sentences on a closing."""
    num_middles = max(0, num_sentences - 2)
    middles = sorted(rng.sample(range(len(_MIDDLES)), num_middles))
    templates = [_favour_first(rng, _OPENINGS)]
    templates += [_MIDDLES[index] for index in middles]
    if num_sentences > 1:
        templates.append(_favour_first(rng, _CLOSINGS))
    return " ".join(_fill(rng, template, hero) for template in templates)


def is_story(text: str, hero: str, num_sentences: int) -> bool:
    """Exactly `num_sentences` sentences, only words of the grammar, and the first sentence names the hero."""
    sentences = re.findall(r"[^.]+\.", text)
    if len(sentences) != num_sentences or "".join(sentences) != text:
        return False
    words = set(_WORD.findall(text))
    return words <= STORY_WORDS and hero in _WORD.findall(sentences[0])


def _fill(rng: Random, template: str, hero: str) -> str:
    return _SLOT_NAME.sub(
        lambda slot: hero if slot[1] == "hero" else _favour_first(rng, _SLOTS[slot[1]]),
        template,
    )


def _favour_first(rng: Random, choices: tuple[str, ...]) -> str:
    """Weights 1, 1/2, 1/3, …: a clear favourite keeps greedy decoding away from ties."""
    return rng.choices(choices, weights=[1 / rank for rank in range(1, len(choices) + 1)])[0]


def _vocabulary() -> frozenset[str]:
    templates = (_SLOT_NAME.sub(" ", template) for template in _OPENINGS + _MIDDLES + _CLOSINGS)
    fillers = (filler for fillers in _SLOTS.values() for filler in fillers)
    return frozenset(_WORD.findall(" ".join((*templates, *fillers, *HEROES))))


STORY_WORDS = _vocabulary()
