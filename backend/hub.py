"""Where a model's files are: packaged with Sluice, in a local directory, or on the Hugging Face hub."""

import re
from pathlib import Path

from backend.errors import ModelLoadError

EMBEDDED = "embedded"
"""The name of the small model that comes with the package."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]
_UNWANTED = ["*/*", "consolidated*"]


def resolve_model(name_or_path: str) -> Path:
    """The directory of a model, downloaded first if it is a hub name (organisation/name) not yet in the cache."""
    if name_or_path == EMBEDDED:
        return Path(__file__).parent / EMBEDDED
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        return path
    if path.is_file():
        raise ModelLoadError(f"{path} is a file; name the directory that holds config.json and the weights")
    if _HUB_NAME.fullmatch(name_or_path) is None:
        raise ModelLoadError(f"there is no directory {name_or_path!r}, and a hub name has the form organisation/name")
    return _download(name_or_path)


def _download(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 (optional, and slow to import)
    except ImportError:
        raise ModelLoadError(
            f"there is no directory {name}; to download it from the hub, pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"there is no directory {name}, and the hub could not supply it ({type(error).__name__}: {error}); "
            f"check the name, the network and, for a gated model, HF_TOKEN, or name a local directory"
        ) from error
