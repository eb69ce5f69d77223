"""What may stand in `Authorization: Bearer <token>`, whoever has chosen it."""

MAX_KEY = 512  # characters, each a byte


def is_token(text: str, least: int) -> bool:
    """Whether it can be a key, of `least` characters or more."""
    return least <= len(text) <= MAX_KEY and all("!" <= character <= "~" for character in text)


def rule(least: int) -> str:
    """What `is_token` asks for, in words."""
    return f"{least} to {MAX_KEY} printable ASCII characters without spaces"
