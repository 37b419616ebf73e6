"""Writes the golden files beside it with the real packers' own code: run by hand, where they are installed or unpacked.

    python make_goldens.py GPTQMODEL AUTOAWQ AUTO_ROUND_FOLDER     (folders of unpacked sources; the others are imported)

Versions that wrote what is here: GPTQModel 7.7.0, AutoAWQ 0.2.9, auto-round 0.16.1, compressed-tensors 0.20.0, bitsandbytes
0.50.2, transformers 5.23.0. Of packages that want a GPU the module with the packing code is loaded alone, and what
it imports beside torch is replaced. A golden is a case of a few hundred weights: `<case>/<tensor>` as in a checkpoint, and
`<case>/expected`, float32 [N, K], the packer's input or its own dequantization. Shapes are uneven.
"""

import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent


class Found(dict):
    """Tensors by case."""

    def add(self, case, expected, **tensors):
        for name, tensor in {**tensors, "expected": expected.float()}.items():
            self[f"{case}/{name}"] = tensor.detach().clone().contiguous()


def namespaces(root, *names):
    """Packages without what their __init__ does."""
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = [str(Path(root, *name.split(".")))]
        sys.modules[name] = module


def made(n, k, g, bits, seed, permuted=False):
    """Integers, zero points, scales and each input's group, of which the packers make their tensors; zero points reach 0."""
    torch.manual_seed(seed)
    groups = -(-k // g)
    q, z = torch.randint(0, 1 << bits, (n, k)), torch.randint(0, 1 << bits, (n, groups))
    z[0, 0], z[-1, -1] = 0, (1 << bits) - 1
    s = torch.randint(1, 64, (n, groups)) / 1024  # exact in half precision
    g_idx = torch.arange(k) // g
    if permuted:
        g_idx = g_idx[torch.randperm(k)]
    return q, z, s, g_idx, (q - z[:, g_idx]) * s[:, g_idx]


def gptq(root):
    namespaces(root, "gptqmodel", "gptqmodel.nn_modules")
    for name in ("adapter", "models", "quantization", "utils"):
        sys.modules[f"gptqmodel.{name}"] = MagicMock()
    for name in (
        "adapter.adapter", "models._const", "utils.backend", "utils.env", "utils.logger", "utils.planar_packing", "utils.safe",
        "utils.torch", "utils.rocm", "utils.cuda", "utils.looper_helpers", "utils.safetensor", "utils.python", "utils.device",
    ):  # fmt: skip
        sys.modules[f"gptqmodel.{name}"] = MagicMock()
    from gptqmodel.nn_modules.qlinear import PackableQuantLinear

    found = Found()
    for case, (n, k, g, bits, permuted) in {
        "g32-ragged": (16, 40, 32, 4, False), "g16-order": (8, 48, 16, 4, True), "whole-8bit": (12, 20, 20, 8, False),
        "g8-8bit-order": (4, 24, 8, 8, True),
    }.items():  # fmt: skip
        _, z, s, g_idx, weight = made(n, k, g, bits, len(case), permuted)
        layer = torch.nn.Module()
        layer.bits, layer.maxq, layer.pack_dtype_bits, layer.pack_factor = bits, (1 << bits) - 1, 32, 32 // bits
        layer.pack_np_math_dtype, layer.pack_np_dtype, layer.planar = "uint32", "int32", False
        linear = torch.nn.Linear(k, n, bias=False)
        linear.weight.data = weight.float()
        PackableQuantLinear.pack_original(layer, linear, s.float(), z.float(), g_idx.int())
        tensors = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
        found.add(f"gptq_v2-{case}", weight, **tensors)
        # gptqmodel.utils.model.convert_gptq_v2_to_v1_format_module, which is this one subtraction of words
        tensors["qzeros"] = tensors["qzeros"] - (0x11111111 if bits == 4 else 0x01010101)
        found.add(f"gptq-{case}", weight, **tensors)
    save_file(found, HERE / "gptqmodel.safetensors")


def awq(root):
    namespaces(root, "awq", "awq.utils", "awq.modules", "awq.modules.linear")
    for name in ("awq.utils.utils", "awq.utils.packing_utils", "awq.utils.module"):
        sys.modules[name] = MagicMock(get_best_device=lambda: "cpu", try_import=lambda name: (None, ""))
    from awq.modules.linear.gemm import WQLinear_GEMM

    found = Found()
    for case, (n, k, g) in {"g16": (32, 48, 16), "whole": (64, 20, 20)}.items():
        _, z, s, _, weight = made(n, k, g, 4, len(case))
        linear = torch.nn.Linear(k, n, bias=False)
        linear.weight.data = weight.float()
        layer = WQLinear_GEMM.from_linear(linear, 4, g, scales=s.t().contiguous().half(), zeros=z.t().contiguous())
        found.add(case, weight, qweight=layer.qweight, qzeros=layer.qzeros, scales=layer.scales)
    save_file(found, HERE / "autoawq.safetensors")


def auto_round(root):
    namespaces(root, "auto_round_extension", "auto_round_extension.torch")
    utils = MagicMock(get_packing_device=lambda device=None: "cpu")
    for name in ("auto_round", "auto_round.utils", "auto_round.logger", "auto_round.utils.bit_packing", "auto_round.export"):
        sys.modules[name] = utils
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    found = Found()
    for case, module in {"auto_round": qlinear_torch, "auto_round:auto_gptq": qlinear_torch_zp}.items():
        q, z, s, _, weight = made(32, 64, 16, 4, len(case))
        z = z.clamp(min=1)
        weight = (q - z.repeat_interleave(16, 1)) * s.repeat_interleave(16, 1)
        linear = torch.nn.Linear(64, 32, bias=False)
        linear.weight.data = weight.float()
        layer = module.QuantLinear.__new__(module.QuantLinear)
        torch.nn.Module.__init__(layer)
        layer.bits, layer.group_size, layer.maxq, layer.device = 4, 16, 15, "cpu"
        layer.qweight = layer.qzeros = layer.scales = None
        layer.pack_248_bits(linear, s.float(), z.int())
        found.add(case, weight, qweight=layer.qweight, qzeros=layer.qzeros, scales=layer.scales)
    save_file(found, HERE / "auto_round.safetensors")


def compressed_tensors():
    from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    found = Found()

    def pack(case, compressor, n, k, grid, dtype=torch.float32, **args):
        torch.manual_seed(len(case))
        weights = QuantizationArgs(**args)
        state = {"weight": torch.randn(n, k, dtype=dtype), "weight_scale": torch.randint(20, 64, grid).to(dtype) / 256}
        half = 1 << weights.num_bits - 1
        if not weights.symmetric:
            state["weight_zero_point"] = torch.randint(-half, half, grid, dtype=torch.int8)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        packed = compressor.compress(dict(state), scheme)
        expected = compressor.decompress(dict(packed), scheme)["weight"]
        found.add(case, expected, **packed)

    packed, naive = PackedQuantizationCompressor, NaiveQuantizationCompressor
    group = {"num_bits": 4, "strategy": "group", "group_size": 20}
    pack("pack-group", packed, 12, 60, (12, 3), **group)
    pack("pack-group-asym", packed, 13, 60, (13, 3), symmetric=False, **group)
    pack("pack-channel", packed, 11, 44, (11, 1), num_bits=4, strategy="channel")
    pack("pack-channel-8bit-asym", packed, 7, 22, (7, 1), num_bits=8, strategy="channel", symmetric=False)
    pack("int-channel", naive, 9, 21, (9, 1), num_bits=8, strategy="channel")
    pack("int-tensor-asym", naive, 9, 21, (1,), num_bits=8, strategy="tensor", symmetric=False)
    pack("float-tensor", naive, 9, 21, (1,), num_bits=8, type="float", strategy="tensor")
    pack("float-channel", naive, 9, 21, (9, 1), num_bits=8, type="float", strategy="channel")
    pack("float-block", naive, 40, 24, (3, 2), num_bits=8, type="float", strategy="block", block_structure=[16, 16])
    # actorder "group" is no longer written by this version: its packing, the layout as documented by older ones
    q, z, s, g_idx, _ = made(12, 60, 20, 4, 1, permuted=True)
    q, z = (q - 8).to(torch.int8), (z - 8).to(torch.int8)
    found.add(
        "pack-group-order",
        (q - z.int()[:, g_idx]) * s[:, g_idx],
        weight_packed=pack_to_int32(q, 4),
        weight_zero_point=pack_to_int32(z, 4, packed_dim=0),
        weight_scale=s,
        weight_g_idx=g_idx.int(),
        weight_shape=torch.tensor([12, 60]),
    )
    save_file(found, HERE / "compressed_tensors.safetensors")


def bitsandbytes():
    from bitsandbytes import functional

    found = Found()
    for case, (n, k, nested) in {"nf4": (6, 22, False), "nf4-nested": (12, 160, True), "fp4": (5, 13, False), "fp4-nested": (6, 64, True)}.items():  # fmt: skip  # noqa: E501
        torch.manual_seed(len(case))
        quant_type = case.removesuffix("-nested")
        packed, state = functional.quantize_4bit(
            torch.randn(n, k), quant_type=quant_type, compress_statistics=nested, blocksize=64
        )
        tensors = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        found.add(case, functional.dequantize_4bit(packed, state), weight=packed, **tensors)
    torch.manual_seed(5)
    weight, scb, _ = functional.int8_vectorwise_quant(torch.randn(7, 10).half())
    expected = functional.int8_vectorwise_dequant(weight, scb)
    found.add("int8", expected, weight=weight, SCB=scb, weight_format=torch.tensor(0, dtype=torch.uint8))
    save_file(found, HERE / "bitsandbytes.safetensors")


def transformers():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    found = Found()
    for case, (block, scale_fmt) in {
        "block": ([16, 8], "float"),
        "block-ue8m0": ([16, 8], "ue8m0"),
        "tensor": (None, "float"),
    }.items():
        torch.manual_seed(len(case))
        config = types.SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
        quantizer = types.SimpleNamespace(quantization_config=config)
        tensors = Fp8Quantize(quantizer).convert({"weight": torch.randn(32, 24)})
        expected = Fp8Dequantize(quantizer)._dequantize_one(tensors["weight"], tensors["weight_scale_inv"], torch.float32)
        found.add(case, expected, **tensors)
    save_file(found, HERE / "transformers.safetensors")


def mxfp4():
    """Codes packed by compressed-tensors; as gpt-oss has them, they are read by transformers."""
    from compressed_tensors.compressors import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found = Found()
    torch.manual_seed(7)
    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": torch.randn(6, 96, dtype=torch.bfloat16), "weight_scale": 2.0 ** torch.randint(-9, 1, (6, 3))}
    packed = MXFP4PackedCompressor.compress(dict(state), scheme)
    found.add("packed", MXFP4PackedCompressor.decompress(dict(packed), scheme)["weight"], **packed)
    blocks, scales = torch.randint(0, 256, (5, 2, 16), dtype=torch.uint8), torch.randint(0, 200, (5, 2), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t()
    found.add("blocks", expected, weight_blocks=blocks, weight_scales=scales)
    save_file(found, HERE / "mxfp4.safetensors")


if __name__ == "__main__":
    gptq(sys.argv[1])
    awq(sys.argv[2])
    auto_round(sys.argv[3])
    compressed_tensors()
    bitsandbytes()
    transformers()
    mxfp4()
