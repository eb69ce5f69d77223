"""The answers of the store about stored responses."""

from typing import Literal

MAX_TURNS = 256  # of a conversation that are read
Stored = Literal["ok", "too_large", "changed"]
"""The end of storing contents; "too_large": they exceed the tenant's bytes; "changed": the contents that they replace
have been replaced, or are gone.
"""
Held = Literal["ok", "running", "full", "cancelled", "lost"]
"""The state of a response in the background; "ok": it is queued; "lost": no replica computes it any more."""
