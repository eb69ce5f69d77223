"""The page's files: no markup from text, colours that every eye tells apart, and functions that write for people."""

import re
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fleet.admin import page_files as fleet_page_files
from gateway.admin.page_files import DIRECTORY
from tests.end_to_end.page.page_object import PageMaker

FILES = sorted(path for path in DIRECTORY.rglob("*") if path.is_file())
FLEETS = sorted(path for path in fleet_page_files.DIRECTORY.rglob("*") if path.is_file())
MARKUP_FROM_TEXT = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|\beval\b|new Function|@import"
)


@pytest.mark.parametrize("path", [*FILES, *FLEETS], ids=lambda path: "/".join(path.parts[-3:]))
def test_no_file_reaches_elsewhere_or_makes_markup_of_text(path: Path) -> None:
    text = path.read_text()
    addresses = set(re.findall(r"https?://[^\s'\"]+", text)) - {"http://www.w3.org/2000/svg"}
    assert addresses == set()
    assert not re.search(MARKUP_FROM_TEXT, text)


@pytest.mark.parametrize("directory", [DIRECTORY, fleet_page_files.DIRECTORY], ids=["gateway", "fleet"])
def test_the_markup_has_no_style_and_no_script_of_its_own(directory: Path) -> None:
    markup = (directory / "index.html").read_text()
    assert not re.search(r"\sstyle=|<style|\son\w+=", markup)
    assert re.findall(r"<script[^>]*>", markup) == ['<script type="module" src="main.js">']


def test_every_file_is_imported_or_linked() -> None:
    texts = "".join(path.read_text() for path in FILES)
    assert [path.name for path in FILES if path.name != "index.html" and f'{path.name}"' not in texts] == []


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


MINUS, UNKNOWN = "\N{MINUS SIGN}", "\N{EN DASH}"

Run = Callable[..., Any]


@pytest.fixture
def run(open_page: PageMaker) -> Run:
    page = open_page()

    def call(module: str, function: str, *arguments: Any) -> Any:
        imported = "async (module, name, values) => (await import(`/${module}.js`))[name](...values)"
        return page.call(imported, module, function, arguments)

    return call


def test_quantities_are_written_as_people_read_them(run: Run) -> None:
    written = {
        ("number", 0): "0",
        ("number", 0.0421): "0.04",
        ("number", 4.25): "4.25",
        ("number", 42.25): "42.3",
        ("number", 4200.4): "4,200",
        ("number", -1.5): f"{MINUS}1.5",
        ("number", None): UNKNOWN,
        ("compact", 9_999): "9,999",
        ("compact", 12_345): "12.3 k",
        ("compact", 999_999): "1,000 k",
        ("compact", 3_123_456): "3.12 M",
        ("percent", 0): "0 %",
        ("percent", 0.0001): "<1 %",
        ("percent", 0.9999): ">99 %",
        ("percent", 1): "100 %",
        ("bytes", 0): "0 B",
        ("bytes", 1023): "1,023 B",
        ("bytes", 1_572_864): "1.5 MiB",
        ("bytes", 2**60): "1,048,576 TiB",
        ("duration", 0): "0 s",
        ("duration", 0.00042): "420 µs",
        ("duration", 0.0042): "4.2 ms",
        ("duration", 0.42): "420 ms",
        ("duration", 4.2): "4.2 s",
        ("duration", 185): "3 min 5 s",
        ("duration", 7620): "2 h 7 min",
        ("duration", 352_800): "4 d 2 h",
        ("duration", -0.5): f"{MINUS}500 ms",
        ("duration", None): UNKNOWN,
        ("age", 3.9): "3 s",
        ("age", 61): "1 min 1 s",
    }
    assert {(name, value): run("units", name, value) for name, value in written} == written


def test_axes_end_at_a_round_number_whose_half_is_round(run: Run) -> None:
    tops = {1: 1, 1.1: 2, 3: 4, 5: 6, 7: 8, 9: 10, 11: 20, 0.0031: 0.004, 8000: 8000}
    assert {most: run("chart", "roundedUp", most) for most in tops} == pytest.approx(tops)


def test_squares_of_several_blocks_show_whose_most_are(run: Run) -> None:
    runs = {"runs": [[0, 3], [-1, 2], [1, 1], [1, 5]]}
    assert run("pool", "cells", runs, 1) == [0, 0, 0, -1, -1, 1, 1, 1, 1, 1, 1]
    assert run("pool", "cells", runs, 4) == [0, 1, 1]


def test_every_pool_fits_its_frame(run: Run) -> None:
    for num_blocks, width in product((1, 7, 64, 1000, 20_000, 3_000_000), (1, 280, 520)):
        layout = run("pool", "laidOut", num_blocks, width)
        assert layout["columns"] * layout["rows"] * layout["each"] >= num_blocks
        assert layout["side"] * layout["rows"] <= 216
        assert layout["side"] * layout["columns"] <= max(width, layout["side"])


def test_a_tenant_keeps_its_colour_while_it_is_among_the_first(run: Run, open_page: PageMaker) -> None:
    slots = open_page().js(
        """(async () => {
          const { Slots } = await import("/slots.js");
          const slots = new Slots();
          const names = [..."abcdefghijklmnop"];
          slots.assign(names);
          const first = names.map((name) => slots.of(name));
          slots.assign([..."ijkaecdbfghlmnop"]);
          const kept = slots.of("a");
          slots.assign([..."ijklmnopefgh"]);
          return { first, kept, left: slots.of("a"), came: slots.of("i") };
        })()"""
    )
    assert slots["first"] == [1, 2, 3, 4, 5, 6, 7, 8, *["others"] * 8]
    assert (slots["kept"], slots["left"], slots["came"]) == (1, "others", 1)


def test_an_address_segment_holds_any_text(run: Run) -> None:
    assert run("api", "segment", "a/b?c#d %\u202e") == "a%2Fb%3Fc%23d%20%25%E2%80%AE"
