#!/usr/bin/env python3
"""Fetch what other engines bring to a visit of a GPU (`scripts/gpu_visit.py`), as small as it can be carried.

    scripts/gpu_peers.py fa3         FlashAttention 3 of a vLLM wheel, 10 MiB, into .gpu: part fa3 finds it there
    scripts/gpu_peers.py vllm        vLLM and what it needs besides, 28 MiB, into .gpu-vllm: part vllm finds it there
    scripts/gpu_peers.py sanitizer   the newest compute-sanitizer, 8 MiB, into .gpu: part sanitize finds it there

They come from the package index that pip is set up for, and git ignores where they lie: nothing of them is committed.
Of vLLM all is left out that decoding Qwen3 or Llama in bf16 on a Hopper GPU does not touch: FlashAttention 2, experts,
FlashMLA, its servers, symbols for debuggers, headers that kernels are compiled from, and of its kernels the code for
other GPUs, in whose place are zeros. The machine is one of Python 3.12 and torch 2.11 with transformers; its packages
are not carried.
"""

import argparse
import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend.bound_process import bound

ROOT = Path(__file__).resolve().parent.parent
FA3_CARRIED = ROOT / ".gpu" / "fa3.so.xz"
SANITIZER_CARRIED = ROOT / ".gpu" / "sanitizer.txz"
VLLM_CARRIED = ROOT / ".gpu-vllm" / "vllm.txz"
VLLM = "vllm==0.25.1"  # the newest for torch 2.11
SANITIZER = "nvidia-cuda-sanitizer-api==13.5.25"  # of a driver for CUDA 13
SANITIZER_FOLDER = "nvidia/cu13/compute-sanitizer/"
FA3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
LEFT_OUT = (
    "vllm/vllm_flash_attn/_vllm_fa2_C", "vllm/_moe_C", "vllm/_flashmla", "vllm/_qutlass", "vllm/_rust_tool_parser",
    "vllm/vllm-rs", "vllm/third_party/deep_gemm", "vllm/third_party/fmha_sm100", "vllm/benchmarks/",
    "vllm/entrypoints/serve/instrumentator/static", "tvm_ffi/3rdparty/", "tvm_ffi/src/",
)  # fmt: skip
UNUSED = (".h", ".hpp", ".cu", ".cuh", ".a", ".inl", ".js", ".safetensors", ".c", ".cc", ".m4", ".pyi")
ARCH, MACHINE_CODE = 90, 2  # of kernels that are kept
FATBIN, FATBIN_HEADER, ENTRY_HEADER = 0xBA55ED50, struct.Struct("<IHHQ"), struct.Struct("<HHIQIIII")
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 192 << 20}]
NEEDS = (
    "annotated-types==0.8.0", "apache-tvm-ffi==0.1.15.post2", "blake3==1.0.11", "cachetools==8.0.2", "cbor2==6.3.0",
    "compressed-tensors==0.17.0", "depyf==0.20.0", "astor==0.8.1", "dill==0.4.1", "dnspython==2.9.2",
    "email-validator==2.4.0", "fastapi==0.136.3", "httpcore2==2.16.2", "httpx2==2.16.2", "lark==1.2.2",
    "llguidance==1.7.6", "msgspec==0.22.0", "openai==3.57.0", "openai-harmony==0.0.8", "opentelemetry-api==1.45.2",
    "partial-json-parser==0.2.1.1.post7", "pybase64==1.5.1", "pydantic==2.14.4", "pydantic-core==2.50.5",
    "pydantic-extra-types==2.11.1", "python-json-logger==4.2.0", "python-multipart==0.0.34", "pyzmq==27.3.0",
    "setproctitle==1.3.8", "sniffio==1.3.1", "starlette==1.10.0", "typing-inspection==0.4.5", "xgrammar==0.2.3",
)  # fmt: skip
"""The packages that its engine imports and the machine lacks, as observed; of tvm-ffi the newest, which torch 2.11
needs.
"""
PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
FOR = ("--implementation=cp", "--python-version=3.12")
PLATFORMS = tuple(f"--platform=manylinux_2_{minor}_x86_64" for minor in range(35, 16, -1))


def fa3() -> None:
    FA3_CARRIED.parent.mkdir(exist_ok=True)
    with (
        TemporaryDirectory() as folder,
        zipfile.ZipFile(fetched(folder, VLLM)[0]) as wheel,
        wheel.open(FA3) as library,
        lzma.open(FA3_CARRIED, "wb") as packed,
    ):
        shutil.copyfileobj(library, packed)
    print(f"{FA3_CARRIED.stat().st_size / 2**20:.1f} MiB in {FA3_CARRIED.relative_to(ROOT)}; on the machine:")
    print("bash scripts/gpu_box --parts fa3")


def vllm() -> None:
    VLLM_CARRIED.parent.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        for path in fetched(folder, VLLM, *NEEDS):
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(site, [name for name in wheel.namelist() if is_carried(name)])
        for library in site.rglob("*.so*"):
            subprocess.run(**bound(["strip", "--strip-unneeded", str(library)]), check=True)
            library.write_bytes(for_one_arch(library.read_bytes()))
        pack(site, VLLM_CARRIED)
    print(f"{VLLM_CARRIED.stat().st_size / 2**20:.1f} MiB in {VLLM_CARRIED.relative_to(ROOT)}; on the machine:")
    print("bash scripts/gpu_box --parts vllm")


def sanitizer() -> None:
    SANITIZER_CARRIED.parent.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        with zipfile.ZipFile(fetched(folder, SANITIZER)[0]) as wheel:
            unused = tuple(SANITIZER_FOLDER + name for name in ("docs/", "x86/", "include/"))
            files = [file for file in wheel.infolist() if file.filename.startswith(SANITIZER_FOLDER)]
            for file in files:
                if not file.filename.startswith(unused):
                    Path(wheel.extract(file, folder)).chmod(file.external_attr >> 16)
        pack(Path(folder) / SANITIZER_FOLDER, SANITIZER_CARRIED)
    print(
        f"{SANITIZER_CARRIED.stat().st_size / 2**20:.1f} MiB in {SANITIZER_CARRIED.relative_to(ROOT)}; on the machine:"
    )
    print("bash scripts/gpu_box --parts sanitize")


def pack(folder: Path, target: Path) -> None:
    with lzma.open(target, "wb", filters=FILTERS) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        archive.add(folder, ".")


def for_one_arch(library: bytes) -> bytes:
    """The library with zeros in place of kernels for other GPUs than `ARCH`, and of kernels still to be compiled."""
    kept = bytearray(library)
    for start, size, kind, arch in kernels(library):
        if (kind, arch) != (MACHINE_CODE, ARCH):
            kept[start : start + size] = bytes(size)
    return bytes(kept)


def kernels(library: bytes) -> Iterator[tuple[int, int, int, int]]:
    """The place, length, kind and GPUs of each file of kernels in a library."""
    at = -8
    while (at := library.find(FATBIN.to_bytes(4, "little"), at + 8)) >= 0:
        _, version, header, length = FATBIN_HEADER.unpack_from(library, at)
        if at % 8 or (version, header) != (1, FATBIN_HEADER.size) or at + header + length > len(library):
            continue  # a number that is as large
        entry, end = at + header, at + header + length
        while entry < end:
            kind, _, skipped, size, *_, arch = ENTRY_HEADER.unpack_from(library, entry)
            yield entry + skipped, size, kind, arch
            entry += skipped + size
        at = end - 8


def fetched(folder: str, *wanted: str) -> list[Path]:
    """Wheels for the machine, in the order of their names."""
    command = [*PIP, *FOR, *PLATFORMS, "--platform=manylinux2014_x86_64", f"--dest={folder}", *wanted]
    subprocess.run(**bound(command), check=True)
    return sorted(Path(folder).glob("*.whl"))


def is_carried(name: str) -> bool:
    return not name.startswith(LEFT_OUT) and not name.endswith(UNUSED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=("fa3", "vllm", "sanitizer"))
    {"fa3": fa3, "vllm": vllm, "sanitizer": sanitizer}[parser.parse_args().peer]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
