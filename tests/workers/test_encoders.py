"""Encoders in float32 against transformers' own models, on tiny random checkpoints; batched rows against rows alone."""

import pytest
import torch
import transformers
from encoder_cases import HIDDEN, POSITIONS, SMALL, VOCAB, our_hidden, pair, texts, their_hidden, types_of

LENGTHS = [1, 2, 7, 33]


def roberta(name: str, **changes):
    fields = {**SMALL, "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1, "type_vocab_size": 1}
    return (f"{name}Model", {**fields, **changes})


IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id"), 0)
DISTIL = {
    "vocab_size": VOCAB, "dim": HIDDEN, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": POSITIONS,
}  # fmt: skip
MODERN = {**SMALL, **IDS, "num_hidden_layers": 4, "local_attention": 10}
GEMMA = {
    **SMALL, **IDS, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 20,
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
# name -> (transformers' class, its config's fields)
CASES = {
    "bert": ("BertModel", {**SMALL, "hidden_act": "gelu"}),
    "bert-relu": ("BertModel", {**SMALL, "hidden_act": "relu", "layer_norm_eps": 1e-5}),
    "roberta": roberta("Roberta"),
    "xlm-roberta": roberta("XLMRoberta", type_vocab_size=2),
    "camembert": roberta("Camembert"),
    "distilbert": ("DistilBertModel", DISTIL),
    "mpnet": ("MPNetModel", {**SMALL, "max_position_embeddings": POSITIONS + 2}),
    "modernbert": ("ModernBertModel", MODERN),
    "modernbert-biases": ("ModernBertModel", {**MODERN, "norm_bias": True, "attention_bias": True, "mlp_bias": True}),
    "embedding-gemma": ("Gemma3TextModel", {**GEMMA, "use_bidirectional_attention": True}),
    "gemma3-causal": ("Gemma3TextModel", GEMMA),
    "nomic": ("NomicBertModel", SMALL),
    "gte": ("GteModel", {**SMALL, "type_vocab_size": 2}),
    "gte-untyped": ("GteModel", {**SMALL, "type_vocab_size": 0}),
    "eurobert": ("EuroBertModel", {**SMALL, "num_key_value_heads": 2, **IDS}),
    "jina-v3": ("JinaEmbeddingsV3Model", {**SMALL, "type_vocab_size": 2}),
}
HAS_TYPES = {"bert", "bert-relu", "xlm-roberta", "nomic", "gte", "jina-v3"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    kept = {}

    def make(name):
        if name not in kept:
            cls, fields = CASES[name]
            cls = getattr(transformers, cls)
            kept[name] = pair(cls, cls.config_class(**fields), tmp_path_factory.mktemp(name))
        return kept[name]

    return make


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_equal_transformers(made, name):
    theirs, ours = made(name)
    rows = texts([*LENGTHS, POSITIONS])
    types = types_of(rows) if name in HAS_TYPES else None
    for i, got in enumerate(our_hidden(ours, rows, types)):
        expected = their_hidden(theirs, rows[i], None if types is None else types[i])
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_rows_in_any_company_equal_rows_alone(made, name):
    ours = made(name).ours
    rows = texts([3, 20, 3, 1, 20, 41])
    alone = [our_hidden(ours, [row])[0] for row in rows]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 4, 2]):
        together = our_hidden(ours, [rows[i] for i in order])
        for i, got in zip(order, together, strict=True):
            a, b = (torch.nn.functional.normalize(x, dim=-1) for x in (got, alone[i]))
            assert (a - b).abs().max() <= 1e-6
