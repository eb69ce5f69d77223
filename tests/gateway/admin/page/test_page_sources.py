"""The page's files have nothing inline, nothing from elsewhere and no markup from text; no browser is needed."""

import re
from pathlib import Path

import pytest

from gateway.admin.page_files import DIRECTORY

FILES = sorted(path for path in DIRECTORY.rglob("*") if path.is_file())
MARKUP_FROM_TEXT = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|\beval\b|new Function|@import"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(DIRECTORY).as_posix())
def test_no_file_reaches_elsewhere_or_makes_markup_of_text(path: Path) -> None:
    text = path.read_text()
    addresses = set(re.findall(r"https?://[^\s'\"]+", text)) - {"http://www.w3.org/2000/svg"}
    assert addresses == set()
    assert not re.search(MARKUP_FROM_TEXT, text)


def test_the_markup_has_no_style_and_no_script_of_its_own() -> None:
    markup = (DIRECTORY / "index.html").read_text()
    assert not re.search(r"\sstyle=|<style|\son\w+=", markup)
    assert re.findall(r"<script[^>]*>", markup) == ['<script type="module" src="main.js">']


def test_every_file_is_imported_or_linked() -> None:
    texts = "".join(path.read_text() for path in FILES)
    assert [path.name for path in FILES if path.name != "index.html" and f'{path.name}"' not in texts] == []
