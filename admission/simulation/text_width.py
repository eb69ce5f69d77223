"""Columns of a terminal, where an East Asian character takes two."""

from unicodedata import category, east_asian_width


def width(text: str) -> int:
    """Columns that a text without control characters takes (Unicode Standard Annex 11)."""
    return len(text) if text.isascii() else sum(map(_width, text))


def flush_left(text: str, columns: int) -> str:
    return text + " " * (columns - width(text))


def flush_right(text: str, columns: int) -> str:
    return " " * (columns - width(text)) + text


def _width(character: str) -> int:
    if category(character) in ("Mn", "Me"):  # marks on the character before
        return 0
    return 2 if east_asian_width(character) in "WF" else 1
