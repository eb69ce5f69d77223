#!/usr/bin/env python3
"""Fetch what other engines bring to a visit of a GPU (`scripts/gpu_visit.py`), as small as it can be carried.

    scripts/gpu_peers.py fa3     FlashAttention 3 of a vLLM wheel, 10 MiB, into .gpu: part fa3 finds it there
    scripts/gpu_peers.py vllm    vLLM itself and what it needs besides, into .gpu-vllm, in parts of a transport's size

Both come from the package index that pip is set up for, and git ignores where they lie: nothing of them is committed.
Of vLLM all is left out that decoding Qwen3 or Llama in bf16 does not touch: FlashAttention 2, experts, FlashMLA, its
servers, and the headers that kernels are compiled from. The machine is one of Python 3.12 and torch 2.11 with
transformers; its packages are not carried.
"""

import argparse
import lzma
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend.bound_process import bound

ROOT = Path(__file__).resolve().parent.parent
FA3_CARRIED = ROOT / ".gpu" / "fa3.so.xz"
PARTS = ROOT / ".gpu-vllm"
PART_BYTES = 46 << 20
VLLM = "vllm==0.25.1"  # the newest for torch 2.11
FA3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
LEFT_OUT = (
    "vllm/vllm_flash_attn/_vllm_fa2_C", "vllm/_moe_C", "vllm/_flashmla", "vllm/_qutlass", "vllm/_rust_tool_parser",
    "vllm/vllm-rs", "vllm/third_party/deep_gemm", "vllm/third_party/fmha_sm100", "vllm/benchmarks/",
    "vllm/entrypoints/serve/instrumentator/static",
)  # fmt: skip
UNUSED = (".h", ".hpp", ".cu", ".cuh", ".a")
NEEDS = (
    "annotated-types==0.8.0", "apache-tvm-ffi==0.1.15.post2", "blake3==1.0.11", "cachetools==8.0.2", "cbor2==6.3.0",
    "compressed-tensors==0.17.0", "depyf==0.20.0", "astor==0.8.1", "dill==0.4.1", "dnspython==2.9.2",
    "email-validator==2.4.0", "fastapi==0.136.3", "httpcore2==2.16.2", "httpx2==2.16.2", "lark==1.2.2",
    "llguidance==1.7.6", "msgspec==0.22.0", "openai==3.57.0", "openai-harmony==0.0.8", "opentelemetry-api==1.45.2",
    "partial-json-parser==0.2.1.1.post7", "pybase64==1.5.1", "pydantic==2.14.4", "pydantic-core==2.50.5",
    "pydantic-extra-types==2.11.1", "python-json-logger==4.2.0", "python-multipart==0.0.34", "pyzmq==27.3.0",
    "setproctitle==1.3.8", "sniffio==1.3.1", "starlette==1.10.0", "typing-inspection==0.4.5", "xgrammar==0.2.3",
)  # fmt: skip
"""What its engine imports and the machine lacks, as was seen; of tvm-ffi the newest, which torch 2.11 needs."""
PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
FOR = ("--implementation=cp", "--python-version=3.12")
PLATFORMS = tuple(f"--platform=manylinux_2_{minor}_x86_64" for minor in range(35, 16, -1))
THERE = "/tmp/sluice-gpu/vllm"


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
    """All of it as one archive, cut into parts: what a machine keeps while it is held takes several transports."""
    shutil.rmtree(PARTS, ignore_errors=True)
    with TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        for path in fetched(folder, VLLM, *NEEDS):
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(site, [name for name in wheel.namelist() if is_carried(name)])
        with lzma.open(Path(folder) / "vllm.txz", "wb") as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
            archive.add(site, ".")
        with (Path(folder) / "vllm.txz").open("rb") as whole:
            parts = cut(whole)
    for number in range(1, parts + 1):
        print(f"\nwith {PARTS.name}/{number}, on the machine, which is kept until the last:")
        command = f"mkdir -p {THERE} && cp {PARTS.name}/{number}/* {THERE}"
        if number == parts:
            command += f" && cat {THERE}/part.* | tar xJ -C {THERE} && export PYTHONPATH=$PWD:{THERE}"
            command += ' && python3 scripts/check_gpu.py --apart --parts vllm --json "${OUT:-.}/vllm.json"'
        print(command)


def fetched(folder: str, *wanted: str) -> list[Path]:
    """Wheels for the machine, in the order of their names."""
    command = [*PIP, *FOR, *PLATFORMS, "--platform=manylinux2014_x86_64", f"--dest={folder}", *wanted]
    subprocess.run(**bound(command), check=True)
    return sorted(Path(folder).glob("*.whl"))


def is_carried(name: str) -> bool:
    return not name.startswith(LEFT_OUT) and not name.endswith(UNUSED)


def cut(whole: BinaryIO) -> int:
    """Write parts of the archive, each into a folder of its own; returns how many there are."""
    number = 0
    while part := whole.read(PART_BYTES):
        number += 1
        (PARTS / str(number)).mkdir(parents=True)
        (PARTS / str(number) / f"part.{number:02}").write_bytes(part)
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=("fa3", "vllm"))
    if parser.parse_args().peer == "fa3":
        fa3()
    else:
        vllm()
    return 0


if __name__ == "__main__":
    sys.exit(main())
