"""A GGUF file is served from a folder in Hugging Face's form, made once for each file in this user's cache.

The folder holds config.json, the tokenizer and the chat template, converted from the file's metadata, and a link to the
file, from which weights are read. Every reader of a model's folder therefore reads GGUF too, and can show the converted
files.
"""

import json
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import tokenizers

from backend.errors import ModelLoadError
from backend.gguf.architecture import Architecture
from backend.gguf.reader import GgufFile
from backend.gguf.vocabulary import GgufVocabulary
from backend.kernels.build import cache_directory
from backend.model.model_config import read_model_config
from backend.model.shards import GGUF_LINK

_FORM = 1  # the version of these folders: raise it when the conversion changes


def folder_of(path: Path) -> Path:
    """Return the folder of a GGUF file, made now if it does not exist. Raises `ModelLoadError` naming file and
    field.
    """
    path = path.absolute()  # a link's own name: its target may be called by a digest
    status = path.stat()
    identity = (_FORM, str(path), status.st_ino, status.st_size, status.st_mtime_ns)
    home = cache_directory() / "gguf" / sha256(repr(identity).encode()).hexdigest()[:16]
    folder = home / path.stem
    if not folder.is_dir():
        with GgufFile(path) as file:
            contents = _contents(file)
        try:
            _make(folder, contents, path)
        except OSError as error:
            raise ModelLoadError(
                f"{path}: {home} cannot be written ({error.strerror}); SLUICE_CACHE_DIR names another folder for it"
            ) from error
    return folder


def _contents(file: GgufFile) -> dict[str, str]:
    """Return the content of each file of the folder."""
    vocabulary = GgufVocabulary(file)
    config = Architecture(file).config() | vocabulary.token_ids()
    tokenizer = json.dumps(vocabulary.tokenizer(), ensure_ascii=False)
    try:
        tokenizers.Tokenizer.from_str(tokenizer)
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(f"{file.path}: tokenizer.ggml: the tokenizers library refuses it: {error}") from error
    contents = {
        "config.json": json.dumps(config, indent=1),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.dumps(vocabulary.special_tokens(), ensure_ascii=False, indent=1),
    }
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise ModelLoadError(f"{file.path}: tokenizer.chat_template: a text is expected")
        contents["chat_template.jinja"] = template
    return contents


def _make(folder: Path, contents: dict[str, Any], path: Path) -> None:
    """Make the folder whole or not at all; of several processes that make it at once the first one wins."""
    folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent.parent, prefix="draft-"))
    try:
        made = draft / folder.name
        made.mkdir()
        for name, content in contents.items():
            (made / name).write_text(content, encoding="utf-8")
        (made / GGUF_LINK).symlink_to(path)
        _check(made, path)
        draft.rename(folder.parent)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _check(folder: Path, path: Path) -> None:
    """Read config.json as the loader will, so that an error names the GGUF file instead of the converted one."""
    try:
        read_model_config(folder)
    except ModelLoadError as error:
        raise ModelLoadError(str(error).replace(str(folder / "config.json"), f"{path}, as config.json")) from error
