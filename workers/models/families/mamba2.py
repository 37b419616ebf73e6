"""Mamba 2 alone, as in Codestral Mamba: x += mixer(norm(x)) in each layer, and no attention, so that there is no KV cache.

transformers may keep the residual in float32 (residual_in_fp32); here it has the dtype of the activations. A Mamba has no
positions, and its config no greatest one.
"""

from quire.workers.layers.norm import NormSpec
from quire.workers.models.config import NO_ATTENTION, LayerSpec, ModelConfigError, ModelSpec
from quire.workers.models.decoder import Family
from quire.workers.models.families.nemotron_h import NAMES, NemotronBlock
from quire.workers.models.fields import Json, flag, rms_norm_eps, size, words
from quire.workers.models.mamba2 import MambaSpec
from quire.workers.models.mamba_fields import check_groups, read_time_step_limit
from quire.workers.models.spellings import renamed

MAX_POSITIONS = 1 << 18  # as in ipc/text_config.py


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    num_heads, head_dim = size(fields, "num_heads", 128), size(fields, "mamba_head_dim", 64)
    inner, bias = size(fields, "expand", 2) * size(fields, "hidden_size"), flag(fields, "use_bias")
    if num_heads * head_dim != inner:
        raise ModelConfigError(f"config.json: num_heads {num_heads} times head_dim {head_dim} is not the layers' size {inner}")
    dt_min, dt_max = read_time_step_limit(fields)
    mamba = MambaSpec(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=size(fields, "n_groups", 8),
        state_size=size(fields, "state_size", 128),
        window=size(fields, "conv_kernel", 4),
        has_conv_bias=flag(fields, "use_conv_bias", True),
        in_bias=bias,
        out_bias=bias,
        dt_min=dt_min,
        dt_max=dt_max,
    )
    layer = LayerSpec(attention=NO_ATTENTION, recurrent=check_groups(mamba), intermediate_size=0)
    return (layer,) * size(fields, "num_hidden_layers")


def plain_fields(fields: Json) -> Json:
    """head_dim is that of Mamba's heads."""
    names = {"layer_norm_epsilon": "rms_norm_eps", "head_dim": "mamba_head_dim"}
    return renamed(fields, names, {"rms_norm_eps": 1e-5, "max_position_embeddings": MAX_POSITIONS})


def read_model(fields: Json) -> ModelSpec:
    return ModelSpec(norm=NormSpec(eps=rms_norm_eps(fields)))


FIELDS = words(
    "num_heads mamba_head_dim n_groups state_size conv_kernel use_conv_bias use_bias expand time_step_limit",
    # how weights are drawn, and how other code computes
    "time_step_rank time_step_min time_step_max time_step_floor rescale_prenorm_residual residual_in_fp32 chunk_size",
    "rms_norm norm_before_gate time_step_init_scheme time_step_scale",
)
FAMILY = Family("mamba2", FIELDS, read_layers, NemotronBlock, read_model, plain_fields, NAMES)
