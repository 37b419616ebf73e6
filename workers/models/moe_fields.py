"""Readers of config.json's fields of mixtures of experts: the number of experts, the layers that have them, and the routing.

Called by the families with experts, besides those of fields.py. All raise ModelConfigError.
"""

from typing import Any

from quire.kernels.experts.routing_reference import Routing
from quire.workers.models.config import LayerSpec, ModelConfigError, MTPSpec
from quire.workers.models.fields import MAX_LAYERS, Json, flag, number, size

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # transformers 5 writes the first for all families
MAX_EXPERTS = 1024

# Read by every family with experts.
MOE_FIELDS = frozenset({*EXPERT_COUNTS, "num_experts_per_tok"})

# Read by families with DeepSeek V3's router and layers.
GROUP_FIELDS = frozenset({
    "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob",
    "routed_scaling_factor",
})  # fmt: skip
# Read by families that list the layers with experts.
TYPE_FIELDS = frozenset({"mlp_layer_types", "first_k_dense_replace"})
MTP_FIELDS = frozenset({"num_nextn_predict_layers", "num_mtp_layers"})


def read_routing(fields: Json, **changes: Any) -> Routing:
    """The routing by config.json's numbers. changes: the family's fields of Routing. Raises ModelConfigError."""
    counts = {name: size(fields, name) for name in EXPERT_COUNTS if fields.get(name) is not None}
    if not counts:
        raise ModelConfigError(f"config.json lacks {EXPERT_COUNTS[1]}")
    if len(set(counts.values())) > 1:
        raise ModelConfigError(f"config.json: {' and '.join(counts)} differ")
    (name, num_experts), *_ = counts.items()
    if num_experts > MAX_EXPERTS:
        raise ModelConfigError(f"config.json: {name} is {num_experts}: at most {MAX_EXPERTS} are supported")
    routing = Routing(num_experts=num_experts, top_k=size(fields, "num_experts_per_tok"), **changes)
    if num_experts % routing.num_groups:
        raise ModelConfigError(f"config.json: {name} {num_experts} is not a multiple of n_group {routing.num_groups}")
    if routing.top_groups > routing.num_groups:
        raise ModelConfigError(f"config.json: topk_group {routing.top_groups} is greater than n_group {routing.num_groups}")
    if routing.top_groups < routing.num_groups and routing.group_top > routing.group_size:
        raise ModelConfigError(
            f"config.json: groups of {routing.group_size} experts are too small to be ranked by their best two"
        )
    if routing.top_k > routing.top_groups * routing.group_size:
        raise ModelConfigError(f"config.json: num_experts_per_tok {routing.top_k} is more than there are to choose from")
    return routing


def read_group_routing(fields: Json) -> Routing:
    """DeepSeek V3's routing: sigmoid scores, a correction used for choosing only, groups ranked by their best two experts."""
    return read_routing(
        fields,
        scores="sigmoid",
        is_normalized=flag(fields, "norm_topk_prob"),
        eps=1e-20,
        scale=number(fields, "routed_scaling_factor", 1.0),
        num_groups=size(fields, "n_group", 1),
        top_groups=size(fields, "topk_group", 1),
        group_top=2,
    )


def count(fields: Json, name: str, default: int) -> int:
    """A number of layers, which may be 0."""
    value = fields.get(name)
    value = default if value is None else value
    if type(value) is not int or not 0 <= value <= MAX_LAYERS:
        raise ModelConfigError(f"config.json: {name} must be an integer from 0 to {MAX_LAYERS}, not {value!r:.80}")
    return value


def check_only(fields: Json, **values: object) -> None:
    """Raise ModelConfigError if a field has another value than the one that is implemented."""
    for name, value in values.items():
        if fields.get(name) not in (None, value):
            raise ModelConfigError(f"config.json sets {name} to {fields[name]!r:.80}: only {value!r} is supported")


def mtp_layers(fields: Json) -> tuple[str, ...]:
    """Names of the checkpoint's layers after the last, which predict further tokens."""
    first, many = size(fields, "num_hidden_layers"), max(count(fields, name, 0) for name in MTP_FIELDS)
    return tuple(f"model.layers.{i}." for i in range(first, first + many))


def read_mtp(fields: Json, layers: tuple[LayerSpec, ...]) -> MTPSpec | None:
    """The first of these layers, in DeepSeek V3's layout; None without one. It is of the last layer's kind."""
    names = mtp_layers(fields)
    if not names:
        return None
    name, ours = names[0], "mtp."
    prefixes = *((f"{name}{part}.", f"{ours}{part}.") for part in ("enorm", "hnorm")), (f"{name}eh_proj.", f"{ours}fc.")
    ends = (f"{name}shared_head.norm.", f"{ours}norm."), (name, f"{ours}layers.0.")
    return MTPSpec(layers=layers[-1:], prefixes=(*prefixes, *ends))


def sparse_by_type(fields: Json) -> tuple[bool, ...]:
    """Which layers have experts, by mlp_layer_types; without them, all but the first or the first first_k_dense_replace."""
    types, num_layers = fields.get("mlp_layer_types"), size(fields, "num_hidden_layers")
    if types is None:
        first = count(fields, "first_k_dense_replace", 1)
        return tuple(i >= first for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or any(name not in ("dense", "sparse") for name in types):
        raise ModelConfigError(f"config.json: mlp_layer_types must list dense or sparse for each of {num_layers} layers")
    return tuple(name == "sparse" for name in types)


def sparse_layers(fields: Json) -> tuple[bool, ...]:
    """Which layers have experts: every decoder_sparse_step-th layer, except for those in mlp_only_layers."""
    step, num_layers = size(fields, "decoder_sparse_step", 1), size(fields, "num_hidden_layers")
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ModelConfigError("config.json: mlp_only_layers must list numbers of layers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
