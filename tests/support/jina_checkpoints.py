"""A tiny jina-embeddings-v5: Qwen3's layers ("small") or EuroBERT's ("nano"), and adapters of two tasks; and a tiny v3."""

import json

import torch
import transformers
from encoder_cases import SMALL, build
from encoder_references import rewritten
from safetensors.torch import load_file, save_file

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
RANK, LAYERS = 4, ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def write_jina_v5(folder, kind):
    """Returns transformers' model with the adapter of the task "other" added."""
    kv = {"num_key_value_heads": 2}
    if kind == "small":
        config = transformers.Qwen3Config(**SMALL, **kv, **IDS, head_dim=8, tie_word_embeddings=True)
        theirs = build(transformers.Qwen3Model, config)
    else:
        theirs = build(transformers.EuroBertModel, transformers.EuroBertConfig(**SMALL, **kv, **IDS, mask_token_id=3))
    theirs.save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    own = {"architectures": ["JinaEmbeddingsV5Model"], "model_type": "jina_embeddings_v5", "task_names": ["retrieval", "other"]}
    fields |= own | ({} if kind == "small" else {"is_decoder": False})
    (folder / "config.json").write_text(json.dumps(fields))
    generator = torch.Generator().manual_seed(4)
    for task in ("retrieval", "other"):
        tensors, place = {}, folder / "adapters" / task
        for name, module in theirs.named_modules():
            if name.endswith(LAYERS):
                rows, columns = module.weight.shape
                a, b = (torch.randn(s, generator=generator) / 4 for s in ((RANK, columns), (rows, RANK)))
                tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
                if task == "other":
                    module.weight.data += (8 / RANK) * b @ a
        place.mkdir(parents=True)
        save_file(tensors, place / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
        (place / "adapter_config.json").write_text(json.dumps(config))
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    st = "sentence_transformers.models."
    listed = [{"idx": i, "name": str(i), "path": path, "type": f"{st}{kind}"} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return theirs


V3_TASKS = ["retrieval.query", "retrieval.passage", "separation"]


def write_jina_v3(folder, merged_task=None):
    """A checkpoint as it is published, with adapters of all products and tables, and transformers' model with one merged."""
    config = transformers.JinaEmbeddingsV3Config(**SMALL, type_vocab_size=1)
    theirs = build(transformers.JinaEmbeddingsV3Model, config)
    theirs.save_pretrained(folder)
    plain, stored, generator = load_file(folder / "model.safetensors"), {}, torch.Generator().manual_seed(8)
    for name, tensor in plain.items():
        if tensor.dim() < 2:
            stored[f"roberta.{name}"] = tensor
            continue
        layer, (rows, columns) = name.removesuffix(".weight"), tensor.shape
        is_table = "embeddings" in name
        a = torch.randn(3, *((rows, 4) if is_table else (4, columns)), generator=generator) * 0.5
        b = torch.randn(3, *((4, columns) if is_table else (rows, 4)), generator=generator) * 0.5
        stored[f"roberta.{layer}.parametrizations.weight.original"] = tensor
        stored[f"roberta.{layer}.parametrizations.weight.0.lora_A"] = a
        stored[f"roberta.{layer}.parametrizations.weight.0.lora_B"] = b
        if merged_task is not None:
            plain[name] = tensor + (a[merged_task] @ b[merged_task] if is_table else b[merged_task] @ a[merged_task]) * 0.25
    if merged_task is not None:
        other = folder / "merged"
        theirs.config.save_pretrained(other)
        save_file(plain, other / "model.safetensors", {"format": "pt"})
        theirs = transformers.JinaEmbeddingsV3Model.from_pretrained(other).eval()
    fields = {
        **SMALL, "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0, "lora_adaptations": V3_TASKS, "lora_alpha": 1, "lora_rank": 4, "lora_dropout_p": 0.0,
        "lora_main_params_trainable": False, "load_trained_adapters": True, "layer_norm_eps": 1e-5, "type_vocab_size": 1,
        "matryoshka_dimensions": [8, 16], "task_instructions": {}, "truncate_dim": None, "use_flash_attn": True,
        "pad_token_id": 1,
    }  # fmt: skip
    return rewritten(folder, fields, stored), theirs
