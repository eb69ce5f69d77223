"""Words to repeat: a fixed list, words made from pieces of it, and English words that training never sees."""

from __future__ import annotations

from random import Random

WORDS = (
    "apple", "banana", "bread", "bridge", "butter", "candle", "carpet", "castle", "chair", "cherry", "circle", "cloud",
    "coffee", "copper", "cotton", "desert", "dinner", "doctor", "dragon", "engine", "family", "feather", "finger",
    "fire", "flower", "forest", "garden", "ginger", "glass", "gold", "grass", "green", "guitar", "hammer", "hello",
    "honey", "house", "island", "jacket", "jungle", "kettle", "kitchen", "ladder", "lemon", "letter", "light", "lion",
    "market", "melon", "mirror", "monkey", "moon", "morning", "mountain", "music", "needle", "night", "ocean", "orange",
    "paper", "pencil", "pepper", "piano", "planet", "pocket", "potato", "purple", "rabbit", "rain", "red", "ribbon",
    "river", "rocket", "salt", "school", "shadow", "silver", "sister", "snow", "spider", "spring", "stone", "storm",
    "summer", "sun", "table", "tiger", "tomato", "train", "tree", "tulip", "tunnel", "turtle", "valley", "velvet",
    "violin", "water", "wave", "window", "winter", "wolf", "yellow", "yes", "zebra",
)  # fmt: skip

UNSEEN_WORDS = (
    "acorn", "badger", "beacon", "blanket", "bottle", "bucket", "camel", "canyon", "cobalt", "compass", "cricket",
    "falcon", "fossil", "gravel", "harbor", "helmet", "lantern", "lobster", "magnet", "maple", "marble", "meadow",
    "mustard", "oyster", "parrot", "pebble", "pigeon", "puzzle", "saddle", "salmon", "sparrow", "thunder", "timber",
    "walnut", "whisper", "willow",
)  # fmt: skip

_CONSONANTS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"


def make_word(rng: Random) -> str:
    """A blend of two listed words or a run of syllables; never one of `UNSEEN_WORDS`."""
    word = _blend(rng) if rng.random() < 0.6 else _syllables(rng)
    if word in UNSEEN_WORDS:
        return make_word(rng)
    return word.capitalize() if rng.random() < 0.1 else word


def _blend(rng: Random) -> str:
    head, tail = rng.choice(WORDS), rng.choice(WORDS)
    return head[: rng.randint(2, 4)] + tail[-rng.randint(2, 4) :]


def _syllables(rng: Random) -> str:
    pairs = (rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 3)))
    return "".join(pairs) + rng.choice(("", rng.choice(_CONSONANTS)))
