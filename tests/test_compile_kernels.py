"""Triton kernels compiled for GPUs that are not there: what their code says of how they will run."""

import importlib
from pathlib import Path

import pytest

from tests.backend.kernels.test_triton_ops import run

pytest.importorskip("triton")
pytest.importorskip("labs")


def compiled(folder: Path, *options: str) -> str:
    """What is told of kernels compiled in a process, into `folder`."""
    return run("scripts/compile_kernels.py", "--jobs", "1", *options, TRITON_CACHE_DIR=str(folder))


SERVING = ("--dtype", "bfloat16", "--head-dim", "128", "--block-size", "16")


# 89 and 120 have the products and the memory of 86.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("archs", [("90",), pytest.param(("80", "86", "100"), marks=pytest.mark.nightly)], ids="-".join)
def test_attention_is_compiled_for_every_kind_of_gpu_without_faults(archs: tuple[str, ...], tmp_path: Path) -> None:
    """No spills; shared memory that is there; tensor cores; wide copies, in flight from one iteration to the next."""
    printed = compiled(tmp_path, *SERVING, "--arch", *archs, "--kernel", "prefill", "decode")
    assert "no kernel has a fault" in printed
    assert printed.count("prefill") == printed.count("decode") == len(archs)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_other_kernels_and_shapes_are_compiled_without_faults(tmp_path: Path) -> None:
    rest = ("join", "prefill windowed", "rope_and_store normed", "rms_norm adds", "silu_mul", "apply_token_bitmask")
    sampling = ("survey penalises filters", "gather", "choose penalises filters")
    printed = compiled(tmp_path, *SERVING, "--arch", "90", "--kernel", *rest, *sampling)
    assert "no kernel has a fault" in printed
    assert all(kernel in printed for kernel in (*rest, *sampling))
    packed = [
        f"packed_product {form} x {rows}" for form in ("4/32", "8/32", "8/16", "8/0") for rows in (16, 32, 64, 128)
    ]
    printed = compiled(tmp_path, *SERVING, "--arch", "90", "80", "100", "--kernel", *packed)
    assert "no kernel has a fault" in printed
    assert all(printed.count(kernel) == 3 for kernel in packed)
    small = ("--dtype", "fp8", "--head-dim", "64", "--block-size", "16", "--group", "7", "--arch", "100", "89")
    assert "no kernel has a fault" in compiled(tmp_path, *small, "--kernel", "prefill", "decode")
    products = ("product", "product gated", "product adds biased")
    printed = compiled(tmp_path, "--dtype", "float32", *SERVING[2:], "--arch", "89", "--kernel", *products)
    assert "no kernel has a fault" in printed
    assert all(kernel in printed for kernel in products)


# Triton's own way from a launcher to a kernel, with a driver that loads and launches nothing.
LAUNCHED = """
import torch
from triton.runtime import driver
from backend.kernels import triton_lang
from backend.kernels.self_check import disagreements
from backend.kernels.triton_ops import TritonOps
from labs.benchmarks.gpu_check.paper_gpu import PaperDriver

class Driver(PaperDriver):
    class utils:
        load_binary = staticmethod(lambda *binary: (1, 1, 1, 0, 1024))
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448, "warpSize": 32})

    launcher_cls = staticmethod(lambda source, metadata: lambda *launched: print("launched", metadata.name))

driver.set_active(Driver(90))
triton_lang.CPU_CAPABILITY = (9, 0)
disagreements(TritonOps(), torch.float32)
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_gpu_that_is_elsewhere_finds_what_was_compiled_for_it(tmp_path: Path) -> None:
    job = "kernels that differ from their reference, float32"
    command = ("-m", "labs.benchmarks.gpu_check.compiling", "--arch", "90", "--jobs", "1", "--only", job)
    assert "8 kernels" in run(*command, TRITON_CACHE_DIR=str(tmp_path))
    filled = set(tmp_path.rglob("*.cubin"))
    assert len(filled) == 8
    assert run("-c", LAUNCHED, TRITON_CACHE_DIR=str(tmp_path)).count("launched") >= 8
    assert set(tmp_path.rglob("*.cubin")) == filled


WAITING = """
    %a = scf.for %i = %0 to %n step %c {
      %w = ttg.async_wait %k {num = 0 : i32}
      %k = ttg.async_copy_global_to_local %p
    }
    %d = ttg.async_wait {num = 0 : i32}
"""


def test_the_guard_tells_loops_that_wait_for_what_they_began() -> None:
    """The wait after a loop, for nothing that is used, is none of its iterations'."""
    guard = importlib.import_module("scripts.compile_kernels")
    assert guard.copies_in_flight({"ttgir": WAITING}) == 0
    assert guard.copies_in_flight({"ttgir": WAITING.replace("num = 0", "num = 2", 1)}) == 2
    variant = guard.Variant(90, "bfloat16", 128, 16)
    narrow = "mma.sync; cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x8, %r2;"
    assert list(guard.attention_faults(variant, "prefill", narrow, 0)) == [
        "does not multiply with wgmma.mma_async",
        "copies [8] bytes at a time",
        "waits for copies where it begins them",
    ]
    assert not list(guard.attention_faults(variant, "decode", narrow.replace("0x8", "0x10"), 2))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", ["1", "4", "7", "8"])
@pytest.mark.parametrize("arch", ["80", "86", "89", "90", "100", "120"])
def test_every_kernel_is_compiled_without_faults(arch: str, group: str, tmp_path: Path) -> None:
    assert "no kernel has a fault" in compiled(tmp_path, "--arch", arch, "--group", group)
