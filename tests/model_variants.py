"""Models like the embedded one, with its layers in another order or fewer of them: each answers otherwise."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

EMBEDDED = Path("backend/embedded")


def make_variant(folder: Path, layers: Sequence[int]) -> Path:
    """Save the embedded model with these of its six layers, in this order."""
    folder.mkdir()
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    config = json.loads((EMBEDDED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(layers)}))
    tensors = load_file(EMBEDDED / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}
    for place, layer in enumerate(layers):
        begin = f"model.layers.{layer}."
        for name, tensor in tensors.items():
            if name.startswith(begin):
                kept[f"model.layers.{place}.{name.removeprefix(begin)}"] = tensor.clone()
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder
