"""As much of MessagePack (msgpack.org) as the scripts are told limits in: arrays of short strings and integers."""

from collections.abc import Sequence


def packed(values: Sequence[int | str]) -> bytes:
    """An array of at most 65535 unsigned integers and strings of at most 65535 bytes."""
    return b"\xdc" + len(values).to_bytes(2) + b"".join(map(_packed, values))


def _packed(value: int | str) -> bytes:
    if isinstance(value, int):
        return b"\xcf" + value.to_bytes(8)
    text = value.encode()
    return b"\xda" + len(text).to_bytes(2) + text
