from pathlib import Path

import huggingface_hub
import pytest

from backend.errors import ModelLoadError
from backend.model import hub
from backend.model.hub import EMBEDDED, resolve_encoder, resolve_model
from tests.backend.families import random_model
from tests.backend.gguf.files import gguf, metadata_of, save, tensors_of, words


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_the_embedded_model_lies_in_the_package() -> None:
    assert resolve_model(EMBEDDED) == Path(hub.__file__).parents[1] / "embedded"


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelLoadError, match=r"is a file; name a \.gguf file, or the directory"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_smollm2_is_served_from_the_cache_once_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path))
    with pytest.raises(
        ModelLoadError, match=r"Q4_1\.gguf does not exist: `scripts/download smollm2` fetches it, 93 MB"
    ):
        resolve_model("smollm2")
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = random_model("llama-gqa-tied")
    save(path, gguf(metadata_of(model) | words(131), tensors_of(model)))
    assert resolve_model("smollm2").name == "SmolLM2-135M-Instruct.Q4_1"


@pytest.mark.parametrize("name", ["./nowhere/at/all", "nowhere", "/nowhere/model", "a/b/c", "hf:name", "hf:", ""])
def test_a_model_name_is_refused_unless_it_is_a_directory_or_a_hub_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nowhere-else").mkdir()
    with pytest.raises(ModelLoadError, match=r"there is no directory .*organisation/name"):
        resolve_model(name)


def test_a_path_that_the_system_does_not_take_is_refused() -> None:
    with pytest.raises(ModelLoadError):
        resolve_model("/models/" + "x" * 5000)


def test_a_hub_name_is_downloaded_without_duplicates_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[str]] = {}

    def snapshot_download(name: str, **patterns: list[str]) -> str:
        asked.update(patterns)
        return f"/cache/{name}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/name") == resolve_model("hf:org/name") == Path("/cache/org/name")
    assert "*.safetensors" in asked["allow_patterns"]
    assert "consolidated*" in asked["ignore_patterns"]


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **patterns: list[str]) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError(f"cannot reach the hub for {name}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelLoadError, match=r"the hub could not supply it .*cannot reach.*name a local directory"):
        resolve_model("org/name")


def test_of_an_encoder_the_folders_come_along_that_say_how_it_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["config.json", "modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "onnx/model.onnx"]

    def snapshot_download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        found = huggingface_hub.utils.filter_repo_objects(
            files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert [*found] == files[:4]
        return f"/cache/{name}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_encoder("org/name") == Path("/cache/org/name")
