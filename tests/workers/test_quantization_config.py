"""quantization_config: which layer has which format, as the packers' own tools say it; what is refused, in what words."""

import pytest

from quire.workers.loading.quantized.config import read_quantization
from quire.workers.loading.quantized.schemes import (
    Activations,
    Awq,
    FourBitCodes,
    Gptq,
    MxFp4,
    PackQuantized,
    QuantizationError,
    RowInt8,
    Scaled,
)

Q, DOWN, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
STATIC_FP8 = Scaled(dtype="fp8", block=(0, 0), activations=Activations(dtype="fp8", is_static=True))
G4 = Gptq(bits=4, group_size=128)
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}


def groups(*entries, ignore=("lm_head",), layout="pack-quantized", **more):
    named = {f"group_{i}": entry for i, entry in enumerate(entries)}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": named, "ignore": list(ignore), **more}


def entry(weights, *targets, **more):
    return {"targets": list(targets or ("Linear",)), "weights": weights, **more}


def schemes(config):
    found = read_quantization(config)
    return [found.scheme_of(layer) for layer in (Q, DOWN, HEAD)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPTQ, [G4, G4, None]),
        ({**GPTQ, "lm_head": True}, [G4, G4, G4]),
        ({**GPTQ, "group_size": -1, "bits": 8}, [Gptq(bits=8, group_size=0)] * 2 + [None]),
        ({**GPTQ, "checkpoint_format": "gptq_v2", "desc_act": True},
         [Gptq(bits=4, group_size=128, desc_act=True, zeros_less_one=False)] * 2 + [None]),
        ({**GPTQ, "dynamic": {r"-:.*\.self_attn\.": {}, "+:.*down_proj": {"bits": 8, "group_size": 32}, ".*down": {"bits": 4}}},
         [None, Gptq(bits=8, group_size=32), None]),
        ({**GPTQ, "dynamic": {"+:.*layers": {"bits": 8}, "-:.*q_proj": {}}}, [None, Gptq(bits=8, group_size=128), None]),
        ({**GPTQ, "dynamic": {"lm_head": {"bits": 8}}}, [G4, G4, Gptq(bits=8, group_size=128)]),
        ({**GPTQ, "modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.q_proj"]]}, [G4, None, None]),
        (AWQ, [Awq(group_size=128)] * 2 + [None]),
        ({**AWQ, "modules_to_not_convert": ["self_attn"]}, [None, Awq(group_size=128), None]),
        ({**AWQ, "zero_point": False, "lm_head": True, "dynamic": {"+:.*down_proj": {"group_size": 32}, "-:.*q_proj": {}}},
         [None, Awq(group_size=32), Awq(group_size=128)]),
        (ROUND, [G4, G4, None]),
        ({**ROUND, "packing_format": "auto_round", "extra_config": {"lm_head": {"bits": 8}, Q: {"bits": 16}}},
         [None, Gptq(bits=4, group_size=128, zeros_less_one=False), Gptq(bits=8, group_size=128, zeros_less_one=False)]),
        ({**ROUND, "extra_config": {r".*down_proj": {"bits": 8, "group_size": 32}}}, [G4, Gptq(bits=8, group_size=32), None]),
        ({**ROUND, "block_name_to_quantize": "model.layers.1", "packing_format": "auto_round:auto_awq"},
         [None, Awq(group_size=128), None]),
        ({**ROUND, "packing_format": "auto_round:fp8", "bits": 8, "group_size": -1, "act_dynamic": True},
         [Scaled(dtype="fp8", block=(1, 0), activations=Activations(dtype="fp8"))] * 2 + [None]),
        ({"quant_method": "intel/auto-round", "bits": 4, "group_size": 128, "backend": "auto_round:awq:gemm"},
         [Awq(group_size=128)] * 2 + [None]),
        ({"quant_method": "intel/auto-round", "bits": 4, "group_size": 128, "backend": "auto_round:gptq:exllamav2"},
         [G4, G4, None]),
        (groups(entry(INT4)), [PackQuantized(bits=4, group_size=128)] * 2 + [None]),
        (groups(entry(INT4), ignore=(r"re:.*self_attn",)), [None] + [PackQuantized(bits=4, group_size=128)] * 2),
        (groups(entry(INT4), entry({**INT4, "num_bits": 8}, r"re:.*down_proj$"), entry({**INT4, "group_size": 64}, Q)),
         [PackQuantized(bits=4, group_size=64), PackQuantized(bits=8, group_size=128), None]),
        (groups(entry({**INT4, "symmetric": False, "actorder": "group"})),
         [PackQuantized(bits=4, group_size=128, is_symmetric=False, has_order=True)] * 2 + [None]),
        (groups(entry({**INT4, "actorder": "weight"}, Q),
                entry(FP8, DOWN, format="float-quantized", input_activations=TOKEN)),
         [PackQuantized(bits=4, group_size=128),
          Scaled(dtype="fp8", block=(1, 0), activations=Activations(dtype="fp8")), None]),
        (groups(entry({"num_bits": 8, "type": "int", "strategy": "tensor"}, input_activations={"num_bits": 8, "type": "int",
                "strategy": "tensor", "dynamic": False, "symmetric": False}), layout="int-quantized"),
         [Scaled(dtype="int8", block=(0, 0),
                 activations=Activations(dtype="int8", is_static=True, is_symmetric=False))] * 2 + [None]),
        (groups(entry({**FP8, "strategy": "block", "block_structure": [128, 128]},
                      input_activations={**TOKEN, "strategy": "group", "group_size": 128}), layout="float-quantized"),
         [Scaled(dtype="fp8", block=(128, 128), activations=Activations(dtype="fp8", group_size=128))] * 2 + [None]),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0"], "activation_scheme": "static"},
         [None, Scaled(dtype="fp8", block=(0, 0), scale_names=("weight_scale", "weight_scale_inv"),
                       activations=Activations(dtype="fp8", is_static=True)), None]),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]},
         [Scaled(dtype="fp8", block=(128, 128), scale_names=("weight_scale_inv", "weight_scale"),
                 activations=Activations(dtype="fp8", group_size=128))] * 2 + [None]),
        (groups(kv_cache_scheme={"num_bits": 8, "type": "float"}, layout="dense"), [None] * 3),
        (BNB, [FourBitCodes(quant_type="nf4", is_nested=True)] * 2 + [None]),
        ({**BNB, "llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"]},
         [FourBitCodes(quant_type="nf4", is_nested=True), None, None]),
        ({**BNB, "llm_int8_skip_modules": []}, [FourBitCodes(quant_type="nf4", is_nested=True)] * 3),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, [RowInt8()] * 2 + [None]),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, [None, MxFp4(), None]),
        (MODELOPT, [STATIC_FP8, STATIC_FP8, None]),
        ({**MODELOPT, "exclude_modules": ["lm_head", "model.layers.0*"]}, [None, STATIC_FP8, None]),
        ({**MODELOPT, "exclude_modules": ["self_attn.q_proj", "mlp.down"]}, [None, STATIC_FP8, None]),
        ({**MODELOPT, "ignore": ["*.mlp.*"], "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, [STATIC_FP8, None, None]),
        ({**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
         [Scaled(dtype="fp8", block=(1, 0), activations=Activations(dtype="fp8"))] * 2 + [None]),
        ({**MODELOPT, "quant_algo": "FP8_PB_WO"}, [Scaled(dtype="fp8", block=(128, 128))] * 2 + [None]),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {Q: {"quant_algo": "FP8"}}},
         [STATIC_FP8, None, None]),
        ({**MODELOPT, "quant_algo": None, "kv_cache_quant_algo": "FP8"}, [None] * 3),
        (groups(entry({"num_bits": 4, "type": "float", "group_size": 32}), layout="mxfp4-pack-quantized"),
         [MxFp4(codes_name="weight_packed", scales_name="weight_scale")] * 2 + [None]),
    ],
)  # fmt: skip
def test_each_layer_has_its_format(config, expected):
    assert schemes(config) == expected


@pytest.mark.parametrize(
    ("config", "skips"),
    [
        ({**GPTQ, "dynamic": {r"-:transformer\.h\.0\.": {}}}, True),
        ({**AWQ, "modules_to_not_convert": ["h.0.mlp"]}, True),
        ({**ROUND, "block_name_to_quantize": "transformer.h"}, False),
        ({**ROUND, "block_name_to_quantize": [["transformer.h.1"]]}, True),
        ({**ROUND, "block_name_to_quantize": "transformer."}, False),
        ({**ROUND, "extra_config": {"transformer.h.0.mlp.up": {"bits": 16}}}, True),
        (groups(entry(INT4, r"re:transformer\.h\..*")), False),
        (groups(entry(INT4, "transformer.h.0.mlp.up")), False),
        (groups(entry(INT4), ignore=["transformer.h.0.mlp.up"]), True),
        ({"quant_method": "fp8", "modules_to_not_convert": ["transformer.h.0"]}, True),
        ({**BNB, "llm_int8_skip_modules": ["transformer.h.0"]}, True),
    ],
)
def test_a_rule_may_say_any_name_that_a_layer_has(config, skips):
    """That of the model or one in the checkpoint, whether it is a rule for a layer or against it."""
    names = ("model.layers.0.mlp.up", "transformer.h.0.mlp.up")
    assert (read_quantization(config).scheme_of(*names) is None) == skips


def test_a_skipped_module_ends_at_a_boundary():
    found = read_quantization({"quant_method": "fp8", "ignored_layers": ["model.layers.1", "gate"]})
    names = (
        "model.layers.1.mlp.up_proj",
        "model.layers.11.mlp.up_proj",
        "model.layers.2.mlp.gate_proj",
        "model.layers.2.mlp.gate",
    )
    assert [found.scheme_of(name) is None for name in names] == [True, False, False, True]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "must be an object"),
        ({"quant_method": "hqq"}, "quant_method is 'hqq': supported are gptq, awq"),
        ({}, "quant_method is None"),
        ({"quant_method": ["gptq"]}, "quant_method is"),
        ({**GPTQ, "bits": 3}, "bits is 3: supported are 4 and 8"),
        ({**GPTQ, "bits": None}, "bits is None"),
        ({**GPTQ, "bits": [4]}, "bits is"),
        ({**GPTQ, "bits": 4.0}, "bits is 4.0: supported are 4 and 8"),
        ({**GPTQ, "checkpoint_format": False}, "checkpoint_format is False"),
        ({**GPTQ, "is_marlin_format": 0}, "is_marlin_format is 0"),
        ({**GPTQ, "group_size": 0}, "group_size is 0"),
        ({**GPTQ, "group_size": "128"}, "group_size must be int"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({**GPTQ, "dynamic": {"+:(": {}}}, "no regex"),
        ({**GPTQ, "dynamic": {"+:.*down": {"bits": 2}}}, "down': bits is 2"),
        ({**GPTQ, "dynamic": {"+:.*down": 3}}, "must have an object"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype is 'int16': supported is 'int32'"),
        ({**GPTQ, "rotation": "hadamard"}, "rotation is set: rotated weights"),
        ({**GPTQ, "activation": {"mode": "w4afp8"}}, "activation is {'mode': 'w4afp8'}: inputs are"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'"),
        ({**AWQ, "dynamic": {"+:.*down": {"bits": 8}}}, "down': bits is 8: supported is 4"),
        ({**AWQ, "version": None, "checkpoint_format": "gemv_fast"}, "version is 'gemv_fast'"),
        ({**GPTQ, "format": "bitblas"}, "checkpoint_format is 'bitblas'"),
        ({**AWQ, "bits": 8}, "bits is 8"),
        ({**AWQ, "modules_to_not_convert": [3]}, "must list names"),
        ({**AWQ, "version": []}, "version is '[]'"),
        ({**AWQ, "zero_point": 1}, "zero_point is 1"),
        ({**ROUND, "packing_format": "auto_round:auto_gptq:marlin"}, "packing_format"),
        ({**ROUND, "data_type": "mx_fp"}, "data_type is 'mx_fp'"),
        ({**ROUND, "packing_format": {}}, "packing_format is {}"),
        (
            {**ROUND, "packing_format": "auto_round:fp8", "bits": 8, "group_size": -1, "act_bits": 4},
            "act_bits is 4: supported is 8",
        ),
        ({**ROUND, "extra_config": {Q: 4}}, "extra_config"),
        (groups(), "config_groups"),
        (groups({"targets": ["LlamaAttention"], "input_activations": TOKEN}), "input_activations of a group without weights"),
        (groups(entry(INT4), layout="marlin-24"), "config_groups.group_0: format is 'marlin-24'"),
        (groups(entry({**INT4, "num_bits": 3})), "weights.num_bits is 3"),
        (groups(entry({**INT4, "type": []})), "weights.type is []"),
        (groups(entry({**INT4, "actorder": 0})), "weights.actorder is 0"),
        (groups({"weights": INT4}), "config_groups.group_0.targets must list layers"),
        (groups(entry({**INT4, "strategy": "tensor_group"})), "strategy is 'tensor_group'"),
        (groups(entry(INT4, "re:(")), "no regex"),
        (groups(entry({"num_bits": 4, "type": "float", "group_size": 16}), layout="mxfp4-pack-quantized"), "group_size is 16"),
        (groups(entry(INT4), sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
        (groups(entry(INT4), transform_config={"config_groups": {"a": {}}}), "transform_config"),
        (groups(entry(INT4), transform_config=3), "transform_config must be dict"),
        (groups(entry(INT4), sparsity_config="x"), "sparsity_config must be dict"),
        (groups(entry({**INT4, "rotated": True})), "config_groups.group_0.weights.rotated is not known"),
        (
            groups(entry(FP8, input_activations={**TOKEN, "scale": 2}), layout="float-quantized"),
            "input_activations.scale is not",
        ),
        ({**groups(), "config_groups": {"a\nb": 3}}, r"config_groups.a\nb must be an object"),
        (groups(entry({**INT4, "a\nb": 3})), r"weights.a\nb is not known"),
        ({**ROUND, "rotation_config": {"hadamard_type": "hadamard"}}, "rotation_config is set"),
        ({**ROUND, "act_bits": 8}, "act_bits is 8: supported is 16"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, "'dynamic' is supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "fmt": 0}, "fmt is 0"),
        ({"quant_method": "fp8", "ignored_layers": ["("]}, "ignored_layers has '(', which is no regex"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["("]}, "modules_to_not_convert has '(', which is no regex"),
        ({"quant_method": "fp8", "weight_scale_semantics": "inverse"}, "weight_scale_semantics is 'inverse'"),
        ({"quant_method": "fp8", "modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert is"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype is 'fp4': supported is 'fp8'"),
        ({**BNB, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        ({**BNB, "load_in_8bit": True}, "sets load_in_4bit and load_in_8bit"),
        ({**BNB, "llm_int8_skip_modules": ["("]}, "llm_int8_skip_modules has '(', which is no regex"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({**MODELOPT, "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4': supported are 'FP8', 'FP8_PER_CHANNEL_PER_TOKEN' and"),
        (
            {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {Q: {"quant_algo": "NVFP4"}}},
            f"quantized_layers.{Q}: quant_algo is 'NVFP4'",
        ),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {Q: 3}}, "must be an object, not 3"),
        ({**MODELOPT, "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is 'NVFP4'"),
        ({**MODELOPT, "kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme.num_bits is 4"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(config, said):
    with pytest.raises(QuantizationError) as error:
        read_quantization(config)
    assert said in str(error.value) and "\n" not in str(error.value)
