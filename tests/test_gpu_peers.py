"""scripts/gpu_peers.py: what is carried of wheels, and that it comes together again."""

import lzma
import random
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts import gpu_peers

FILES = {
    gpu_peers.FA3: random.Random(0).randbytes(3000),
    "vllm/engine.py": b"x = 1\n",
    "vllm/_moe_C.abi3.so": b"experts",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": b"FlashAttention 2",
    "vllm/third_party/cutlass/gemm.hpp": b"template",
}


@pytest.fixture(autouse=True)
def _wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wheel in place of the fetched ones, and folders of its own to gather in."""

    def fetched(folder: str, *wanted: str) -> list[Path]:
        path = Path(folder) / "vllm.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for name, content in FILES.items():
                wheel.writestr(name, content)
        return [path]

    monkeypatch.setattr(gpu_peers, "fetched", fetched)
    monkeypatch.setattr(gpu_peers, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_peers, "FA3_CARRIED", tmp_path / ".gpu" / "fa3.so.xz")
    monkeypatch.setattr(gpu_peers, "VLLM_CARRIED", tmp_path / ".gpu-vllm" / "vllm.txz")
    monkeypatch.setattr(gpu_peers, "bound", lambda command: {"args": ["true"]})  # in the place of strip


def test_of_flash_attention_the_library_alone_is_carried(tmp_path: Path) -> None:
    gpu_peers.fa3()
    assert lzma.decompress((tmp_path / ".gpu" / "fa3.so.xz").read_bytes()) == FILES[gpu_peers.FA3]


def test_the_archive_is_without_what_is_not_touched(tmp_path: Path) -> None:
    for _ in range(2):  # gathered anew, what was there is gone
        gpu_peers.vllm()
    with tarfile.open(tmp_path / ".gpu-vllm" / "vllm.txz") as archive:
        held = {member.name.removeprefix("./") for member in archive.getmembers() if member.isfile()}
        library = archive.extractfile(f"./{gpu_peers.FA3}")
        assert library is not None and library.read() == FILES[gpu_peers.FA3]
    assert held == {gpu_peers.FA3, "vllm/engine.py"}


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """Kernels as a library holds them: of a kind, for GPUs of an architecture, and their code."""
    files = [
        gpu_peers.ENTRY_HEADER.pack(kind, 0x101, 64, len(code), 0, 0, 0, arch).ljust(64, b"h") + code
        for kind, arch, code in entries
    ]
    held = b"".join(files)
    return gpu_peers.FATBIN_HEADER.pack(gpu_peers.FATBIN, 1, 16, len(held)) + held


def test_of_kernels_the_code_for_other_gpus_is_zeros_and_all_else_stays_where_it_is() -> None:
    code, number = b"c" * 24, gpu_peers.FATBIN.to_bytes(4, "little") * 2  # which looks like a header
    first, second = fatbin((2, 80, code), (2, 90, b"n" * 8), (1, 90, code)), fatbin((2, 90, b"m" * 16), (2, 120, code))
    library = b"text" * 4 + first + number + second + b"data"
    kept = gpu_peers.for_one_arch(library)
    assert kept == library.replace(code, bytes(24))
