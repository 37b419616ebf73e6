"""Tiny models of token vectors: ColBERT in the formats of its own code and of pylate, and BGE-M3; and their formulas.

FlagEmbedding/inference/embedder/encoder_only/m3.py and finetune/embedder/encoder_only/m3/modeling.py (dense, sparse, colbert);
colbert/modeling/checkpoint.py and pylate/models/colbert.py (markers, [MASK] that others do not see, a norm of each token).
"""

import json

import torch
import transformers
from encoder_cases import HIDDEN, POSITIONS, SMALL, add_tokenizer, build, their_hidden
from safetensors.torch import load_file, save_file

F = torch.nn.functional
ST, SIZE, QUERY_LENGTH = "sentence_transformers.models.", 8, 12
QUERY, DOCUMENT, MASK, SKIPPED = 90, 91, 4, 70  # ids of w85, w86, [MASK], w65


@torch.no_grad()
def by_formula(theirs, weight, ids, mask=None):
    mask = None if mask is None else torch.tensor([mask])
    states = theirs(input_ids=torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
    return F.normalize(states @ weight.T, dim=-1).numpy()


def make_colbert(kind, folder):
    """(folder, the encoder, the product, whether the query's tokens see what fills it)."""
    attends = kind == "modernbert"
    if kind == "modernbert":
        ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
        config = transformers.ModernBertConfig(**SMALL, **ids, local_attention=20)
        theirs = build(transformers.ModernBertModel, config)
    else:
        theirs = build(transformers.BertModel, transformers.BertConfig(**SMALL))
    theirs.save_pretrained(folder)
    add_tokenizer(folder)
    weight = torch.randn(SIZE, HIDDEN, generator=torch.Generator().manual_seed(1))
    if kind == "stanford":
        tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file({**tensors, "linear.weight": weight}, folder / "model.safetensors")
        fields = {**json.loads((folder / "config.json").read_text()), "architectures": ["HF_ColBERT"]}
        (folder / "config.json").write_text(json.dumps(fields))
        settings = {"query_token_id": "w85", "doc_token_id": "w86", "query_maxlen": QUERY_LENGTH, "doc_maxlen": 30}
        (folder / "artifact.metadata").write_text(json.dumps({**settings, "mask_punctuation": False}))
        return folder, theirs, weight, attends
    modules = [("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense")]
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Dense").mkdir()
    dense = {"in_features": HIDDEN, "out_features": SIZE, "bias": False}
    (folder / "1_Dense" / "config.json").write_text(
        json.dumps({**dense, "activation_function": "torch.nn.modules.linear.Identity"})
    )
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
    settings = {
        "query_prefix": "w85 ",
        "document_prefix": "w86 ",
        "query_length": QUERY_LENGTH,
        "document_length": 30,
        "attend_to_expansion_tokens": attends,
        "skiplist_words": ["w65"],
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder, theirs, weight, attends


def make_m3(folder):
    """A tiny BGE-M3: its weights are files of torch.save alone."""
    fields = {**SMALL, "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1, "type_vocab_size": 1}
    theirs = build(transformers.XLMRobertaModel, transformers.XLMRobertaConfig(**fields))
    theirs.config.architectures = ["XLMRobertaModel"]
    theirs.config.save_pretrained(folder)
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    add_tokenizer(folder)
    generator = torch.Generator().manual_seed(9)
    for name, size in (("sparse_linear", 1), ("colbert_linear", HIDDEN)):
        linear = torch.nn.Linear(HIDDEN, size)
        for parameter in linear.parameters():
            parameter.data.normal_(0.0, 0.5, generator=generator)
        torch.save(linear.state_dict(), folder / f"{name}.pt")
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    listed = [{"idx": i, "name": str(i), "path": path, "type": f"{ST}{kind}"} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    return folder, theirs


def expected_of_m3(folder, theirs, row, unused):
    linears = [torch.load(folder / f"{name}.pt", weights_only=True) for name in ("sparse_linear", "colbert_linear")]
    states = their_hidden(theirs, row)
    weights = torch.relu(F.linear(states, linears[0]["weight"], linears[0]["bias"])).squeeze(1).tolist()
    sparse = {}
    for token, weight in zip(row, weights, strict=True):
        if token not in unused and weight > 0:
            sparse[token] = max(weight, sparse.get(token, 0.0))
    tokens = F.normalize(F.linear(states[1:], linears[1]["weight"], linears[1]["bias"]), dim=-1)
    return F.normalize(states[0], dim=-1).numpy(), sparse, tokens.numpy()
