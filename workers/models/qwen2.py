"""Qwen2 and Qwen2.5: Llama's block with biases of q, k and v, and none of o. With `use_sliding_window`, layers from
`max_window_layers` on see a window and those before see everything: two KV groups (`config.windows`).
"""

from quire.workers.models.config import ModelConfig
from quire.workers.models.decoder import CausalLM, Placement, Variant


class Qwen2ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, place: Placement):
        super().__init__(config, Variant(qkv_bias=True), place)
