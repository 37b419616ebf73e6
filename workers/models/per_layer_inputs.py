"""Inputs of each layer besides the residual stream (Gemma 3n, Gemma 4), computed from a token's id and its embedding.

    inputs[t, l] = (norm(W e[t] / √H)[l] + √P · table[id[t]][l]) / √2          e [T, H] embeddings, inputs [T, layers, P]

The table is as large as many layers together; every rank has the whole table. The decoder calls this once a step, if the
model's spec has it, and passes the result to all blocks.
"""

import torch

from quire.workers.layers import ops
from quire.workers.layers.embedding import Embedding
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import RMSNorm
from quire.workers.models.config import ModelConfig, PerLayerSpec
from quire.workers.shard import whole

NAME = "per_layer_inputs"  # of the module, in the decoder
CHILDREN = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")  # in the checkpoint, too


class PerLayerInputs(Module):
    def __init__(self, config: ModelConfig, spec: PerLayerSpec, place: Placement):
        super().__init__()
        self._shape, hidden = (len(config.layers), spec.size), config.hidden_size
        width, scale = len(config.layers) * spec.size, float(torch.tensor(spec.size**0.5, dtype=place.dtype, device="cpu"))
        self.embed_tokens_per_layer = Embedding(spec.vocab_size, width, place.dtype, place.device, scale, place.table_dtype)
        outputs = {"per_layer_model_projection": whole(width)}
        self.per_layer_model_projection = Linear(whole(hidden), outputs, False, place.at("model"))
        # the norm of x / √H equals the norm of x with eps · H
        norm = (spec.size, config.rms_norm_eps * hidden, place.dtype, place.device)
        self.per_layer_projection_norm = RMSNorm(*norm, weighs="wide")

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[T, layers, P] of input_ids int32 [T] and embedded [T, H]."""
        output = self.per_layer_model_projection(embedded).unflatten(1, self._shape)
        norm = self.per_layer_projection_norm
        inputs = ops.rms_norm(output, norm.weight, norm.eps, output, weighs="wide")
        return inputs.add_(self.embed_tokens_per_layer(input_ids).view_as(inputs)).mul_(0.5**0.5)
