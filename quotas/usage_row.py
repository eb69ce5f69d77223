"""Rows of the ledger: whose use is summed up apart. Pure.

A row is named `KEY|MODEL|CLASS|USER|NAME=VALUE…`: its parts percent-encoded, and left out from the user on if it has
neither a user nor tags; use without a model is named by the key alone. `*` stands for no key, and in place of the user
for all whom a full ledger does not tell apart.
"""

from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import quote, unquote

NO_KEY = "*"
REST = "*"
SESSION = "@session"  # the tag of a request's session, which no name of metadata is
MAX_PART_CHARS = 64  # of a client's text, encoded; a longer one is cut, and its digest tells it apart
DIGEST_CHARS = 8


class UsageRow(NamedTuple):
    """The owner and the kind of some use; an empty part is unknown, or was not asked to be told apart."""

    key: str | None  # id of the API key
    model: str = ""
    service_class: str = ""
    user: str = ""
    tags: tuple[tuple[str, str], ...] = ()  # of the request's metadata, by name, and `SESSION`
    is_rest: bool = False  # the ledger was full: it sums up use that is not told apart by user and tags

    def part(self, by: str) -> str:
        """The value of `model`, `class`, `user`, `session` or `metadata.NAME`."""
        match by.partition("."):
            case "metadata", _, name:
                return dict(self.tags).get(name, "")
            case "session", _, _:
                return dict(self.tags).get(SESSION, "")
        return {"model": self.model, "class": self.service_class, "user": self.user}[by]


def key_name(key: str | None) -> str:
    return NO_KEY if key is None else quote(key, safe="", errors="surrogatepass")


@lru_cache(4096)
def plain_row_name(key: str | None, model: str, service_class: str) -> str:
    """The name of a row without a user and tags."""
    return row_name(UsageRow(key, model, service_class))


@lru_cache(4096)
def row_name(row: UsageRow, most_rows: int = 0) -> str:
    """The name of a row. Before one with a user or tags stands the number of rows from which on a day's ledger sums up
    these rows instead of adding one.
    """
    name = "|".join((key_name(row.key), _encoded(row.model), _encoded(row.service_class)))
    if not row.user and not row.tags:
        return name
    tags = [f"{_encoded(tag)}={_encoded(value)}" for tag, value in row.tags]
    return f"{most_rows} {'|'.join((name, _encoded(row.user), *tags))}"


def rest_name(name: str) -> str:
    """The name of the row that sums up rows such as this one."""
    key, *parts = name.partition(" ")[2].split("|") if " " in name else name.split("|")
    return "|".join((key, *parts[:2], REST)) if len(parts) > 2 else name


def row_of(name: str) -> UsageRow:
    """The row of a name in the ledger, without the number before it."""
    key, *parts = name.split("|")
    model, service_class, user, *tags = [*parts, "", "", ""][: max(3, len(parts))]
    pairs = (tag.partition("=") for tag in tags)
    return UsageRow(
        None if key == NO_KEY else unquote(key),
        unquote(model),
        unquote(service_class),
        "" if user == REST else unquote(user),
        tuple((unquote(tag), unquote(value)) for tag, _, value in pairs),
        user == REST,
    )


def model_of(name: str | None) -> str:
    """The model in the name of a row, with the number before it or without; empty: it is unknown."""
    return "" if name is None else row_of(name.rpartition(" ")[2]).model


def as_kept(text: str) -> str:
    """A part of a row as it is read back from the row's name: a long one is cut."""
    return unquote(_encoded(text))


def _encoded(text: str) -> str:
    encoded = quote(text, safe="", errors="replace")
    if len(encoded) <= MAX_PART_CHARS:
        return encoded
    kept = text[:MAX_PART_CHARS]
    while len(quote(kept, safe="", errors="replace")) > MAX_PART_CHARS - DIGEST_CHARS - 1:
        kept = kept[:-1]
    digest = sha256(text.encode(errors="replace")).hexdigest()[:DIGEST_CHARS]
    return f"{quote(kept, safe='', errors='replace')}~{digest}"
