"""A grammar as it was asked for: what a text has to match, not compiled and known by its hash."""

from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b


class GrammarKind(StrEnum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"  # a JSON document
    REGEX = "regex"  # one that matches the whole text
    CHOICE = "choice"  # a JSON array of strings, one of which is the text
    LARK = "lark"  # Lark's, as llguidance reads it


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer has to match, as a client or a response template says it. Nobody has checked it."""

    kind: GrammarKind
    source: str
    owner: str = ""  # who asks for it: what was compiled for one is of use to no other
    hash: bytes = field(init=False, compare=False, repr=False)  # of all three; logs name a grammar by this alone

    def __post_init__(self) -> None:
        said = f"{self.kind}:{len(self.owner)}:{self.owner}:{self.source}".encode("utf-8", "surrogatepass")
        object.__setattr__(self, "hash", blake2b(said, digest_size=16).digest())
