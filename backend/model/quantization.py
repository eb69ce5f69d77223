"""Quantised checkpoints: the scheme that config.json names, and the stored tensors that make up each weight.

Supported are FP8 (a scale for blocks of a weight, or for its rows), compressed-tensors (FP8 and int8 with scales, and
integers packed into 32 bits), GPTQ (Frantar et al., 2023), AWQ (Lin et al., 2024) and MXFP4 of gpt-oss' experts (OCP
Microscaling Formats, 1.0). Read without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from pathlib import Path

from backend.errors import ModelLoadError
from backend.json_file import JsonFile
from backend.model.tensor_info import TensorInfo

WORD_BITS = 32  # of an integer that several weights are packed into
FLOATS = ("F16", "BF16", "F32")
GROUP_MXFP4 = 32  # numbers that share a power of two


class Scheme(StrEnum):
    """The form in which a weight's numbers are stored."""

    SCALED = "scaled"  # a number for each weight, with scales for blocks
    PACKED = "packed"  # compressed-tensors: packed along a row, offset by half of the range
    GPTQ = "gptq"  # packed along a column; zero points are stored less one
    GPTQ_V2 = "gptq_v2"  # with zero points as they are
    AWQ = "awq"  # packed along a column's neighbours, in AWQ's order
    MXFP4 = "mxfp4"  # floats of 4 bits, 32 of a row with a power of two, of all experts of a layer together


_MARKS = {
    Scheme.SCALED: "weight",
    Scheme.PACKED: "weight_packed",
    Scheme.GPTQ: "qweight",
    Scheme.GPTQ_V2: "qweight",
    Scheme.AWQ: "qweight",
    Scheme.MXFP4: "blocks",
}
"""The stored name by whose last part a quantised weight is known."""

_PARTS = {
    Scheme.SCALED: ("weight_scale", "weight_scale_inv", "weight_zero_point"),
    Scheme.PACKED: ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    Scheme.GPTQ: ("qzeros", "scales", "g_idx"),
    Scheme.GPTQ_V2: ("qzeros", "scales", "g_idx"),
    Scheme.AWQ: ("qzeros", "scales"),
}
_OF_ACTIVATIONS = (".input_scale", ".input_zero_point", ".k_scale", ".v_scale", ".q_scale")
"""Tensors that quantise activations and cached keys, which are computed unquantised here."""

_COMPRESSED = {
    "float-quantized": Scheme.SCALED,
    "int-quantized": Scheme.SCALED,
    "naive-quantized": Scheme.SCALED,
    "pack-quantized": Scheme.PACKED,
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The scheme of a checkpoint."""

    scheme: Scheme
    bits: int  # of a weight
    block: tuple[int, int] | None = None  # rows and columns that share a scale; None: as the scale's shape says


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """One weight [rows, columns] in its stored parts, by their last names; in MXFP4 the rows of all experts."""

    quantization: Quantization
    rows: int
    columns: int
    parts: Mapping[str, TensorInfo]

    @property
    def stored(self) -> TensorInfo:
        """The part that holds the numbers."""
        return self.parts[_MARKS[self.quantization.scheme]]


def read_quantization(directory: Path) -> Quantization | None:
    """Read the scheme from config.json; None if the checkpoint is not quantised, or has no config.json. Raises
    `ModelLoadError` naming the key and what is supported.
    """
    path, said = directory / "config.json", None
    if path.is_file():
        config = JsonFile.read(path)
        said = config.nested("quantization_config") or config.nested("compression_config")
    if said is None:
        return None
    method = said.get("quant_method") or ("compressed-tensors" if said.get("config_groups") is not None else None)
    match method:
        case "fp8":
            return Quantization(Scheme.SCALED, 8, _block(said, "weight_block_size"))
        case "gptq":
            return _gptq(said)
        case "awq":
            if said.get("version") not in (None, "gemm", "GEMM") or said.integer("bits", default=4) != 4:
                raise said.wrong("version", "AWQ's gemm layout of 4 bits is supported")
            return Quantization(Scheme.AWQ, 4)
        case "compressed-tensors":
            return _compressed(said)
        case "mxfp4":
            return Quantization(Scheme.MXFP4, 4)
    raise said.wrong("quant_method", "fp8, gptq, awq, compressed-tensors and mxfp4 are supported")


def _gptq(said: JsonFile) -> Quantization:
    bits = said.integer("bits")
    if bits not in (2, 4, 8):
        raise said.wrong("bits", "2, 4 and 8 are supported")
    schemes = {None: Scheme.GPTQ, "gptq": Scheme.GPTQ, "gptq_v2": Scheme.GPTQ_V2}
    layout = said.get("checkpoint_format")
    if layout not in [*schemes]:
        raise said.wrong("checkpoint_format", "gptq and gptq_v2 are supported")
    return Quantization(schemes[layout], bits)


def _compressed(said: JsonFile) -> Quantization:
    scheme = _COMPRESSED.get(str(said.get("format")))
    if scheme is None:
        raise said.wrong("format", f"{', '.join(_COMPRESSED)} are supported")
    sparsity = said.nested("sparsity_config")
    if sparsity is not None and sparsity.get("format") not in (None, "dense"):
        raise sparsity.wrong("format", "only dense is supported")
    groups = said.nested("config_groups")
    if groups is None:
        raise said.wrong("config_groups", "an object with the scheme of the weights is expected")
    found = set[Quantization]()
    for name in groups.values:
        group = groups.nested(name)
        weights = None if group is None else group.nested("weights")
        if weights is not None:
            bits = weights.integer("num_bits", below=9)
            found.add(Quantization(scheme, bits, _block(weights, "block_structure")))
    if len(found) != 1:
        raise said.wrong("config_groups", "weights with one scheme for all are expected")
    return found.pop()


def _block(said: JsonFile, key: str) -> tuple[int, int] | None:
    value = said.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) is int and one > 0 for one in value):
        raise said.wrong(key, "the rows and columns of a block are expected")
    return value[0], value[1]


def combined(
    stored: Mapping[str, TensorInfo], quantization: Quantization
) -> tuple[dict[str, TensorInfo], dict[str, QuantizedWeight]]:
    """Return the checkpoint's tensors with each quantised weight as one `….weight`, and those weights by name.

    A dequantised weight has the type of most plain tensors. Raises `ModelLoadError` for parts that do not fit.
    """
    if quantization.scheme is Scheme.MXFP4:
        return _microscaled(stored, quantization)
    mark, wanted = _MARKS[quantization.scheme], _PARTS[quantization.scheme]
    plain = {name: info for name, info in stored.items() if not name.endswith(_OF_ACTIVATIONS)}
    weights: dict[str, QuantizedWeight] = {}
    for name in [name for name in plain if name.endswith(f".{mark}")]:
        info, base = plain[name], name.removesuffix(mark)
        if quantization.scheme is Scheme.SCALED and info.dtype in (*FLOATS, "F64"):
            continue  # a layer that was left as it was
        del plain[name]
        if f"{base}weight" in plain:
            raise _unfit(info, f"{base}weight is stored beside it, and one of them is expected")
        parts = {mark: info} | {part: plain.pop(base + part) for part in wanted if base + part in plain}
        weights[f"{base}weight"] = _checked(info, quantization, parts)
    dtypes = [info.dtype for info in plain.values() if info.dtype in FLOATS]
    dtype = max(set(dtypes), key=dtypes.count, default="F32")
    whole = {
        name: TensorInfo(one.stored.shard, one.stored.stored_as, (one.rows, one.columns), dtype)
        for name, one in weights.items()
    }
    return plain | whole, weights


def _microscaled(
    stored: Mapping[str, TensorInfo], quantization: Quantization
) -> tuple[dict[str, TensorInfo], dict[str, QuantizedWeight]]:
    """Return what `combined` returns for blocks [experts, outputs, groups, 16] with two numbers a byte: weights of
    shape [experts, inputs, outputs], under the name before `_blocks`.
    """
    plain, weights = dict(stored), dict[str, QuantizedWeight]()
    for name in [name for name in stored if name.endswith("_blocks")]:
        base = name.removesuffix("_blocks")
        parts = {part: plain.pop(f"{base}_{part}") for part in ("blocks", "scales") if f"{base}_{part}" in plain}
        info = parts["blocks"]
        if len(info.shape) != 4 or 0 in info.shape:
            raise _unfit(info, "four dimensions of at least 1 are expected")
        experts, outputs, groups, _ = info.shape
        _expect(info, ("U8",), (experts, outputs, groups, GROUP_MXFP4 // 2))
        _expect(_required(parts, info, "scales"), ("U8",), (experts, outputs, groups))
        weights[base] = QuantizedWeight(quantization, experts * outputs, groups * GROUP_MXFP4, parts)
        plain[base] = TensorInfo(info.shard, info.stored_as, (experts, groups * GROUP_MXFP4, outputs), "BF16")
    return plain, weights


def _checked(info: TensorInfo, quantization: Quantization, parts: Mapping[str, TensorInfo]) -> QuantizedWeight:
    """Return the weight of these parts, if their types and shapes fit together."""
    if len(info.shape) != 2 or 0 in info.shape:
        raise _unfit(info, "two dimensions of at least 1 are expected")
    per_word = WORD_BITS // quantization.bits
    first, second = info.shape
    match quantization.scheme:
        case Scheme.SCALED:
            weight = QuantizedWeight(quantization, first, second, parts)
            _expect(info, ("F8_E4M3", "I8"), info.shape)
            _check_scales(weight, _scale_of(weight))
        case Scheme.PACKED:
            shape = _required(parts, info, "weight_shape")
            if shape.values is None or len(shape.values) != 2:
                raise _unfit(shape, "the rows and columns of the weight are expected")
            weight = QuantizedWeight(quantization, *shape.values, parts)
            _expect(info, ("I32",), (weight.rows, ceil(weight.columns / per_word)))
            _check_scales(weight, _scale_of(weight))
        case Scheme.AWQ:
            weight = QuantizedWeight(quantization, per_word * second, first, parts)
            _expect(info, ("I32",), info.shape)
        case _:
            weight = QuantizedWeight(quantization, second, per_word * first, parts)
            _expect(info, ("I32",), info.shape)
    if quantization.scheme in (Scheme.GPTQ, Scheme.GPTQ_V2, Scheme.AWQ):
        _check_groups(weight, per_word)
    for part in ("g_idx", "weight_g_idx"):
        if part in parts:
            _expect(parts[part], ("I32", "I64"), (weight.columns,))
    return weight


def _check_groups(weight: QuantizedWeight, per_word: int) -> None:
    """Check the scales and zero points of GPTQ and AWQ: [groups, rows]."""
    parts, info = weight.parts, weight.stored
    scales, zeros = (_required(parts, info, part) for part in ("scales", "qzeros"))
    groups = scales.shape[0] if scales.shape else 0
    if weight.rows % per_word:
        raise _unfit(info, f"rows of the weight in words of {per_word} are expected, for the zero points")
    _expect(scales, FLOATS, (groups, weight.rows))
    _expect(zeros, ("I32",), (groups, weight.rows // per_word))
    if not groups or ("g_idx" not in parts and weight.columns % groups):
        raise _unfit(scales, f"groups of equal size of {weight.columns} columns are expected")


def scale_block(weight: QuantizedWeight, scale: TensorInfo) -> tuple[int, int] | None:
    """Return the rows and columns of `weight` that share a number of `scale`; None if its shape fits none."""
    rows, columns, block = weight.rows, weight.columns, weight.quantization.block
    if len(scale.shape) > 2:
        return None
    shape = (*scale.shape, 1, 1)[:2]
    if block is not None and shape == (ceil(rows / block[0]), ceil(columns / block[1])):
        return block
    if shape[0] in (1, rows) and shape[1] and columns % shape[1] == 0:
        return rows // shape[0], columns // shape[1]
    return None


def _scale_of(weight: QuantizedWeight) -> TensorInfo:
    inverse = weight.parts.get("weight_scale_inv")
    if inverse is None:
        return _required(weight.parts, weight.stored, "weight_scale")
    if "weight_scale" in weight.parts:
        raise _unfit(inverse, "weight_scale is stored beside it, and one of them is expected")
    return inverse


def _check_scales(weight: QuantizedWeight, scale: TensorInfo) -> None:
    if scale.dtype not in FLOATS:
        raise _unfit(scale, f"{', '.join(FLOATS)} are supported")
    if scale_block(weight, scale) is None:
        raise _unfit(scale, f"scales for equal parts of [{weight.rows}, {weight.columns}] are expected")
    zero = weight.parts.get("weight_zero_point")
    if zero is None:
        return
    if weight.quantization.scheme is Scheme.SCALED:
        _expect(zero, ("I8",), scale.shape)
    else:
        if len(scale.shape) != 2:
            raise _unfit(scale, "two dimensions are expected")
        per_word = WORD_BITS // weight.quantization.bits
        _expect(zero, ("I32",), (ceil(scale.shape[0] / per_word), *scale.shape[1:]))


def _required(parts: Mapping[str, TensorInfo], info: TensorInfo, part: str) -> TensorInfo:
    if part not in parts:
        raise ModelLoadError(f"{info.shard}: {info.stored_as} is stored without its {part}; download it again")
    return parts[part]


def _expect(info: TensorInfo, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if info.dtype not in dtypes:
        raise _unfit(info, f"{' or '.join(dtypes)} is expected")
    if info.shape != shape:
        raise _unfit(info, f"{list(shape)} is expected")


def _unfit(info: TensorInfo, expected: str) -> ModelLoadError:
    return ModelLoadError(f"{info.shard}: {info.stored_as} is {info.dtype} of shape {list(info.shape)}; {expected}")
