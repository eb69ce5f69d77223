"""scripts/gpu_peers.py: what is carried of wheels, and that it comes together again."""

import lzma
import random
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from scripts import gpu_peers

FILES = {
    gpu_peers.FA3: random.Random(0).randbytes(3000),
    "vllm/_C.abi3.so": random.Random(1).randbytes(2500),
    "vllm/engine.py": b"x = 1\n",
    "vllm/_moe_C.abi3.so": b"experts",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": b"FlashAttention 2",
    "vllm/third_party/cutlass/gemm.hpp": b"template",
}


@pytest.fixture(autouse=True)
def _wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wheel in the place of those that would be fetched, and places of its own to gather in."""

    def fetched(folder: str, *wanted: str) -> list[Path]:
        path = Path(folder) / "vllm.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for name, content in FILES.items():
                wheel.writestr(name, content)
        return [path]

    monkeypatch.setattr(gpu_peers, "fetched", fetched)
    monkeypatch.setattr(gpu_peers, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_peers, "FA3_CARRIED", tmp_path / ".gpu" / "fa3.so.xz")
    monkeypatch.setattr(gpu_peers, "PARTS", tmp_path / ".gpu-vllm")
    monkeypatch.setattr(gpu_peers, "PART_BYTES", 2000)


def test_of_flash_attention_the_library_alone_is_carried(tmp_path: Path) -> None:
    gpu_peers.fa3()
    assert lzma.decompress((tmp_path / ".gpu" / "fa3.so.xz").read_bytes()) == FILES[gpu_peers.FA3]


def test_the_parts_are_one_archive_without_what_is_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # gathered anew, what was there is gone
        gpu_peers.vllm()
    parts = sorted((tmp_path / ".gpu-vllm").glob("*/part.*"))
    assert len(parts) > 1 and max(part.stat().st_size for part in parts) <= 2000
    with tarfile.open(fileobj=BytesIO(b"".join(part.read_bytes() for part in parts))) as archive:
        held = {member.name.removeprefix("./") for member in archive.getmembers() if member.isfile()}
    assert held == {gpu_peers.FA3, "vllm/_C.abi3.so", "vllm/engine.py"}
    assert capsys.readouterr().out.count("tar xJ") == 2, "the last part of each says how they come together"
