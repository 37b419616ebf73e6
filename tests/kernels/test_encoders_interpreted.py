"""Encoders as a GPU runs them, in Triton's interpreter: the product rotated in place, then attention over packed rows."""

import pytest
import torch
import transformers
from encoder_cases import POSITIONS, SMALL, loaded, our_hidden, pair, texts

from quire.workers.attention.packed import PackedAttention

IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
CASES = {
    "bert": ("BertModel", {}),
    "mpnet": ("MPNetModel", {"max_position_embeddings": POSITIONS + 2}),
    "modernbert": ("ModernBertModel", {**IDS, "local_attention": 10}),
    "embedding-gemma": (
        "Gemma3TextModel",
        {**IDS, "head_dim": 16, "num_key_value_heads": 2, "use_bidirectional_attention": True, "sliding_window": 12},
    ),
}


@pytest.mark.interpret
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_cpu(name, tmp_path, monkeypatch):
    cls, changes = CASES[name]
    cls = getattr(transformers, cls)
    _, ours = pair(cls, cls.config_class(**{**SMALL, **changes}), tmp_path)
    rows = texts([3, 17, 40])
    expected = our_hidden(ours, rows)

    def attend(self, layer, qkv, q_norm, k_norm, sinks=None):
        self._begin_kernels(torch.tensor(self._bounds, dtype=torch.int32))
        return self._attend_kernels(self._specs[layer], qkv, q_norm, k_norm)

    monkeypatch.setattr(PackedAttention, "attend", attend)
    for got, other in zip(our_hidden(loaded(tmp_path), rows), expected, strict=True):
        torch.testing.assert_close(got, other, rtol=2e-4, atol=2e-5)
