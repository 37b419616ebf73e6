"""Tiny models as quantized checkpoints: the folder, and transformers' model with the weights that it represents.

Weights are packed here with shifts and loops, independently of the code that reads them; the real packers' files are
tests/workers/goldens. Every Linear of the decoder blocks is quantized by rounding to nearest; LM head and embedding stay plain.
Hooks quantize activations by formula.

If inputs are rounded, two programs with sums that differ in the last bit may round one of some 10,000 inputs to different
sides, and then differ by a whole step. So a hook of transformers' model asserts that its input equals ours up to the last bit,
takes ours, and rounds it itself: then outputs are equal token for token, and a wrong rounding shows in the next layer.
"""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from quantized_packers import (
    STATIC,
    Tensors,
    awq,
    bnb_int8,
    fp8_blocks,
    fp8_rows,
    fp8_tensor,
    gptq,
    int8_rows,
    mxfp4,
    nf4,
    packed,
    symmetric,
    words,
)
from safetensors.torch import load_file, save_file
from tiny_models import reference, tiny_model

from quire.workers.layers.formats.activations import RoundedInputs
from quire.workers.layers.linear import Linear

LAST_BITS = 1e-4  # of inputs of about 1, after some layers; a step of their rounding is 1/128 of the largest, or 1/16


# ---------------------------------------------------------------------------------------------------------- activations


def int8_tokens(x: torch.Tensor, name: str) -> torch.Tensor:
    s = x.abs().amax(-1, keepdim=True) / 127
    return (x / s).round() * s


def fp8_static(x: torch.Tensor, name: str) -> torch.Tensor:
    s = STATIC[name.split(".")[-1]]
    return (x / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s


def fp8_groups(x: torch.Tensor, name: str, size: int = 24) -> torch.Tensor:
    parts = []
    for part in x.split(size, -1):
        s = part.abs().amax(-1, keepdim=True) / 448
        parts.append((part / s).to(torch.float8_e4m3fn).float() * s)
    return torch.cat(parts, -1)


ZERO = {"q_proj": 3, "k_proj": -7, "v_proj": 0, "o_proj": 11, "gate_proj": -2, "up_proj": 5, "down_proj": -30}


# ------------------------------------------------------------------------------------------------------ --quantization
def fp8_of_blocks(rows: int, columns: int) -> "Pack":
    """0: all of them."""

    def pack(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
        out = torch.empty_like(w)
        for i in range(0, w.shape[0], rows or w.shape[0]):
            for j in range(0, w.shape[1], columns or w.shape[1]):
                part = slice(i, i + (rows or w.shape[0])), slice(j, j + (columns or w.shape[1]))
                s = w[part].abs().max() / 448
                out[part] = (w[part] / s).to(torch.float8_e4m3fn).float() * s
        return {"weight": w}, out

    return pack


def int4_groups(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    out = torch.empty_like(w)
    for i, row in enumerate(w):
        for j in range(0, len(row), 128):
            part = row[j : j + 128]
            low, high = min(part.min().item(), 0.0), max(part.max().item(), 0.0)
            s = torch.tensor((torch.tensor(high) - torch.tensor(low)).item() / 15).bfloat16().float()
            z = (-low / s).round().clamp(0, 15)
            out[i, j : j + 128] = (((part / s).round() + z).clamp(0, 15) - z) * s
    return {"weight": w}, out


# ------------------------------------------------------------------------------------------------------------- formats
def compressed(layout: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def only(pack: "Pack") -> "Pack":
    """The values of a packer for a checkpoint that is not packed."""
    return lambda w, name: ({"weight": w}, pack(w, name)[1])


def int8_static(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    """One scale and zero point a tensor, of weights and of inputs."""
    low, high = w.min(), w.max()
    s = (high - low) / 255
    z = (-128 - low / s).round()
    q = ((w / s).round() + z).clamp(-128, 127)
    kind = name.split(".")[-1]
    inputs = {"input_scale": torch.tensor([STATIC[kind]]), "input_zero_point": torch.tensor([ZERO[kind]], dtype=torch.int8)}
    tensors = {"weight": q.to(torch.int8), "weight_scale": s[None], "weight_zero_point": z.to(torch.int8)[None]}
    return tensors | inputs, (q - z) * s


def int8_static_inputs(x: torch.Tensor, name: str) -> torch.Tensor:
    s, z = STATIC[name.split(".")[-1]], ZERO[name.split(".")[-1]]
    return (((x / s).round() + z).clamp(-128, 127) - z) * s


def packed_in_order(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    """Symmetric; the groups of inputs are out of order, alike where the inputs are the same."""
    g_idx = torch.arange(w.shape[1]) // 16
    g_idx = g_idx[torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(w.shape[1] + ("o_proj" in name)))]
    s = torch.stack([w[:, g_idx == i].abs().amax(1) for i in range(int(g_idx.max()) + 1)], 1) / 7
    q = (w / s[:, g_idx]).round()
    tensors = {"weight_packed": words(q + 8, 4), "weight_scale": s, "weight_g_idx": g_idx.int()}
    return {**tensors, "weight_shape": torch.tensor(w.shape)}, q * s[:, g_idx]


def mixed(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    """In each fused product layers of several formats, one of none."""
    kind = name.split(".")[-1]
    if kind in ("v_proj", "gate_proj"):
        return {"weight": w}, w
    return packed(w, name) if kind in ("q_proj", "down_proj") else fp8_rows(w, name)


def mixed_inputs(x: torch.Tensor, name: str) -> torch.Tensor:
    return fp8_groups(x, name, 1 << 20) if name.split(".")[-1] in ("k_proj", "o_proj", "up_proj") else x


Pack = Callable[[torch.Tensor, str], tuple[Tensors, torch.Tensor]]
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": 32, "sym": False}
# name -> (quantization_config, how a weight is packed, what becomes of a layer's inputs)
FORMATS: dict[str, tuple[dict[str, Any] | None, Pack, Callable[[torch.Tensor, str], torch.Tensor] | None]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        lambda w, name: gptq(w, name, 4, 32, 1, True),
        None,
    ),
    "gptq-v2-8bit": (
        {"quant_method": "gptq", "bits": 8, "group_size": 48, "checkpoint_format": "gptq_v2"},
        lambda w, name: gptq(w, name, 8, 48, 0, False),
        None,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq, None),
    "auto-round": (AUTO_ROUND, lambda w, name: gptq(w, name, 4, 32, 0, False), None),
    "pack-quantized": (
        compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}),
        packed,
        None,
    ),
    "w8a8": (
        compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True},
        ),
        int8_rows,
        int8_tokens,
    ),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor, fp8_static),
    "fp8-block": ({"quant_method": "fp8", "weight_block_size": [48, 24]}, lambda w, name: fp8_blocks(w, 48, 24), fp8_groups),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4, None),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8, None),
    "w8a8-static": (
        compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False},
            {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": False},
        ),
        int8_static,
        int8_static_inputs,
    ),
    "pack-quantized-order": (
        compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16, "actorder": "group"}),
        packed_in_order,
        None,
    ),
    "mixed": (
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "ints": {
                    "targets": ["re:.*q_proj$", "re:.*down_proj$"],
                    "format": "pack-quantized",
                    "weights": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
                },
                "floats": {
                    "targets": ["Linear"],
                    "format": "float-quantized",
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
                },
            },
            "ignore": ["lm_head", "re:.*v_proj", "re:.*gate_proj"],
        },
        mixed,
        mixed_inputs,
    ),
    "gptq-head": (
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True, "lm_head": True, "dynamic": {"-:.*up_proj": {}}},
        lambda w, name: ({"weight": w}, w) if "up_proj" in name else gptq(w, name, 4, 1 << 20, 1, False),
        None,
    ),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}, mxfp4, None),
}
WITH_HEAD = ("gptq-head",)
# --quantization of a checkpoint of floats
WHILE_LOADING: dict[str, tuple[None, Pack, Callable[[torch.Tensor, str], torch.Tensor] | None]] = {
    "fp8": (None, fp8_of_blocks(0, 0), partial(fp8_groups, size=1 << 20)),
    "fp8_per_channel": (None, fp8_of_blocks(1, 0), partial(fp8_groups, size=1 << 20)),
    "fp8_per_block": (None, fp8_of_blocks(128, 128), partial(fp8_groups, size=128)),
    "int8": (None, only(int8_rows), int8_tokens),
    "int8_per_channel_weight_only": (None, only(int8_rows), None),
    "int4": (None, int4_groups, None),
}

# The rest of what a GPU's kernels take as it is.
GPU_FORMATS: dict[str, tuple[dict[str, Any], Pack, Callable[[torch.Tensor, str], torch.Tensor] | None]] = {
    "gptq-8bit": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True, "sym": False},
        lambda w, name: gptq(w, name, 8, 32, 1, True),
        None,
    ),
    "pack-quantized-symmetric": (
        compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": True}),
        lambda w, name: symmetric(w, 64),
        None,
    ),
    "fp8-block-128": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda w, name: fp8_blocks(w, 128, 128),
        partial(fp8_groups, size=128),
    ),
    "fp8-row": (
        compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True},
        ),
        fp8_rows,
        partial(fp8_groups, size=1 << 20),
    ),
    "fp8-weight-only": (
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
        fp8_rows,
        None,
    ),
}


def quantized(name: str, form: str, folder: Path) -> Any:
    """Write `MODELS[name]` in this format to `folder`; returns transformers' model of the same values.

    Its `inputs`, by layer, take the place of the last of its own.
    """
    config, pack, rounded = (FORMATS | WHILE_LOADING | GPU_FORMATS)[form]
    shutil.copytree(tiny_model(name), folder)
    fields = json.loads((folder / "config.json").read_text())
    if config is not None:
        (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    tensors, model = load_file(folder / "model.safetensors"), copy.deepcopy(reference(name))
    for layer, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and (layer != "lm_head" or form in WITH_HEAD):
            found, weight = pack(tensors.pop(f"{layer}.weight"), layer)
            tensors.update({f"{layer}.{part}": tensor.contiguous() for part, tensor in found.items()})
            module.weight.data = weight
            if rounded is not None:
                module.register_forward_pre_hook(partial(_round, model, layer, rounded))
    model.inputs, model.last_bits = {}, LAST_BITS
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def _round(model: Any, layer: str, rounded: Callable[[torch.Tensor, str], torch.Tensor], module: Any, args: Any) -> Any:
    x = args[0]
    if layer in model.inputs:
        ours, bits = model.inputs[layer][None], model.last_bits
        torch.testing.assert_close(ours, x[:, -ours.shape[1] :], rtol=bits, atol=bits, msg=lambda m: f"{layer}: {m}")
        x = torch.cat((x[:, : -ours.shape[1]], ours), 1)
    return rounded(x, layer), *args[1:]


@contextmanager
def inputs_recorded(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """What the layers of one of our models multiply meanwhile, step by step, by their names in the checkpoint."""
    steps: dict[str, list[torch.Tensor]] = {}
    found: dict[str, torch.Tensor] = {}
    multiply = RoundedInputs.product
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            parts = zip(module.format.formats, module.format.outer, strict=True) if hasattr(module.format, "formats") else ()
            for one, outer in (*parts, (module.format, module.outer)):
                layers = one.shard.rows if hasattr(one, "shard") else ()
                names[id(outer)] = [f"{name.rpartition('.')[0]}.{layer}" for layer in layers]

    def product(self: RoundedInputs, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        for layer in names.get(id(self), []):
            steps.setdefault(layer, []).append(x.clone())
        return multiply(self, x, out)

    with mock.patch.object(RoundedInputs, "product", product):
        yield found
    found.update({layer: torch.cat(parts) for layer, parts in steps.items()})
