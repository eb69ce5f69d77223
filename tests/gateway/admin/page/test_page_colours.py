"""The page's colours can be read, and told apart by every eye."""

import re
from functools import cache
from itertools import product

import pytest

from gateway.admin.page_files import DIRECTORY

TEXT = 4.5  # WCAG 2.2, 1.4.3: contrast of text
SHAPE = 3.0  # and 1.4.11: of what carries meaning without being text


@cache
def _palette(scheme: str) -> dict[str, str]:
    text = (DIRECTORY / "colours.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light if scheme == "light" else dark))


def _luminance(colour: str) -> float:
    """Returns the relative luminance, https://www.w3.org/TR/WCAG22/#dfn-relative-luminance."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


PAIRS = [
    *product(("text", "muted", "accent", "serious", "good"), ("page", "surface"), (TEXT,)),
    *product(("text", "muted", "serious"), ("serious-surface",), (TEXT,)),
    *product(("text", "muted", "warning"), ("warning-surface",), (TEXT,)),
    ("on-accent", "accent", TEXT),
    *product(("edge", "good", "serious"), ("page", "surface"), (SHAPE,)),
    *product([f"line-{number}" for number in range(1, 7)], ("surface",), (SHAPE,)),
    *product([*(f"slot-{number}" for number in range(1, 9)), "slot-others"], ("surface",), (SHAPE,)),
    *product(("queue", "prefill", "decode", "preempted", "other"), ("surface",), (SHAPE,)),
    ("line-1", "track", SHAPE),
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("front", "back", "least"), PAIRS)
def test_contrast_is_enough_to_read(scheme: str, front: str, back: str, least: float) -> None:
    palette = _palette(scheme)
    assert _contrast(palette[front], palette[back]) >= least


# Simulation of colour-blind sight: Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SIGHTS = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def _seen(colour: str, sight: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """Returns the colour as an eye sees it, in Oklab: https://bottosson.github.io/posts/oklab/."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    red, green, blue = (min(max(sum(k * part for k, part in zip(row, linear, strict=True)), 0), 1) for row in sight)
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("sight", SIGHTS)
def test_colours_of_tenants_are_told_apart_by_every_eye(scheme: str, sight: str) -> None:
    seen = [_seen(_palette(scheme)[f"slot-{number}"], SIGHTS[sight]) for number in range(1, 9)]
    differences = [
        sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
        for index, one in enumerate(seen)
        for other in seen[:index]
    ]
    assert min(differences) >= 0.1  # five times what is just noticed
