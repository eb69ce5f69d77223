"""A JSON file of a model directory, read so that every error names the file, the key and the value."""

import json
import stat
from pathlib import Path
from typing import Any

from backend.errors import ModelLoadError

MAX_COUNT = 2**31  # more than any count in a model
MAX_LAYERS = 2**12  # more than any model has; what is made of each would fill the memory
MAX_SHOWN_CHARS = 500  # of a wrong value
MAX_BYTES = 2**26  # of a file; an index of 100,000 tensors has a fifth of it
_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers of float32, in which models compute


def _text(path: Path) -> str:
    """Read a file. Raises `OSError` or `ValueError` if it is no ordinary file (a pipe would never end) or too large."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not an ordinary file")
    if status.st_size > MAX_BYTES:
        raise ValueError(f"it has {status.st_size:,} bytes, at most {MAX_BYTES:,} are read")
    return path.read_text(encoding="utf-8")


def read_json(path: Path) -> Any:
    """Return the content of a file. Raises `ModelLoadError` for a file that is missing or no JSON."""
    try:
        return json.loads(_text(path))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist; a model directory needs it") from None
    except (OSError, ValueError, RecursionError) as error:  # a number of 5,000 digits raises a plain ValueError
        raise ModelLoadError(f"{path} is not readable JSON ({error}); download it again") from error


class JsonFile:
    """A JSON object in a file. A key that holds null counts as absent, except to `mentions`.

    Getters raise ModelLoadError for a missing key without a default and for a value of the wrong type or range.
    """

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix  # this object's place inside the file, for messages: "rope_scaling."

    @classmethod
    def read(cls, path: Path) -> "JsonFile":
        values = read_json(path)
        if not isinstance(values, dict):
            raise ModelLoadError(f"{path} must hold a JSON object, not {type(values).__name__}")
        return cls(path, values)

    def get(self, key: str) -> Any:
        """Return the unchecked value; None if it is absent."""
        return self.values.get(key)

    def mentions(self, key: str) -> bool:
        """Return True if the key is present, even with null."""
        return key in self.values

    def wrong(self, key: str, expected: str) -> ModelLoadError:
        """Return the error for a wrong value; the caller raises it."""
        found = f"{self.values[key]!r:.{MAX_SHOWN_CHARS}}" if key in self.values else "missing"
        place = f"{self._prefix}{key}"
        shown = place if place.isprintable() else repr(place)  # half a surrogate pair has no UTF-8
        return ModelLoadError(f"{self.path}: {shown:.{MAX_SHOWN_CHARS}} is {found}; {expected}")

    def integer(self, key: str, default: int | None = None, minimum: int = 1, below: int = MAX_COUNT) -> int:
        value = self._or_default(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < below:
            raise self.wrong(key, f"an integer of at least {minimum} and below {below:,} is expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above zero that float32 can hold."""
        value = self._or_default(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not _SMALLEST <= value <= _LARGEST:
            raise self.wrong(key, "a finite number above 0, within the range of float32, is expected")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._or_default(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false is expected")
        return value

    def nested(self, key: str) -> "JsonFile | None":
        """Return the nested object under `key`; None if it is absent or empty."""
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object is expected")
        return JsonFile(self.path, value, f"{self._prefix}{key}.") if value else None

    def _or_default(self, key: str, default: object) -> object:
        value = self.values.get(key)
        return default if value is None else value
