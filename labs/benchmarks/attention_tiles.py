"""Times of the attention kernels by how they are tiled: `python -m labs.benchmarks.attention_tiles [--json FILE]`.

What `decode_tile`, `prefill_tile` and `CHUNKS_PER_MULTIPROCESSOR` should say on a GPU is found by trying.
Each way is told as floor over time of every workload (see `kernels_gpu`); ways that do not fit the GPU are told so. The
present one comes first. Without a GPU it runs interpreted, small, and only two ways of each.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice, product
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.errors import OutOfResources

from backend.kernels import paged_decode, paged_prefill
from backend.model.known_shapes import LLAMA_3_8B, QWEN3_06B
from labs.benchmarks.kernels_gpu import (
    DECODES,
    PREFILLS,
    SMALL,
    SMALL_DECODES,
    SMALL_PREFILLS,
    Bench,
    Workload,
    peaks_of,
)

GPU = torch.cuda.is_available()
MAX_RUN_SECONDS = 400.0
SHAPES = {"llama": LLAMA_3_8B, "qwen": QWEN3_06B}

Way = tuple[str, ModuleType, dict[str, Any]]
"""The name of a tiling, and its changes by module."""


def ways_to_decode() -> Iterator[Way]:
    yield "as it is", paged_decode, {}
    for chunks in (4, 16, 32):
        yield f"{chunks} chunks a multiprocessor", paged_decode, {"CHUNKS_PER_MULTIPROCESSOR": chunks}
    for keys, warps, stages in product((32, 64, 128), (2, 4, 8), (3, 4, 5, 6)):
        yield _tiled(paged_decode, "decode_tile", paged_decode.DecodeTile(keys, warps, stages))


def ways_to_prefill() -> Iterator[Way]:
    yield "as it is", paged_prefill, {}
    for rows, keys, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4, 5, 6)):
        yield _tiled(paged_prefill, "prefill_tile", paged_prefill.PrefillTile(rows, keys, warps, stages))


def _tiled(module: ModuleType, chooser: str, tile: object) -> Way:
    return str(tile), module, {chooser: lambda *_: tile}


def fractions(bench: Bench, workloads: Sequence[Workload], way: Way) -> list[float]:
    """Floor over time of the attention of each workload; nothing if the GPU has not the memory or threads for it."""
    _, module, changes = way
    try:
        with patch.multiple(module, **changes) if changes else nullcontext():
            return [_attention(bench, workload) for workload in workloads]
    except OutOfResources:
        return []


def _attention(bench: Bench, workload: Workload) -> float:
    return next(found.fraction for found in bench.attention(workload) if "attention" in found.kernel)


def compare(
    bench: Bench, ways: Iterable[Way], workloads: Sequence[Workload], deadline: float
) -> Iterator[dict[str, Any]]:
    """Print a line for each tiling, and yield its figures."""
    labels = [str(workload) for workload in workloads]
    print(f"{bench.name:48}{'  '.join(labels)}")
    for way in ways:
        if time.perf_counter() > deadline:
            return
        found = fractions(bench, workloads, way)
        print(f"{way[0]:48}{'  '.join(f'{fraction:.3f}' for fraction in found) or 'does not fit'}", flush=True)
        yield {"way": way[0], "workloads": labels, "fractions": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--seconds", type=float, default=MAX_RUN_SECONDS, help="begin no way after these")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    device, dtype = (torch.device("cuda"), torch.bfloat16) if GPU else (torch.device("cpu"), torch.float32)
    shape = SHAPES[options.shape] if GPU else SMALL
    bench = Bench(options.shape, shape, dtype, device, peaks_of(device, dtype))
    deadline, most = time.perf_counter() + options.seconds, None if GPU else 2
    decodes, prefills = (DECODES[1:], PREFILLS) if GPU else (SMALL_DECODES, SMALL_PREFILLS)
    found = []
    for ways, workloads in ((ways_to_decode(), decodes), (ways_to_prefill(), prefills)):
        for figures in compare(bench, islice(ways, most), workloads, deadline):
            found.append(figures)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
