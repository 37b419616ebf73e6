"""jina-embeddings-v3 (arXiv:2409.10173): XLM-RoBERTa with rotary embedding, and adapters for tasks, of which one is merged.

`jina_task` in --hf-overrides names the task; without it the weights are used as they are. Published checkpoints say that they
are XLMRobertaModel; transformers' own are JinaEmbeddingsV3Model, without adapters.
"""

import msgspec

from quire.workers.layers.heads import HeadSpec
from quire.workers.layers.linear import Placement
from quire.workers.layers.module import Module
from quire.workers.loading.names import CheckpointNames
from quire.workers.models.config import EncoderSpec, LayerSpec, MergedAdapter, ModelConfig, ModelConfigError
from quire.workers.models.encoders.bert import (
    BERT,
    BUFFERS,
    FLASH_EMBEDDINGS,
    ROBERTA_HEADS,
    ROBERTA_PREFIXES,
    UNUSED,
    read_roberta_head,
)
from quire.workers.models.encoders.bert import FIELDS as BERT_FIELDS
from quire.workers.models.encoders.family import PostNormBlock, read_typed_encoder, rotary_layers
from quire.workers.models.fields import Json, number, size, words
from quire.workers.models.fused import stacked
from quire.workers.models.spellings import only, renamed

FIELDS = BERT_FIELDS | words(
    "rotary_emb_base lora_adaptations lora_alpha lora_dropout_p lora_main_params_trainable lora_rank load_trained_adapters",
    "matryoshka_dimensions task_instructions truncate_dim use_reentrant emb_pooler jina_task",
)
LAYERS = (
    (".parametrizations.weight.original", ".weight"),
    (".parametrizations.weight.0.lora_", ".lora_"),
    ("mixer.Wqkv.", "self_attn.Wqkv."),
    ("mixer.out_proj.", "self_attn.o_proj."),
    ("norm1.", "post_attention_layernorm."),
    ("norm2.", "post_mlp_layernorm."),
    ("mlp.fc1.", "mlp.up_proj."),
    ("mlp.fc2.", "mlp.down_proj."),
)


def _block(config: ModelConfig, spec: LayerSpec, place: Placement, layer: int) -> Module:
    return PostNormBlock(config, spec, place, layer, qkv=stacked("Wqkv"))


def plain_fields(fields: Json) -> Json:
    found = renamed(fields, {"rotary_emb_base": "rope_theta"}, {"tie_word_embeddings": True, "type_vocab_size": 1})
    return {"layer_norm_eps": 1e-5, **found}


def read_layers(fields: Json) -> tuple[LayerSpec, ...]:
    only(fields, "jina-embeddings-v3", position_embedding_type="rotary")
    return rotary_layers(fields, 20000.0, True, True, True)


def read_jina_encoder(fields: Json, head: HeadSpec | None) -> EncoderSpec:
    return msgspec.structs.replace(read_typed_encoder(fields, head), adapter=read_adapter(fields))


def read_adapter(fields: Json) -> MergedAdapter | None:
    """By `jina_task`. Raises ModelConfigError for a task that the checkpoint does not have."""
    task, tasks = fields.get("jina_task"), fields.get("lora_adaptations")
    if task is None:
        return None
    if not isinstance(tasks, list) or task not in tasks:
        known = ", ".join(map(str, tasks)) if isinstance(tasks, list) and tasks else "none"
        raise ModelConfigError(f"jina_task {task!r:.60} is not among the checkpoint's tasks: {known}")
    return MergedAdapter(tasks.index(task), number(fields, "lora_alpha", 1.0) / size(fields, "lora_rank", 4))


def read_names(fields: Json, kind: str) -> CheckpointNames:
    prefixes = (*ROBERTA_PREFIXES, *FLASH_EMBEDDINGS, *ROBERTA_HEADS[kind])
    unused = () if fields.get("jina_task") else (".lora_A", ".lora_B")
    return CheckpointNames(prefixes, (*BUFFERS, *UNUSED[kind], *unused), inner=LAYERS)


FAMILY = BERT._replace(
    name="jina-embeddings-v3",
    fields=FIELDS,
    read_layers=read_layers,
    make_block=_block,
    read_encoder=read_jina_encoder,
    read_head=read_roberta_head,
    names=read_names,
    plain_fields=plain_fields,
)
