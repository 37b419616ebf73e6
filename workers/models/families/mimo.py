"""MiMo-7B: Qwen2's block. The layer that predicts a second token (MTP) has names of its own, and a drafter reads it."""

from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import LayerSpec, MTPSpec
from quire.workers.models.decoder import Family
from quire.workers.models.families import qwen2
from quire.workers.models.families.llama import LlamaBlock
from quire.workers.models.fields import Json
from quire.workers.models.moe_fields import check_only, count
from quire.workers.models.spellings import ACTIVATIONS

LAYERS = "model.mtp_layers."
PARTS = (("token_layernorm", "enorm"), ("hidden_layernorm", "hnorm"), ("input_proj", "fc"), ("final_layernorm", "norm"))


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    check_only(fields, attention_bias=True, use_mrope=False)
    return qwen2.read_layers(fields)


def read_mtp(fields: Json, layers: tuple[LayerSpec, ...]) -> MTPSpec | None:
    if not count(fields, "num_nextn_predict_layers", 1):
        return None
    parts = ((f"{LAYERS}0.{theirs}.", f"mtp.{ours}.") for theirs, ours in PARTS)
    prefixes = (*parts, (f"{LAYERS}0.", "mtp.layers.0."))
    return MTPSpec(layers=layers[-1:], prefixes=prefixes, hidden_first=True, before_norm=True)


FIELDS = qwen2.FIELDS | {"attention_bias", "use_mrope", "num_nextn_predict_layers"}
FAMILY = Family(
    "mimo",
    FIELDS,
    read_layers,
    LlamaBlock,
    names=CheckpointNames(ignored=(LAYERS,)),
    activations=frozenset(ACTIVATIONS),
    read_mtp=read_mtp,
)
