"""Locates a model's files: packaged with Sluice, in a local directory or GGUF file, or on the Hugging Face hub."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from backend.errors import ModelLoadError
from backend.kernels.build import cache_directory
from backend.model.gguf_folder import folder_of

EMBEDDED = "embedded"
"""The name of the small model in the package."""

SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct, which `scripts/download` fetches once for all."""

_SMOLLM2_FILE = "models/SmolLM2-135M-Instruct.Q4_1.gguf"  # as in scripts/download
_HUB_PREFIX = "hf:"  # before a name that must not be read as a directory's
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]
_UNWANTED = ["*/*", "consolidated*"]
_UNWANTED_OF_ENCODERS = ["onnx/*", "openvino/*"]  # their other folders say how hidden states are pooled


def resolve_model(name_or_path: str) -> Path:
    """Return the directory of a model, downloaded first if it is a hub name (organisation/name) not yet cached."""
    return _local(name_or_path) or _download(name_or_path, _UNWANTED)


def resolve_encoder(name_or_path: str) -> Path:
    """Return the directory of a model that embeds or scores, as `resolve_model` does."""
    return _local(name_or_path) or _download(name_or_path, _UNWANTED_OF_ENCODERS)


def resolve_config(name_or_path: str) -> Path:
    """Return the directory of a model's config.json; of a hub name nothing else is downloaded."""
    return _local(name_or_path) or _download_config(name_or_path)


def _local(name_or_path: str) -> Path | None:
    """Return the directory, None for a hub name. Raises `ModelLoadError` for any other name."""
    if name_or_path == EMBEDDED:
        return Path(__file__).parents[1] / EMBEDDED
    if name_or_path == SMOLLM2:
        return _smollm2()
    try:
        path = Path(name_or_path).expanduser()
        if name_or_path and path.is_dir():
            return path
        if path.is_file() and path.suffix == ".gguf":
            return folder_of(path)
        if path.is_file():
            raise ModelLoadError(
                f"{path} is a file; name a .gguf file, or the directory that holds config.json and the weights"
            )
    except OSError as error:
        raise ModelLoadError(f"{name_or_path}: {error.strerror}") from None
    except RuntimeError:  # of expanduser
        raise ModelLoadError(f"{name_or_path}: its home directory is not known: name the whole path") from None
    if _HUB_NAME.fullmatch(name_or_path.removeprefix(_HUB_PREFIX)) is None:
        raise ModelLoadError(f"there is no directory {name_or_path!r}, and a hub name has the form organisation/name")
    return None


def _smollm2() -> Path:
    file = cache_directory() / _SMOLLM2_FILE
    if not file.is_file():
        raise ModelLoadError(
            f"{file} does not exist: `scripts/download {SMOLLM2}` fetches it, 93 MB, and so does `scripts/serve`"
        )
    return folder_of(file)


def _download(name: str, unwanted: list[str]) -> Path:
    patterns = {"allow_patterns": _WANTED, "ignore_patterns": unwanted}
    return Path(_from_hub(name, lambda hub: hub.snapshot_download(name.removeprefix(_HUB_PREFIX), **patterns)))


def _download_config(name: str) -> Path:
    return Path(_from_hub(name, lambda hub: hub.hf_hub_download(name.removeprefix(_HUB_PREFIX), "config.json"))).parent


def _from_hub(name: str, fetch: Callable[[Any], str]) -> str:
    try:
        hub = import_module("huggingface_hub")  # optional, and slow to import
    except ImportError:
        raise ModelLoadError(
            f"there is no directory {name}; to download it from the hub, pip install huggingface_hub"
        ) from None
    try:
        return fetch(hub)
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"there is no directory {name}, and the hub could not supply it ({type(error).__name__}: {error}); "
            f"check the name, the network and, for a gated model, HF_TOKEN, or name a local directory"
        ) from error
