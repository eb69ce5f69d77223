"""A GGUF file is served from a folder in Hugging Face's form, made once for each file in the cache of this user.

The folder holds config.json, the tokenizer and the chat template, made of the file's metadata, and a link to the file,
from which weights are read. Whatever reads a model's folder therefore reads GGUF, and shows what was made of a file.
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

_FORM = 1  # of these folders: raise it when what is made of a file changes


def folder_of(path: Path) -> Path:
    """Return the folder of a GGUF file, made now if there is none. Raises `ModelLoadError` naming file and field."""
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
    """Make the folder whole or not at all; of several that do so at once the first one wins."""
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
    """Read config.json as the loader will, so that a complaint names the GGUF file and not what was made of it."""
    try:
        read_model_config(folder)
    except ModelLoadError as error:
        raise ModelLoadError(str(error).replace(str(folder / "config.json"), f"{path}, as config.json")) from error
