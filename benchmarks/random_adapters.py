"""Folders of LoRA adapters with random values, for a Llama or Qwen3 of which only config.json is needed. adapters_serving.py.

The first `distinct` folders have files of their own, and the others hard links to these. To an engine an adapter is a folder's
name, so each is read, kept in host memory and put into a slot for itself; only the page cache holds few files.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """[out, in] of the linear layers of a Llama's or Qwen3's blocks."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, (config.get("num_key_value_heads") or heads) * size
    block = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"model.layers.{i}.{name}": shape for i in range(config["num_hidden_layers"]) for name, shape in block.items()}


class Adapters:
    """Writes adapters' folders below `root`."""

    def __init__(self, root: Path, model: Path, rank: int, distinct: int) -> None:
        self.root, self._rank, self._distinct = root, rank, distinct
        header, at = {}, 0
        for layer, (out, size) in shapes_of(json.loads((model / "config.json").read_text())).items():
            for half, shape in (("A", [rank, size]), ("B", [out, rank])):
                end = at + 2 * shape[0] * shape[1]
                name = f"base_model.model.{layer}.lora_{half}.weight"
                header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
                at = end
        text = json.dumps(header).encode()
        self._header = text + b" " * (-len(text) % 8)
        values = np.random.default_rng(0).standard_normal(at // 2, np.float32) * np.float32(0.02)
        self._values = (values.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16
        self._files: list[Path] = []

    @property
    def megabytes(self) -> float:
        return self._values.nbytes / 1e6

    def write(self, name: str, **config: Any) -> str:
        """Write the adapter of this name; returns the name."""
        folder = self.root / name
        folder.mkdir()
        fields = {"peft_type": "LORA", "r": self._rank, "lora_alpha": 2 * self._rank, **config}
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        file = folder / "adapter_model.safetensors"
        if len(self._files) < self._distinct:
            with file.open("wb") as opened:
                opened.write(len(self._header).to_bytes(8, "little") + self._header)
                np.roll(self._values, 7919 * len(self._files)).tofile(opened)
            self._files.append(file)
        else:
            os.link(self._files[int(re.sub(r"\D", "", name) or 0) % self._distinct], file)
        return name
