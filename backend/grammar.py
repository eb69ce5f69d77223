"""A grammar as a request gives it: not compiled, and identified by its hash."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

ONE_LINE: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spelling of `json.dumps`, in which chat templates show calls to the model: most tokens between values are then
forced.
"""
_CONTROLS = re.compile(r"\\u00[01]|\\u007[fF]|\x7f")
_ONE_SPELLING = {"json_allowed_escapes": '"\\bfnrt'}


class GrammarKind(StrEnum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"  # a JSON document
    # a document in the spelling of `json.dumps`: one line, with a space behind each "," and ":"
    JSON_LINE = "json_line"
    REGEX = "regex"  # an expression that matches the whole text
    CHOICE = "choice"  # a JSON array of strings, one of which is the text
    LARK = "lark"  # in llguidance's dialect


@dataclass(frozen=True, slots=True)
class Grammar:
    """The constraint on an answer's text, as a client or a response template gives it, unchecked."""

    kind: GrammarKind
    source: str
    owner: str = ""  # the tenant that asks for it: a compiled grammar serves its owner alone
    hash: bytes = field(init=False, compare=False, repr=False)  # of all three; logs name a grammar by a part of it

    @property
    def name(self) -> str:
        """The first half of the hash, in hexadecimal: the grammar's name in logs and traces."""
        return self.hash[:8].hex()

    @property
    def is_schema(self) -> bool:
        """True if the source is a JSON schema."""
        return self.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_LINE)

    def __post_init__(self) -> None:
        said = f"{self.kind}:{len(self.owner)}:{self.owner}:{self.source}".encode("utf-8", "surrogatepass")
        object.__setattr__(self, "hash", blake2b(said, digest_size=16).digest())


def lark_text(text: str) -> str:
    """Return a text as a literal of a grammar in Lark's notation: the name of a special token is only text in it."""
    return json.dumps(text).replace("\x7f", r"\u007f")  # which JSON has as it is, and the notation not


def json_options(schema: str, style: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spelling options of JSON of a schema, in this style.

    A text has one spelling, and no property comes a second time under another (`"a"`, `"\\u0061"`). If the schema
    itself has control characters, which have no other spelling, all of the library's escapes are allowed.
    """
    return {**style} if _CONTROLS.search(schema) else {**style, **_ONE_SPELLING}
