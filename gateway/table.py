"""Tables of text for a terminal or a spreadsheet, whose cells may come from strangers."""

import csv
from collections.abc import Iterable, Sequence
from io import StringIO
from unicodedata import category, east_asian_width

FORMULA = frozenset("=+-@\uff1d\uff0b\uff0d\uff20")
"""A cell that begins with one of these is taken for a formula by spreadsheets (OWASP, CSV injection)."""

Row = Sequence[str]


def table(heading: Row, rows: Sequence[Row], numeric: frozenset[str] = frozenset()) -> str:
    """Lay out rows in columns two spaces apart; those named in `numeric` are flush right."""
    cells = [list(map(printable, row)) for row in (heading, *rows)]
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]
    return "".join(
        "  ".join(
            flush_right(cell, columns) if name in numeric else flush_left(cell, columns)
            for cell, columns, name in zip(row, widths, heading, strict=True)
        ).rstrip()
        + "\n"
        for row in cells
    )


def csv_text(rows: Iterable[Row]) -> str:
    """Write rows as RFC 4180 says, but with line feeds; no cell is a formula."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(list(map(_inert, row)) for row in rows)
    return text.getvalue()


def printable(text: str) -> str:
    """Escape the characters that move a cursor, ring a bell or turn the direction of writing."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _inert(text: str) -> str:
    shown = printable(text)
    return f"'{shown}" if shown[:1] in FORMULA else shown


def width(text: str) -> int:
    """Return the columns that a text without control characters takes (Unicode Standard Annex 11)."""
    return len(text) if text.isascii() else sum(map(_width, text))


def flush_left(text: str, columns: int) -> str:
    return text + " " * (columns - width(text))


def flush_right(text: str, columns: int) -> str:
    return " " * (columns - width(text)) + text


def _width(character: str) -> int:
    if category(character) in ("Mn", "Me"):  # marks on the character before
        return 0
    return 2 if east_asian_width(character) in "WF" else 1
