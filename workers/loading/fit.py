"""Checks that a checkpoint's tensors are those that a model takes, by names, shapes and dtypes; no values are read here.

One error names all tensors that are missing, surplus, of a wrong shape or of a wrong dtype. If one of them is of a quantized
layer, the error also says what quantization_config says of that layer: either the rules or the files are wrong. Called by
weights.py.
"""

from quire.workers.loading.checkpoint_tensor import CheckpointTensor
from quire.workers.loading.quantized.schemes import PackQuantized, Quantization, Scaled, described
from quire.workers.loading.weight_loader import FLOATS, WeightLoader, WeightsError

INERT_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.masked_bias", ".attn.masked_bias")  # buffers of old transformers
# scales of quantized keys and values, which a 16-bit cache does not use
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale")
# endings of names that only tensors of quantized layers have
QUANTIZED = (
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
    ".weight_global_scale",
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".SCB",
    "_proj_blocks",
    "_proj_scales",
    "_proj_scale_inv",
)
MAX_NAMES = 12  # shown for each kind of problem


def check_fit(
    tensors: dict[str, CheckpointTensor], loaders: dict[str, WeightLoader], quantization: Quantization | None
) -> None:
    """Raise one WeightsError that names every tensor that is missing, surplus, of another shape or of another kind."""
    known = (*INERT_SUFFIXES, *KV_SCALES)
    missing = [
        name
        for name, loader in loaders.items()
        if not loader.is_optional and name not in tensors and not any(other in tensors for other in loader.instead)
    ]
    surplus = [name for name in tensors if name not in loaders and not name.endswith(known) and not _is_idle(name, tensors)]
    misshapen = [
        f"{name} is {list(tensors[name].shape)}, expected {list(loader.shape)}"
        for name, loader in loaders.items()
        if name in tensors and not loader.fits(tensors[name].shape)
    ]
    foreign = [
        f"{name} is {tensors[name].dtype}, expected {' or '.join(loader.dtypes)}"
        for name, loader in loaders.items()
        if name in tensors and tensors[name].dtype not in loader.dtypes
    ]
    problems = [
        f"{what}: {_listed(names)}{' (unknown to the model)' if names is surplus else ''}"
        for what, names in (
            ("missing", missing),
            ("surplus", surplus),
            ("misshapen", misshapen),
            ("of an unsupported dtype", foreign),
        )
        if names
    ]
    if problems:
        named = [*missing, *(text.split()[0] for text in (*misshapen, *foreign)), *surplus]
        raise WeightsError(
            "the checkpoint does not fit the model that config.json describes"
            f"{_as_configured(named, {*tensors, *loaders}, quantization)}. Tensors {'; '.join(problems)}"
        )


def _is_idle(name: str, tensors: dict[str, CheckpointTensor]) -> bool:
    """Whether it is the scale of a float weight: transformers keeps one if a weight is not a whole number of fp8's groups."""
    weight = tensors.get(name.removesuffix("_scale_inv"))
    return name.endswith(".weight_scale_inv") and weight is not None and weight.dtype in FLOATS


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _as_configured(named: list[str], tensors: set[str], quantization: Quantization | None) -> str:
    """A note of what config.json says of the first quantized layer that one of these tensors belongs to."""
    quantized = {_layer_of(name) for name in tensors if name.endswith(QUANTIZED) or ".weight." in name}
    layer = next((layer for layer in map(_layer_of, named) if layer in quantized), None)
    if layer is None:
        return ""
    if quantization is None:
        return f" (it has no quantization_config, and {layer} is quantized)"
    scheme = quantization.scheme_of(layer)
    if isinstance(scheme, PackQuantized | Scaled) and scheme.from_floats:
        return ""
    return f" (quantization_config says of {layer}: {quantization.method}, {described(scheme)})"


def _layer_of(tensor: str) -> str:
    """The tensor's layer; bitsandbytes appends names of further tensors to `.weight`."""
    return tensor.partition(".weight.")[0] if ".weight." in tensor else tensor.rpartition(".")[0]
