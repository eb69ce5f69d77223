"""Reads an adapter as PEFT saves it (adapter_config.json, adapter_model.safetensors) into blocks of KV memory's size.

LoRA (Hu et al., 2021) adds `scale * B @ A` to a product's weight. Here A and B are cut into vectors, a row of A and a
column of B for each rank, and vectors are packed into blocks: a block of the pool holds keys and values or vectors of
an adapter, whichever needs it (unified paging: S-LoRA, Sheng et al., 2023).
"""

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from backend.errors import ModelLoadError
from backend.json_file import JsonFile
from backend.model.model_config import ModelConfig
from backend.model.weights import MAX_WEIGHT

MAX_HEADER_BYTES = 2**22  # of a file with 4,096 layers
ALIGNMENT_NUMBERS = 16  # of a vector's beginning in its block: kernels read whole registers
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PREFIX = "base_model.model.model.layers."
_ALL_PRODUCTS = "q, k, v, o, gate, up or down_proj"

_KNOWN_KEYS = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "init_lora_weights",
    "eva_config", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "loftq_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
    "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
"""The keys that are read here, and keys of how the adapter was made that change none of its results."""

_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""The values of `init_lora_weights` by which training began with another base model than the one served."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The weights of one adapter in the host's memory, in blocks. B is multiplied by the scale already."""

    rank: int
    digest: str
    blocks: Tensor  # [blocks, numbers of a block], in the model's type
    vectors: Tensor
    """[layers, `num_places`] int64: where each vector begins in the flattened blocks, -1 for none. See `places`."""


def num_places(max_rank: int) -> int:
    """Return the length of a layer's row of vectors: of A and B of each of its seven matrices."""
    return 14 * max_rank


def places(max_rank: int) -> tuple[tuple[int, ...], ...]:
    """Return for each of a layer's products the first place of each of its parts in a row of vectors.

    The products are qkv (three parts), output, gate_up (two) and down. The row has, product by product, the vectors of
    A of all of its parts, then those of B, `max_rank` each.
    """
    firsts, place = [], 0
    for parts in (3, 1, 2, 1):
        firsts.append(tuple(range(place, place + parts * max_rank, max_rank)))
        place += 2 * parts * max_rank
    return tuple(firsts)


@dataclass(frozen=True, slots=True)
class _Part:
    """One matrix of the checkpoint's products, such as q_proj."""

    name: str
    inputs: int
    outputs: int
    first_a: int  # place of its first vector of A in a layer's row
    first_b: int


def _parts(model: ModelConfig, max_rank: int) -> Iterator[_Part]:
    hidden, query, key = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    products: tuple[tuple[int, dict[str, int]], ...] = (
        (hidden, {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key}),
        (query, {"self_attn.o_proj": hidden}),
        (hidden, {"mlp.gate_proj": model.intermediate_size, "mlp.up_proj": model.intermediate_size}),
        (model.intermediate_size, {"mlp.down_proj": hidden}),
    )
    if model.experts is not None:  # whose products are grouped by expert, and not by adapter as well
        products = products[:2]
    for firsts, (inputs, outputs) in zip(places(max_rank), products, strict=False):
        between = len(firsts) * max_rank
        for first, (name, width) in zip(firsts, outputs.items(), strict=True):
            yield _Part(name, inputs, width, first, first + between)


def read_adapter(
    directory: Path, model: ModelConfig, dtype: torch.dtype, max_rank: int, block_numbers: int
) -> AdapterWeights:
    """Read an adapter of `model`. `block_numbers` is how many numbers of `dtype` a block of KV memory holds.

    Raises `ModelLoadError` with the file and the key or tensor, for anything that would compute something else than
    PEFT does. Reads at most as many bytes as the largest adapter of this model and rank has.
    """
    rank, scale = _read_config(JsonFile.read(directory / _CONFIG), max_rank)
    file, parts = directory / _WEIGHTS, list(_parts(model, max_rank))
    most = sum(8 * rank * (part.inputs + part.outputs) for part in parts) * model.num_layers + MAX_HEADER_BYTES
    stored = _read_tensors(file, most)
    packing = _Packing(dtype, block_numbers, num_places(max_rank) * model.num_layers)
    for layer in range(model.num_layers):
        for part in parts:
            name = f"{_PREFIX}{layer}.{part.name}"
            a, b = stored.pop(f"{name}.lora_A.weight", None), stored.pop(f"{name}.lora_B.weight", None)
            if a is None and b is None:
                continue
            if a is None or b is None:
                raise ModelLoadError(f"{file}: {name} has one of lora_A and lora_B, and both are needed")
            _check(file, f"{name}.lora_A.weight", a, (rank, part.inputs))
            _check(file, f"{name}.lora_B.weight", b, (part.outputs, rank))
            row = num_places(max_rank) * layer
            packing.add(a.float(), row + part.first_a, f"{file}: {name}.lora_A")
            packing.add(b.float().t() * scale, row + part.first_b, f"{file}: {name}.lora_B")
    if stored:
        served = "q, k, v or o_proj, as adapters of a model with experts may have," if model.experts else _ALL_PRODUCTS
        raise ModelLoadError(
            f"{file}: {min(stored)!r:.200} is not a lora_A or lora_B of {served} in one of "
            f"this model's {model.num_layers} layers; serving without it would give wrong answers"
        )
    return packing.packed(file, rank, model.num_layers)


def random_adapter(
    model: ModelConfig, dtype: torch.dtype, rank: int, max_rank: int, block_numbers: int, seed: int = 0
) -> AdapterWeights:
    """Return an adapter of all products with small random weights, to measure with. Raises `ModelLoadError`."""
    generator = torch.Generator().manual_seed(seed)
    packing = _Packing(dtype, block_numbers, num_places(max_rank) * model.num_layers)
    for layer in range(model.num_layers):
        for part in _parts(model, max_rank):
            row = num_places(max_rank) * layer
            for first, width in ((part.first_a, part.inputs), (part.first_b, part.outputs)):
                packing.add(torch.empty((rank, width)).normal_(std=0.02, generator=generator), row + first, part.name)
    return packing.packed(Path("random"), rank, model.num_layers)


def _read_config(config: JsonFile, max_rank: int) -> tuple[int, float]:
    """Return the rank, and the scale of `B @ A`. Raises `ModelLoadError`."""
    if config.get("peft_type") != "LORA":
        raise config.wrong("peft_type", "LORA is the one type of adapters that is served")
    rank = config.integer("r")
    if rank > max_rank:
        raise config.wrong("r", f"adapters of a rank up to {max_rank} are served: raise --max-adapter-rank")
    if config.get("bias") not in (None, "none"):
        raise config.wrong("bias", "biases of adapters are not implemented: none is expected")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_BASE_CHANGING):
        raise config.wrong(
            "init_lora_weights", "it changes the base model: convert the adapter to plain LoRA with PEFT"
        )
    for key, value in config.values.items():
        if key not in _KNOWN_KEYS and value not in (None, False, [], {}):
            raise config.wrong(key, "it is not implemented, and serving without it might give wrong answers")
    alpha = config.number("lora_alpha", 8.0)
    return rank, alpha / (rank**0.5 if config.flag("use_rslora", default=False) else rank)


def _read_tensors(file: Path, most: int) -> dict[str, Tensor]:
    """Read a file whole: a running server would die of a mapped file that is cut meanwhile."""
    if not file.exists() and (file.parent / "adapter_model.bin").exists():
        raise ModelLoadError(f"{file} does not exist, and a .bin file can run code when loaded: save it with PEFT anew")
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise ModelLoadError(
                f"{file} has {status.st_size:,} bytes; an ordinary file of at most {most:,} is expected of an adapter "
                "of this model and rank"
            )
        with file.open("rb") as opened:
            return dict[str, Tensor](load(opened.read(most)))
    except FileNotFoundError:
        raise ModelLoadError(f"{file} does not exist; PEFT's save_pretrained writes it") from None
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"{file} is truncated, corrupt or unreadable ({error!s:.200}); copy it again") from error


def _check(file: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype not in _FLOATS:
        raise ModelLoadError(f"{file}: {name} is stored as {tensor.dtype}; floating point of 16 to 64 bits is expected")
    if tensor.shape != shape:
        expected = f"{list(shape)}, by r of {_CONFIG} and this model"
        raise ModelLoadError(f"{file}: {name} has shape {list(tensor.shape)}; expected is {expected}")
    low, high = map(float, tensor.aminmax())
    if not -MAX_WEIGHT <= low <= high <= MAX_WEIGHT:
        raise ModelLoadError(f"{file}: {name} holds numbers from {low:g} to {high:g}, beyond {MAX_WEIGHT:g}: damaged")


class _Packing:
    """Packs vectors into blocks one after another; none is cut."""

    def __init__(self, dtype: torch.dtype, block_numbers: int, num_places: int) -> None:
        self._dtype, self._size = dtype, block_numbers
        self._vectors = torch.full((num_places,), -1, dtype=torch.int64)
        self._blocks = [torch.zeros(block_numbers, dtype=dtype)]
        self._used = 0  # numbers of the last block

    def add(self, rows: Tensor, place: int, name: str) -> None:
        """Add vectors [vectors, numbers] fp32, at places from `place` on."""
        width = rows.shape[1]
        stride = -(-width // ALIGNMENT_NUMBERS) * ALIGNMENT_NUMBERS
        if stride > self._size:
            raise ModelLoadError(f"{name}: a vector of {width} numbers does not fit a block: raise --block-size")
        narrow = rows.to(self._dtype)
        if not bool(narrow.isfinite().all()):
            raise ModelLoadError(f"{name} times the adapter's scale does not fit {self._dtype}")
        done = 0
        while done < len(rows):
            if self._used + stride > self._size:
                self._blocks.append(torch.zeros(self._size, dtype=self._dtype))
                self._used = 0
            count, begin = min(len(rows) - done, (self._size - self._used) // stride), self._used
            self._blocks[-1][begin : begin + count * stride].view(count, stride)[:, :width] = narrow[
                done : done + count
            ]
            first = (len(self._blocks) - 1) * self._size + begin
            self._vectors[place + done : place + done + count] = torch.arange(first, first + count * stride, stride)
            done, self._used = done + count, begin + count * stride

    def packed(self, file: Path, rank: int, num_layers: int) -> AdapterWeights:
        if bool((self._vectors < 0).all()):
            raise ModelLoadError(f"{file} holds no weights")
        blocks = torch.stack(self._blocks)
        digest = blake2b(digest_size=16)
        for part in (self._vectors, blocks):
            digest.update(_bytes(part))
        return AdapterWeights(rank, digest.hexdigest(), blocks, self._vectors.view(num_layers, -1))


def _bytes(tensor: Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()
