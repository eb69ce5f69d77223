"""What the store says of responses."""

from typing import Literal

Stored = Literal["ok", "too_large", "changed"]
"""Whether contents are stored; "too_large": they exceed the tenant's bytes; "changed": what they replace has been
replaced, or is gone.
"""
Held = Literal["ok", "running", "full", "cancelled", "lost"]
"""The state of a response in the background; "ok": it is queued; "lost": no replica computes it any more."""
