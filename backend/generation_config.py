"""How a checkpoint's makers want it sampled: generation_config.json."""

from pathlib import Path
from typing import Any

from backend.errors import InvalidRequest
from backend.json_file import JsonFile
from backend.sampling import SamplingParams

_DRAWING_KEYS = ("temperature", "top_p", "top_k", "min_p")
_KEYS = ("repetition_penalty",)  # of greedy tokens too


def read_sampling_defaults(directory: Path) -> dict[str, Any]:
    """Values for what a request leaves unsaid, as fields of `SamplingParams`; empty where the file says nothing.

    `do_sample: false` makes greedy the default, whatever is said of drawing. Raises `ModelLoadError` for values that
    nobody may ask for.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return {}
    file = JsonFile.read(path)
    greedy = file.get("do_sample") is False
    keys = _KEYS if greedy else _DRAWING_KEYS + _KEYS
    defaults = {key: value for key in keys if (value := file.get(key)) is not None}
    if greedy:
        defaults["temperature"] = 0.0
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise file.wrong(error.param, f"{error}; correct it, or remove the key") from error
    return defaults
