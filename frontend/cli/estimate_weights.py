"""Bytes of a model's weights on a GPU, for `quire estimate`: as in their files, rounded while loading, or dequantized.

The worker decides which formats a GPU computes with (workers/layers/formats/chosen_format.py and experts.py); this file repeats
as much of that as distinguishes 4 bits from 16. Sizes that a config has for some layers are used for all.
"""

from collections.abc import Iterable

from quire.frontend.cli.estimate_model import Model
from quire.frontend.cli.estimate_sizes import EstimateError, Json
from quire.ipc.quantization import METHODS, OTHER_NAMES, WHILE_LOADING

# GPUs before compute capability 8.9, the first with fp8 tensor cores; as users write them, without spaces and dashes
WITHOUT_FP8 = ("a100", "a10", "a6000", "rtx3090")
GROUPS, WIDE_GROUP = (32, 64), 128  # group sizes of kernels with 16-bit inputs; all kernels take multiples of 128
INT4_BITS, MXFP4_BITS = 4 + 3 / 16, 9  # per 128: a 16-bit scale, an 8-bit zero point; MXFP4 as int8, per 32 a 32-bit scale
STORED_MXFP4_BITS = 4 + 8 / 32  # as the experts' kernels read it
PLAIN = 0.0
WEIGHT_ONLY = "int8_per_channel_weight_only"  # in WHILE_LOADING, but experts have no kernel for it


def check_quantization(model: Model, asked: str | None) -> None:
    """Refuse --quantization and a checkpoint's method as an engine does (workers/models/family_table.py).

    Raises EstimateError.
    """
    given = None if model.quantization is None else model.quantization.get("quant_method")
    if given is not None and OTHER_NAMES.get(str(given), given) not in METHODS:
        raise EstimateError(f"{model.name}: quant_method is {given!r:.80}: supported are {', '.join(METHODS)}")
    if asked is None or (model.quantization is None and asked in WHILE_LOADING):
        return
    if model.quantization is None:
        raise EstimateError(f"--quantization {asked}: {model.name} has no quantization_config: {', '.join(WHILE_LOADING)} work")
    method = model.quantization.get("quant_method")
    if OTHER_NAMES.get(str(method), method) not in (asked, None):
        raise EstimateError(f"--quantization {asked}: {model.name} is quantized already ({method}): leave the flag out")


def weights_bytes(model: Model, quantization: str | None, item: int, *, has_fp8: bool, expert_parallel: bool = False) -> int:
    """Bytes of all weights. quantization: --quantization; item: bytes of a plain weight. LM head and embedding stay plain."""
    others = model.num_parameters - model.expert_parameters
    if model.quantization is not None:
        bits = bits_on_gpu(model.quantization, has_fp8=has_fp8)
    else:
        bits = _bits_while_loading(quantization, has_fp8)
    if bits == MXFP4_BITS and model.expert_parameters:
        bits = None if model.stored_bytes else PLAIN  # a mixture's other layers are plain
    elif bits is None and model.quantization is not None and not model.stored_bytes:
        bits = bits_said(model.quantization)
    experts = _experts_bytes(model, quantization, item, has_fp8, expert_parallel)
    if bits == PLAIN:
        return others * item + experts
    head = model.sizes.vocab_size * model.sizes.hidden_size * (1 if model.is_tied else 2)
    kept = min(head, others)
    if bits is None:  # the files' bytes, but LM head and embedding in the dtype
        return model.stored_bytes + min(kept, model.stored_floats) * (item - model.stored_item) + experts
    return kept * item + int((others - kept) * bits / 8) + experts


def _bits_while_loading(quantization: str | None, has_fp8: bool) -> float:
    if quantization not in WHILE_LOADING or (quantization.startswith("fp8") and not has_fp8):
        return PLAIN
    return INT4_BITS if quantization == "int4" else 8.0


def _experts_bytes(model: Model, quantization: str | None, item: int, has_fp8: bool, expert_parallel: bool) -> int:
    """Bytes of the experts: plain with expert parallelism, and if no kernel takes their format."""
    plain = model.expert_parameters * item
    if expert_parallel:
        return plain
    if model.quantization is None:
        bits = PLAIN if quantization == WEIGHT_ONLY else _bits_while_loading(quantization, has_fp8)
        return int(model.expert_parameters * bits / 8) or plain
    if not experts_are_kept(model.quantization, has_fp8=has_fp8):
        return plain
    said = int(model.expert_parameters * bits_said(model.quantization) / 8)
    return min(model.stored_expert_bytes or said or plain, plain)


def bits_said(config: Json) -> float:
    """Bits per weight, with its scales, by quantization_config, if there are no files; PLAIN: the dtype's."""
    given, groups, weights = config.get("quant_method"), config.get("config_groups"), [config]
    method = OTHER_NAMES.get(str(given), given)
    if method == "mxfp4" or "mxfp4" in str(config.get("format")):
        return STORED_MXFP4_BITS
    if method == "compressed-tensors":
        entries = [group.get("weights") for group in _objects(groups.values() if isinstance(groups, dict) else ())]
        weights = _objects(entries)
    if not weights:
        return PLAIN
    bits = next((weights[0][name] for name in ("num_bits", "bits", "w_bit") if name in weights[0]), 8)
    return INT4_BITS if bits == 4 else 8.0


def _objects(values: Iterable[object]) -> list[Json]:
    return [value for value in values if isinstance(value, dict)]


def experts_are_kept(config: Json, *, has_fp8: bool) -> bool:
    """Whether kernels compute with the experts of a checkpoint with this quantization_config."""
    given = config.get("quant_method")
    method = OTHER_NAMES.get(str(given), given)
    if method == "mxfp4" or (method == "compressed-tensors" and "mxfp4" in str(config.get("format"))):
        return True
    if method == "fp8":
        return has_fp8 and _is_taken(_last(config.get("weight_block_size")), ())
    if method == "modelopt":
        return has_fp8 and config.get("quant_algo") in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
    if method != "compressed-tensors":
        is_int4 = config.get("bits") == 4 and not config.get("desc_act") and method not in (None, "bitsandbytes")
        return is_int4 and _is_taken(config.get("group_size"), GROUPS)
    groups = config.get("config_groups")
    return isinstance(groups, dict) and all(_keeps_experts(group, has_fp8) for group in groups.values())


def _keeps_experts(group: object, has_fp8: bool) -> bool:
    """Whether expert kernels take a config group of compressed-tensors: 4-bit integers, or 8 bits with inputs of the same
    kind."""
    if not isinstance(group, dict) or not isinstance(weights := group.get("weights"), dict):
        return True
    inputs = group.get("input_activations")
    if not isinstance(inputs, dict) or inputs.get("num_bits") == 16:
        is_int4 = weights.get("num_bits") == 4 and weights.get("actorder") not in (True, "group", "dynamic")
        return is_int4 and _is_computed(group, has_fp8)
    return _is_computed(group, has_fp8)


def bits_on_gpu(config: Json, *, has_fp8: bool) -> float | None:
    """Bits per weight of a checkpoint with this quantization_config; PLAIN: the dtype's; None: about its files'."""
    given = config.get("quant_method")
    method = OTHER_NAMES.get(str(given), given)
    if method in (None, "bitsandbytes"):
        return PLAIN if config.get("load_in_4bit") or config.get("_load_in_4bit") else None
    if method == "mxfp4":
        return MXFP4_BITS
    if method == "modelopt":
        return None if has_fp8 else PLAIN
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
    """Whether a kernel computes with a config group of compressed-tensors."""
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
    """Whether kernels take groups of this many inputs: multiples of 128, or one of `few`. None and -1: one group."""
    return not isinstance(size, int) or size < 1 or size in few or size % WIDE_GROUP == 0


def _last(sizes: object) -> object:
    return sizes[-1] if isinstance(sizes, list) and sizes else None
