"""quantization_config -> the quantization scheme of each linear layer, by its name.

It is config.json's field, or the file beside it if that is absent (older GPTQ and AWQ). Larger methods have files of their own;
this one reads the small ones. An unsupported config raises QuantizationError before any weight is read. Called by
models/family_table.py; the result goes to the layers with their placement (layers/linear.py).
"""

from collections.abc import Callable

from quire.ipc.quantization import OTHER_NAMES
from quire.workers.loading.quantized.config_compressed import read_compressed, read_kv_cache_scheme
from quire.workers.loading.quantized.config_gptq import read_auto_round, read_awq, read_gptq
from quire.workers.loading.quantized.config_modelopt import read_kv_cache_of_modelopt, read_modelopt
from quire.workers.loading.quantized.names import HEAD, is_skipped, patterns_of
from quire.workers.loading.quantized.schemes import (
    Activations,
    FourBitCodes,
    Json,
    MxFp4,
    Quantization,
    QuantizationError,
    QuantizationScheme,
    RowInt8,
    Scaled,
    SchemeOf,
    field,
    given,
    one_of,
)

DIVISORS = "GPTQModel's scales of fp8 divide; llm-compressor writes fp8 whose scales multiply"


def read_quantization(config: object) -> Quantization:
    """Read the object in config.json's quantization_config. Raises QuantizationError."""
    if not isinstance(config, dict):
        raise QuantizationError(f"quantization_config must be an object, not {config!r:.80}")
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"
    method = OTHER_NAMES.get(str(method), method)
    readers: dict[object, Callable[[Json], SchemeOf]] = {
        "gptq": read_gptq,
        "awq": read_awq,
        "auto-round": read_auto_round,
        "compressed-tensors": read_compressed,
        "fp8": read_fp8,
        "bitsandbytes": read_bitsandbytes,
        "mxfp4": read_mxfp4,
        "modelopt": read_modelopt,
    }
    if not isinstance(method, str) or method not in readers:
        raise QuantizationError(
            f"quantization_config: quant_method is {method!r:.80}: supported are {', '.join(map(str, readers))}"
        )
    kv_caches = {"compressed-tensors": read_kv_cache_scheme, "modelopt": read_kv_cache_of_modelopt}
    kv_cache_dtype = kv_caches[method](config) if method in kv_caches else None
    return Quantization(method, readers[method](config), kv_cache_dtype)


def read_fp8(config: Json) -> SchemeOf:
    """DeepSeek's and transformers' groups of 128 x 128, and one scale per tensor. The head is never quantized."""
    one_of(given(config, "fmt", "e4m3"), ("e4m3", "float8_e4m3fn"), "quantization_config: fmt")
    one_of(given(config, "scale_fmt", "ue8m0"), ("ue8m0", "float"), "quantization_config: scale_fmt")
    one_of(given(config, "expert_dtype", "fp8"), ("fp8",), "quantization_config: expert_dtype")
    one_of(config.get("weight_scale_semantics"), (None,), "quantization_config: weight_scale_semantics", DIVISORS)
    one_of(config.get("modules_to_convert") or None, (None,), "quantization_config: modules_to_convert")
    is_static = one_of(
        given(config, "activation_scheme", "dynamic"), ("dynamic", "static"), "quantization_config: activation_scheme"
    )
    block = field(config, "weight_block_size", list, None)
    if block is not None and (len(block) != 2 or not all(type(x) is int and x >= 1 for x in block)):
        raise QuantizationError(f"quantization_config: weight_block_size must be two sizes, like [128, 128], not {block!r:.80}")
    if block is not None and is_static == "static":
        raise QuantizationError(
            "quantization_config: activation_scheme is 'static' with weight_block_size: 'dynamic' is supported"
        )
    scheme = Scaled(
        dtype="fp8",
        block=(block[0], block[1]) if block else (0, 0),
        scale_names=("weight_scale_inv", "weight_scale") if block else ("weight_scale", "weight_scale_inv"),
        activations=Activations(dtype="fp8", is_static=is_static == "static", group_size=block[1] if block else 0),
    )
    skipped = patterns_of(config, "ignored_layers", "modules_to_not_convert")
    return lambda *names: None if HEAD in names or is_skipped(names, skipped) else scheme


def read_bitsandbytes(config: Json) -> SchemeOf:
    """4-bit codes or int8, as transformers saves them: without a list of skipped modules, it skips the head."""
    skipped = [HEAD] if config.get("llm_int8_skip_modules") is None else patterns_of(config, "llm_int8_skip_modules")
    in_4_bits, in_8_bits = (
        any(field(config, f"{start}load_in_{bits}bit", bool, False) for start in ("", "_")) for bits in (4, 8)
    )
    scheme: QuantizationScheme
    if in_4_bits and in_8_bits:
        raise QuantizationError("quantization_config of bitsandbytes sets load_in_4bit and load_in_8bit: one of them is true")
    if in_8_bits:
        scheme = RowInt8()
    elif in_4_bits:
        kind = one_of(given(config, "bnb_4bit_quant_type", "fp4"), ("nf4", "fp4"), "quantization_config: bnb_4bit_quant_type")
        one_of(given(config, "bnb_4bit_quant_storage", "uint8"), ("uint8",), "quantization_config: bnb_4bit_quant_storage")
        scheme = FourBitCodes(quant_type=kind, is_nested=field(config, "bnb_4bit_use_double_quant", bool, False))
    else:
        raise QuantizationError("quantization_config of bitsandbytes sets neither load_in_4bit nor load_in_8bit")
    return lambda *names: None if is_skipped(names, skipped) else scheme


def read_mxfp4(config: Json) -> SchemeOf:
    """mxfp4 as in gpt-oss's config. The head is never quantized."""
    skipped = patterns_of(config, "modules_to_not_convert")
    return lambda *names: None if HEAD in names or is_skipped(names, skipped) else MxFp4()
