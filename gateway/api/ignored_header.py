"""The header that tells a client what of its request is left out, where that is no reason to refuse it."""

from collections.abc import Sequence
from urllib.parse import quote

MAX_CHARS = 2_000


def ignored_header(places: Sequence[str]) -> dict[str, str]:
    """Returns `x-sluice-ignored`: the places in the body, percent-encoded, as many as it holds, and how many more there
    are. Without any there is no header.
    """
    told, left = list[str](), MAX_CHARS
    for place in places:
        told.append(quote(place[:MAX_CHARS], safe="/~$.[]"))
        left -= len(told[-1]) + 2
        if left < 0:
            told[-1] = f"({len(places) - len(told) + 1} more)"
            break
    return {"x-sluice-ignored": ", ".join(told)} if told else {}
