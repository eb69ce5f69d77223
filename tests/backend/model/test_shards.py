import os
from pathlib import Path

import pytest

from backend.errors import ModelLoadError
from tests.backend.model.checkpoints import Q_PROJ, load, save, save_sharded, tensors, write_index


def test_a_pipe_in_place_of_weights_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not an ordinary file"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1], ids=["empty", "no length", "half a header", "a byte short"])
@pytest.mark.parametrize("shard", ["model.safetensors", "model-2.safetensors"])
def test_a_truncated_file_is_named(shard: str, keep: int, tmp_path: Path) -> None:
    (save if shard == "model.safetensors" else save_sharded)(tmp_path, tensors())
    (tmp_path / shard).write_bytes((tmp_path / shard).read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=rf"{shard} is truncated, corrupt or unreadable .*download it again"):
        load(tmp_path)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    save_sharded(tmp_path, tensors())
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-2\.safetensors does not exist, but model.*index\.json lists it"):
        load(tmp_path)


def test_a_tensor_that_the_index_misplaces_is_named(tmp_path: Path) -> None:
    weight_map = save_sharded(tmp_path, tensors())
    name = next(name for name, shard in weight_map.items() if shard == "model-2.safetensors")
    write_index(tmp_path, weight_map | {name: "model-1.safetensors"})
    with pytest.raises(
        ModelLoadError, match=rf"model-1\.safetensors does not hold {name}, but .*index\.json does list"
    ):
        load(tmp_path)


def test_a_tensor_that_the_index_leaves_out_is_named(tmp_path: Path) -> None:
    weight_map = save_sharded(tmp_path, tensors())
    write_index(tmp_path, {name: shard for name, shard in weight_map.items() if name != Q_PROJ})
    with pytest.raises(ModelLoadError, match=rf"safetensors holds {Q_PROJ}, but .*index\.json does not list it there"):
        load(tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        "../model-1.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "model.bin",
        "..",
        "",
        7,
        "a\0.safetensors",
        "a\n.safetensors",
        "x" * 300 + ".safetensors",
    ],
)
def test_an_index_can_name_only_safetensors_files_beside_it(shard: object, tmp_path: Path) -> None:
    write_index(tmp_path, save_sharded(tmp_path, tensors()) | {Q_PROJ: shard})
    with pytest.raises(ModelLoadError, match=rf"weight_map\.{Q_PROJ} is .*a \.safetensors file of the same folder"):
        load(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {}])
def test_an_index_without_a_map_is_refused(weight_map: object, tmp_path: Path) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(ModelLoadError, match=r"index\.json: weight_map must be an object"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("model.safetensors", r"model\.safetensors is truncated, corrupt or unreadable"),
        ("pytorch_model.bin", r"only \.bin weights.*save_pretrained"),
        ("README.md", r"holds neither model\.safetensors nor model\.safetensors\.index\.json"),
    ],
)
def test_a_refusal_names_the_files_found_instead_of_weights(name: str, complaint: str, tmp_path: Path) -> None:
    """A pointer of Git LFS, pickled weights, and nothing of a model."""
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelLoadError, match=complaint):
        load(tmp_path)
