"""A tiny jina-embeddings-v5: Qwen3's layers ("small") or EuroBERT's ("nano"), and adapters of two tasks."""

import json

import torch
import transformers
from encoder_cases import SMALL, build
from safetensors.torch import save_file

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
