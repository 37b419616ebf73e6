"""What a model's weights take on a GPU, for `quire estimate`: as their files hold them, rounded while loading, or dequantized.

Which formats a GPU computes with is the worker's to say (workers/layers/formats/choice.py); here is as much of it as tells
4 bits from 16. Sizes that a config has for some of its layers are taken for all.
"""

from quire.frontend.cli.estimate_model import Json, Model
from quire.ipc.quantization import OTHER_NAMES, WHILE_LOADING

# before compute capability 8.9, whose tensor cores are the first with fp8; as users write them, without spaces and dashes
WITHOUT_FP8 = ("a100", "a10", "a6000", "rtx3090")
GROUPS, WIDE_GROUP = (32, 64), 128  # sizes that kernels of 16-bit inputs take, and what all take multiples of
INT4_BITS, MXFP4_BITS = 4 + 3 / 16, 9  # with scales: of 128 weights 16 bits and a zero point of 8; of 32, in 8 bits each, 32
PLAIN = 0.0


def weights_bytes(model: Model, quantization: str | None, item: int, *, has_fp8: bool) -> int:
    """quantization: --quantization; item: bytes of a plain weight. Head and embedding are not quantized."""
    if model.quantization is not None:
        bits = bits_on_gpu(model.quantization, has_fp8=has_fp8)
    else:
        is_plain = quantization not in WHILE_LOADING or (quantization.startswith("fp8") and not has_fp8)
        bits = PLAIN if is_plain else INT4_BITS if quantization == "int4" else 8.0
    if bits is None:
        return model.stored_bytes
    if bits == PLAIN:
        return model.num_parameters * item
    kept = min(model.sizes.vocab_size * model.sizes.hidden_size * (1 if model.is_tied else 2), model.num_parameters)
    return kept * item + int((model.num_parameters - kept) * bits / 8)


def bits_on_gpu(config: Json, *, has_fp8: bool) -> float | None:
    """Of a weight of a checkpoint with this quantization_config; PLAIN: the dtype's; None: about those in its files."""
    given = config.get("quant_method")
    method = OTHER_NAMES.get(str(given), given)
    if method in (None, "bitsandbytes"):
        return PLAIN if config.get("load_in_4bit") or config.get("_load_in_4bit") else None
    if method == "mxfp4":
        return MXFP4_BITS
    if method == "fp8":
        return None if has_fp8 and _is_taken(_last(config.get("weight_block_size")), ()) else PLAIN
    if method != "compressed-tensors":
        return None if _is_taken(config.get("group_size"), GROUPS) else PLAIN
    if "mxfp4" in str(config.get("format")):
        return MXFP4_BITS
    groups = config.get("config_groups")
    all_taken = all(_is_computed(group, has_fp8) for group in groups.values()) if isinstance(groups, dict) else True
    return None if all_taken else PLAIN


def _is_computed(group: object, has_fp8: bool) -> bool:
    """Whether a kernel computes with a group of compressed-tensors."""
    weights, inputs = (group.get(name) if isinstance(group, dict) else None for name in ("weights", "input_activations"))
    if not isinstance(weights, dict):
        return True
    if weights.get("type") == "float" and not has_fp8:
        return False
    if isinstance(inputs, dict) and inputs.get("num_bits") != 16:
        is_symmetric = weights.get("symmetric", True) and inputs.get("symmetric", True)
        if weights.get("num_bits") == 4 or not is_symmetric:
            return False
    few = GROUPS if not isinstance(inputs, dict) else ()
    return _is_taken(weights.get("group_size"), few) and _is_taken(_last(weights.get("block_structure")), few)


def _is_taken(size: object, few: tuple[int, ...]) -> bool:
    """Whether kernels take groups of so many inputs, multiples of 128 or one of these few; none, and -1, are all of them."""
    return not isinstance(size, int) or size < 1 or size in few or size % WIDE_GROUP == 0


def _last(sizes: object) -> object:
    return sizes[-1] if isinstance(sizes, list) and sizes else None
