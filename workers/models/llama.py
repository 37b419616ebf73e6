"""Llama 2 and 3.x, and the many checkpoints that share the architecture. Full attention; optional biases, of attention
(q, k, v and o) and of the MLP. Rotary scaling (linear, llama3, yarn) is in the runner's table, see rope.py.
"""

from quire.workers.models.config import ModelConfig
from quire.workers.models.decoder import CausalLM, Placement, Variant


class LlamaForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, place: Placement):
        bias = config.attention_bias
        super().__init__(config, Variant(qkv_bias=bias, o_bias=bias, mlp_bias=config.mlp_bias), place)
