"""As much of MessagePack (msgpack.org) as the scripts are told limits in: arrays of short strings and integers."""

from collections.abc import Sequence

SHORT = 32  # bytes of a string, from which on its length takes bytes of its own
SMALL = 128  # likewise of an integer


def packed(values: Sequence[int | str]) -> bytes:
    """An array of at most 65535 unsigned integers and strings of at most 65535 bytes."""
    return b"\xdc" + len(values).to_bytes(2) + b"".join(map(_packed, values))


def _packed(value: int | str) -> bytes:
    if isinstance(value, int):
        return value.to_bytes(1) if value < SMALL else b"\xcf" + value.to_bytes(8)
    text = value.encode()
    head = bytes([0xA0 | len(text)]) if len(text) < SHORT else b"\xda" + len(text).to_bytes(2)
    return head + text
