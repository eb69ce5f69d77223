"""Quotes in a message what a client or an operator wrote."""

from gateway.key_mask import masked

_MAX_SECRET_CHARS = 512


def quoted(text: str, most_chars: int = 80) -> str:
    """Returns the text as `repr` writes it, its keys masked; a longer one is cut and ends with an ellipsis."""
    shown = masked(text[: most_chars + _MAX_SECRET_CHARS])
    return repr(shown if len(shown) <= most_chars else f"{shown[:most_chars]}…")
