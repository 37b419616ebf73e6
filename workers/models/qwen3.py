"""Qwen3 (dense): Llama's block with an RMSNorm on each head of q and k before the rotation, and optional attention biases.
Windows as in Qwen2. The head size is its own field and often not hidden_size / num_heads.
"""

from quire.workers.models.config import ModelConfig
from quire.workers.models.decoder import CausalLM, Placement, Variant


class Qwen3ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, place: Placement):
        bias = config.attention_bias
        super().__init__(config, Variant(qkv_bias=bias, o_bias=bias, qk_norm=True), place)
