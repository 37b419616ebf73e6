"""Whether a checkpoint's tensors are those that a model takes, by their names, shapes and dtypes: not a value is read here.

What is missing, surplus, misshapen or of another kind is named at once; of a quantized layer among them also what
quantization_config says of it, for then the rules or the files are wrong. Called by weights.py.
"""

from quire.workers.loading.quantized.schemes import PackQuantized, Quantization, Scaled, described
from quire.workers.loading.source import Source
from quire.workers.loading.target import FLOATS, Target, WeightsError

INERT_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.masked_bias", ".attn.masked_bias")  # buffers of old transformers
# of quantized keys and values, which a cache of 16 bits does not use
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale")
MAX_NAMES = 12  # shown of each kind of problem


def check_fit(sources: dict[str, Source], targets: dict[str, Target], quantization: Quantization | None) -> None:
    """Raise one WeightsError that names every tensor that is missing, surplus, of another shape or of another kind."""
    known = (*INERT_SUFFIXES, *KV_SCALES)
    missing = [
        name
        for name, target in targets.items()
        if not target.is_optional and name not in sources and not any(other in sources for other in target.instead)
    ]
    surplus = [name for name in sources if name not in targets and not name.endswith(known) and not _is_idle(name, sources)]
    misshapen = [
        f"{name} is {list(sources[name].shape)}, expected {list(target.shape)}"
        for name, target in targets.items()
        if name in sources and not target.fits(sources[name].shape)
    ]
    foreign = [
        f"{name} is {sources[name].dtype}, expected {' or '.join(target.dtypes)}"
        for name, target in targets.items()
        if name in sources and sources[name].dtype not in target.dtypes
    ]
    problems = [
        f"{what}: {_listed(names)}"
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
            f"{_as_configured(named, {*sources, *targets}, quantization)}. Tensors {'; '.join(problems)}"
        )


def _is_idle(name: str, sources: dict[str, Source]) -> bool:
    """A scale of a weight that is floats: transformers keeps one where a weight is no whole number of fp8's blocks."""
    weight = sources.get(name.removesuffix("_scale_inv"))
    return name.endswith(".weight_scale_inv") and weight is not None and weight.dtype in FLOATS


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _as_configured(named: list[str], tensors: set[str], quantization: Quantization | None) -> str:
    """What config.json says of the first quantized layer that these tensors are of."""
    quantized = {_layer_of(name) for name in tensors if not name.endswith((".weight", ".bias", *KV_SCALES))}
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
    """bitsandbytes has parts behind a weight's name."""
    return tensor.partition(".weight.")[0] if ".weight." in tensor else tensor.rpartition(".")[0]
