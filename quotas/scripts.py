"""The decisions of the store, in Lua. Each is one script, after the parts it is written in terms of."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha1
from pathlib import Path

LUA = Path(__file__).parent / "lua"


class Script(StrEnum):
    RESERVE = "reserve"
    EXTEND = "extend"
    SETTLE = "settle"
    STATES = "states"
    HEARTBEAT = "heartbeat"
    RECLAIM = "reclaim"
    RESTORE = "restore"
    BOOK = "book"
    LEASE_KV = "lease_kv"
    SLICE = "slice"
    CHARGE = "charge"


ACCOUNT = ("clock", "level", "spec", "record", "account")
SETTLEMENT = ("clock", "level", "spec", "record", "settlement", "ledger")
PARTS = {
    Script.RESERVE: ACCOUNT,
    Script.EXTEND: ACCOUNT,
    Script.STATES: ACCOUNT,
    Script.RESTORE: (*ACCOUNT, "settlement"),
    Script.SETTLE: SETTLEMENT,
    Script.HEARTBEAT: SETTLEMENT,
    Script.RECLAIM: (*SETTLEMENT, "forfeit"),
    Script.BOOK: ("clock", "level", "ledger"),
    Script.LEASE_KV: ("clock",),
    Script.SLICE: ACCOUNT,
    Script.CHARGE: (*ACCOUNT, "ledger"),
}


@dataclass(frozen=True, slots=True)
class Source:
    text: bytes
    digest: bytes  # by which EVALSHA calls it


def load_scripts(parts: Mapping[str, str] | None = None) -> dict[Script, Source]:
    """Every script. `parts` stand in for those of the same name, as a clock that a test turns."""
    return {script: _source((*names, script.value), parts or {}) for script, names in PARTS.items()}


def _source(names: tuple[str, ...], parts: Mapping[str, str]) -> Source:
    text = "\n".join(parts.get(name) or (LUA / f"{name}.lua").read_text() for name in names).encode()
    return Source(text, sha1(text, usedforsecurity=False).hexdigest().encode())
