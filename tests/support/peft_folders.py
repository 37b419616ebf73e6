"""LoRA adapters for tests: PEFT folders with random weights for a checkpoint, and the checkpoint with one merged into it."""

import json
import math
import re
import shutil

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def shapes_of(model_dir) -> dict[str, list[int]]:
    """The shapes of a checkpoint's tensors."""
    found = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    return found


def write_adapter(
    folder, model_dir, targets=LINEAR, *, rank=4, alpha=8, seed=0, std=0.2, dtype=torch.float32, ranks=None, only=None, **config
):
    """Write an adapter of all layers of these names. ranks: of some, by the end of their names; only: a regex of layers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes_of(model_dir).items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] not in targets or len(shape) != 2 or (only and not re.search(only, layer)):
            continue
        r = next((n for end, n in (ranks or {}).items() if layer.endswith(end)), rank)
        (out, size), is_table = shape, layer.endswith("embed_tokens")
        a, b = (
            torch.randn(s, generator=generator) * std for s in ((r, out if is_table else size), (size if is_table else out, r))
        )
        kinds = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
        tensors |= {f"base_model.model.{layer}.{kind}": t.to(dtype) for kind, t in zip(kinds, (a, b), strict=True)}
    assert tensors, f"no layer of the checkpoint is one of {targets}"
    return write_folder(folder, tensors, r=rank, lora_alpha=alpha, rank_pattern=ranks or {}, **config)


def write_folder(folder, tensors, **config):
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "peft_version": "0.21.2", "r": 4, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(
        {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def merge(model_dir, adapter, into):
    """A checkpoint like model_dir, with W + scale * B A in place of each W that the adapter changes."""
    shutil.copytree(model_dir, into)
    fields = json.loads((adapter / "adapter_config.json").read_text())
    parts = load_file(adapter / "adapter_model.safetensors")
    deltas = {}
    for name in [name for name in parts if re.search(r"lora_(embedding_)?A", name)]:
        a, b = parts[name].float(), parts[re.sub(r"lora_(embedding_)?A", r"lora_\1B", name)].float()
        layer = re.sub(r"\.lora_(embedding_)?A.*", "", name.removeprefix("base_model.model."))
        alpha = next(
            (v for k, v in fields.get("alpha_pattern", {}).items() if re.match(rf"(.*\.)?({k})$", layer)), fields["lora_alpha"]
        )
        scale = alpha / (math.sqrt(len(a)) if fields.get("use_rslora") else len(a))
        delta = scale * b @ a
        deltas[f"{layer}.weight"] = delta.T if "embedding" in name else delta
    for file in into.glob("*.safetensors"):
        tensors = load_file(file)
        for name in deltas.keys() & tensors.keys():
            tensors[name] = (tensors[name].float() + deltas.pop(name)).to(tensors[name].dtype)
        save_file(tensors, file, {"format": "pt"})
    assert not deltas, f"the checkpoint lacks {list(deltas)}"
    return into
