"""The pure functions of the page's modules are called in the browser."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from tests.gateway.admin.page.page_object import PageMaker

MINUS, UNKNOWN = "\N{MINUS SIGN}", "\N{EN DASH}"

Run = Callable[..., Any]


@pytest.fixture
def run(open_page: PageMaker) -> Run:
    """Returns a function that calls one of a module with arguments."""
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
