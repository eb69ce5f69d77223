import os
from pathlib import Path

import pytest

from backend.errors import ModelLoadError
from backend.model.model_config import read_model_config

BROKEN = ["", "{", '{"vocab_size": ', "\udcff", "[" * 100_000, '{"vocab_size": ' + "1" * 5000 + "}"]


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:3])
def test_broken_json_is_refused_by_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelLoadError, match=r"config\.json is not readable JSON .*download it again"):
        read_model_config(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelLoadError, match=r"config\.json is not readable JSON \(it is not an ordinary file\)"):
        read_model_config(tmp_path)


def test_json_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"config\.json must hold a JSON object, not list"):
        read_model_config(tmp_path)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json does not exist"):
        read_model_config(tmp_path)
