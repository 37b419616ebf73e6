"""Mistral: Llama's block without biases. All layers see the last `sliding_window` tokens (Mistral 7B v0.1), or everything
(later ones); that is `config.windows`, which the KV groups and the attention read.
"""

from quire.workers.models.config import ModelConfig
from quire.workers.models.decoder import CausalLM, Placement, Variant


class MistralForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, place: Placement):
        super().__init__(config, Variant(), place)
