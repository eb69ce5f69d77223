"""Writes a GGUF file anew with its matrices in another format, in the environment of llama.cpp:

python -m labs.benchmarks.peers.requantize SOURCE.gguf Q8_0 TARGET.gguf
"""

import sys
from pathlib import Path

import gguf
from gguf.quants import dequantize, quantize


def requantize(source: Path, kind: gguf.GGMLQuantizationType, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        data, form = tensor.data, tensor.tensor_type
        if len(tensor.shape) == 2 and form is not kind:
            data, form = quantize(dequantize(data, form), kind), kind
        writer.add_tensor(tensor.name, data, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    requantize(Path(sys.argv[1]), gguf.GGMLQuantizationType[sys.argv[2]], Path(sys.argv[3]))
