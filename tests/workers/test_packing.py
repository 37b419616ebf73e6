"""Every layout against what the real packers wrote (goldens/): unpacked, the values are theirs exactly."""

import functools
from pathlib import Path

import pytest
import torch
from quantized_packers import words
from safetensors.torch import load_file

from quire.workers.loading.quantized import packing
from quire.workers.loading.quantized.packed_weight import packing_of
from quire.workers.loading.quantized.packing import ANY
from quire.workers.loading.quantized.packing_words import GptqPacking, PackQuantizedPacking, unpack_words
from quire.workers.loading.quantized.schemes import (
    Awq,
    FourBitCodes,
    Gptq,
    MxFp4,
    PackQuantized,
    QuantizationError,
    RowInt8,
    Scaled,
)

GOLDENS = Path(__file__).parent / "goldens"
DTYPES = {
    torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.uint8: "U8", torch.float32: "F32", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
BLOCKS = {"dtype": "fp8", "scale_names": ("weight_scale_inv", "weight_scale")}
CASES = {
    "gptqmodel": {
        f"{version}-{case}": Gptq(bits=bits, group_size=g, desc_act=order, zeros_less_one=version == "gptq")
        for version in ("gptq", "gptq_v2")
        for case, bits, g, order in (
            ("g32-ragged", 4, 32, False), ("g16-order", 4, 16, True),
            ("whole-8bit", 8, 0, False), ("g8-8bit-order", 8, 8, True),
        )
    },
    "autoawq": {"g16": Awq(group_size=16), "whole": Awq(group_size=0)},
    "auto_round": {
        "auto_round": Gptq(bits=4, group_size=16, zeros_less_one=False),
        "auto_round:auto_gptq": Gptq(bits=4, group_size=16),
    },
    "compressed_tensors": {
        "pack-group": PackQuantized(bits=4, group_size=20),
        "pack-group-asym": PackQuantized(bits=4, group_size=20, is_symmetric=False),
        "pack-group-order": PackQuantized(bits=4, group_size=20, is_symmetric=False, has_order=True),
        "pack-channel": PackQuantized(bits=4, group_size=0),
        "pack-channel-8bit-asym": PackQuantized(bits=8, group_size=0, is_symmetric=False),
        "int-channel": Scaled(dtype="int8", block=(1, 0)),
        "int-tensor-asym": Scaled(dtype="int8", block=(0, 0), is_symmetric=False),
        "float-tensor": Scaled(dtype="fp8", block=(0, 0)),
        "float-channel": Scaled(dtype="fp8", block=(1, 0)),
        "float-block": Scaled(dtype="fp8", block=(16, 16)),
    },
    "bitsandbytes": {
        "nf4": FourBitCodes(quant_type="nf4", is_nested=False),
        "nf4-nested": FourBitCodes(quant_type="nf4", is_nested=True),
        "fp4": FourBitCodes(quant_type="fp4", is_nested=False),
        "fp4-nested": FourBitCodes(quant_type="fp4", is_nested=True),
        "int8": RowInt8(),
    },
    "transformers": {
        "block": Scaled(block=(16, 8), **BLOCKS),
        "block-ue8m0": Scaled(block=(16, 8), **BLOCKS),
        "tensor": Scaled(block=(0, 0), **BLOCKS),
    },
    "mxfp4": {
        "blocks": MxFp4(),
        "packed": MxFp4(codes_name="weight_packed", scales_name="weight_scale"),
    },
}  # fmt: skip
ALL = [(packer, case) for packer, cases in CASES.items() for case in cases]


@functools.cache
def golden_file(packer):
    return load_file(GOLDENS / f"{packer}.safetensors")


def golden(packer, case):
    """(tensors as in a checkpoint, expected weight)."""
    tensors = {name.split("/")[1]: t for name, t in golden_file(packer).items() if name.startswith(f"{case}/")}
    return tensors, tensors.pop("expected")


def golden_packing(packer, case, expected):
    return packing_of(CASES[packer][case], "layer", *expected.shape)


def dequantized(found, tensors, rows=slice(None), columns=slice(None)):
    out = torch.empty(found.n, found.k)[rows, columns]
    found.dequantize_into(tensors, out, rows, columns)
    return out


def fits(shape, expected):
    return len(shape) == len(expected) and all(e in (ANY, n) for n, e in zip(shape, expected, strict=True))


@pytest.mark.parametrize(("packer", "case"), ALL)
def test_a_golden_has_the_tensors_that_its_layout_asks_for(packer, case):
    tensors, expected = golden(packer, case)
    stored = golden_packing(packer, case, expected).tensor_specs()
    assert tensors.keys() <= stored.keys()
    for name, wanted in stored.items():
        if name in tensors:
            assert any(fits(tensors[name].shape, shape) for shape in wanted.shapes), name
            assert DTYPES[tensors[name].dtype] in wanted.dtypes, name
        else:
            assert wanted.is_optional or any(other in tensors for other in wanted.instead), name


@pytest.mark.parametrize(("packer", "case"), ALL)
def test_values_are_the_packers_own(packer, case):
    tensors, expected = golden(packer, case)
    got = dequantized(golden_packing(packer, case, expected), tensors)
    if case == "int8":  # bitsandbytes multiplies by a rounded 1 / 127
        torch.testing.assert_close(got, expected, rtol=2e-7, atol=0)
    else:
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("packer", "case"), ALL)
def test_a_part_is_the_same_as_of_the_whole(packer, case, monkeypatch):
    """Whatever rows are worked on at once; blocks of rows end elsewhere."""
    tensors, expected = golden(packer, case)
    whole = dequantized(golden_packing(packer, case, expected), tensors)
    monkeypatch.setattr(packing, "CPU_STRETCH", 3 * expected.shape[1])
    rows, columns = slice(2, expected.shape[0] - 1), slice(5, expected.shape[1] - 3)
    part = dequantized(golden_packing(packer, case, expected), tensors, rows, columns)
    assert torch.equal(part, whole[rows, columns])


def test_every_golden_is_read():
    found = {(packer, name.split("/")[0]) for packer in CASES for name in golden_file(packer)}
    assert found == set(ALL)


# ------------------------------------------------------------------------------------------ what only values can say
def test_a_zero_point_of_zero_borrows_from_no_other():
    """GPTQ stores z - 1 of whole words: one that is 0 leaves 15 and takes 1 from the next."""
    z = torch.tensor([0, 5, 0, 0, 15, 1, 0, 7])
    word = sum(int(value) << 4 * i for i, value in enumerate(z)) - 0x11111111
    tensors = {
        "qweight": torch.zeros(1, 8, dtype=torch.int32),
        "qzeros": torch.tensor([[word]], dtype=torch.int64).to(torch.int32),
        "scales": torch.ones(1, 8),
    }
    found = GptqPacking(Gptq(bits=4, group_size=0), "layer", 8, 8).unpacked(tensors)
    assert torch.equal(found.zeros[:, 0], z.to(torch.int32))


def test_an_order_of_zeros_is_none_where_inputs_have_none():
    tensors, expected = golden("gptqmodel", "gptq-g32-ragged")
    tensors["g_idx"] = torch.zeros_like(tensors["g_idx"])
    assert torch.equal(dequantized(golden_packing("gptqmodel", "gptq-g32-ragged", expected), tensors), expected)
    del tensors["g_idx"]
    assert torch.equal(dequantized(golden_packing("gptqmodel", "gptq-g32-ragged", expected), tensors), expected)


def test_groups_of_other_sizes_are_refused():
    tensors, expected = golden("gptqmodel", "gptq-g16-order")
    tensors["g_idx"][:] = 1
    with pytest.raises(ValueError, match="16 inputs"):
        dequantized(golden_packing("gptqmodel", "gptq-g16-order", expected), tensors)


@pytest.mark.parametrize(
    ("change", "said"),
    [(b'{"a": 1}', "quant_state says"), (b"[]", "not a JSON object"), (b'{"shape": [6, 22]}', "blocksize"),
     (b'{"shape": [6, 22], "blocksize": 32}', "need 5 scales"), (b"\xff", "codec")],
)  # fmt: skip
def test_a_quant_state_that_contradicts_its_layer_is_refused(change, said):
    tensors, expected = golden("bitsandbytes", "nf4")
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(change), dtype=torch.uint8)
    with pytest.raises(ValueError, match=said):
        dequantized(golden_packing("bitsandbytes", "nf4", expected), tensors)


@pytest.mark.parametrize(
    ("scheme", "n", "k", "said"),
    [(Gptq(bits=4, group_size=32), 12, 64, "layer has 12 outputs"), (Awq(group_size=32), 16, 40, "layer has 40 inputs"),
     (Awq(group_size=32), 12, 64, "layer has 12 outputs"), (PackQuantized(bits=4, group_size=32), 8, 40, "whole groups"),
     (MxFp4(), 8, 40, "multiple of 32")],
)  # fmt: skip
def test_sizes_that_a_layout_cannot_hold(scheme, n, k, said):
    with pytest.raises(QuantizationError, match=said):
        packing_of(scheme, "layer", n, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_blocks_in_every_dtype(dtype):
    """Powers of two, which all of them hold; as DeepSeek's ue8m0. The last blocks are short."""
    scales = 2.0 ** torch.arange(-3, 3).reshape(2, 3)
    q = torch.randn(5, 10).to(torch.float8_e4m3fn)
    found = packing_of(Scaled(dtype="fp8", block=(4, 4)), "layer", 5, 10)
    got = dequantized(found, {"weight": q, "weight_scale": scales.to(dtype)})
    assert torch.equal(got, q.float() * scales.repeat_interleave(4, 0).repeat_interleave(4, 1)[:5, :10])
    assert DTYPES.get(dtype, "F8_E8M0") in found.tensor_specs()["weight_scale"].dtypes


def test_scales_may_be_bytes_of_exponents():
    """As transformers takes them where scale_fmt is ue8m0; of integers they would be surprising, and are none."""
    q, found = torch.randn(5, 10).to(torch.float8_e4m3fn), packing_of(Scaled(dtype="fp8", block=(4, 4)), "layer", 5, 10)
    octets = torch.arange(122, 128, dtype=torch.uint8).reshape(2, 3)
    scales = (2.0 ** (octets.float() - 127)).repeat_interleave(4, 0).repeat_interleave(4, 1)[:5, :10]
    assert torch.equal(dequantized(found, {"weight": q, "weight_scale": octets}), q.float() * scales)
    assert "U8" in found.tensor_specs()["weight_scale"].dtypes
    assert "U8" not in packing_of(Scaled(dtype="int8", block=(4, 4)), "layer", 5, 10).tensor_specs()["weight_scale"].dtypes
    with pytest.raises(ValueError, match="NaN"):
        dequantized(found, {"weight": q, "weight_scale": octets.index_fill(0, torch.tensor(0), 255)})


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_unpacked_as_shifts_do(bits):
    words = torch.randint(-(1 << 31), 1 << 31, (3, 5)).to(torch.int32)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    plain = (words[:, :, None] >> shifts & (1 << bits) - 1).flatten(1)
    assert torch.equal(unpack_words(words, bits).to(torch.int32), plain)
    assert torch.equal(unpack_words(words.t(), bits), unpack_words(words.t().contiguous(), bits))


def test_one_zero_point_of_a_whole_packed_tensor_is_not_packed():
    found = PackQuantizedPacking(PackQuantized(bits=4, group_size=0, is_symmetric=False), "layer", 8, 16)
    q = torch.randint(0, 16, (8, 16), generator=torch.Generator().manual_seed(0))
    tensors = {
        "weight_packed": words(q, 4),
        "weight_scale": torch.tensor([0.5]),
        "weight_zero_point": torch.tensor([-3], dtype=torch.int8),
    }
    assert found.tensor_specs()["weight_zero_point"].shapes == ((1, 1), (1,))
    out = torch.empty(8, 16)
    found.dequantize_into(tensors, out, slice(0, 8), slice(0, 16))
    assert torch.equal(out, (q - 8 + 3) * 0.5)
    whole = packing.joined(list(found.chunks(tensors, slice(0, 8), slice(0, 16))))
    assert torch.equal(whole.zeros.expand(8, 1), torch.full((8, 1), 5))


def test_an_order_that_was_never_made_is_none():
    packed = PackQuantizedPacking(PackQuantized(bits=4, group_size=8, has_order=True), "layer", 8, 16)
    q = torch.randint(0, 16, (8, 16), generator=torch.Generator().manual_seed(0))
    tensors = {
        "weight_packed": words(q, 4),
        "weight_scale": torch.full((8, 2), 0.5),
        "weight_g_idx": torch.full((16,), -1, dtype=torch.int32),
    }
    [quantized] = packed.chunks(tensors, slice(0, 8), slice(0, 16))
    assert quantized.order is None and torch.equal(quantized.q, q.to(torch.uint8))
