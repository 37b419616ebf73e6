"""Heads behind an encoder's hidden states: scores of texts or tokens by label, and what stands before a vocabulary's logits.

An encoder's family reads config.json into a HeadSpec, and models/encoder.py makes the Head.
"""

from typing import Literal

import msgspec
import torch

from quire.kernels.elementwise.activation_cpu import Activation
from quire.workers.layers import ops
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import NormSpec, make_norm
from quire.workers.shard import whole

HeadKind = Literal["sequence", "token", "masked_lm"]
HeadPooling = Literal["cls", "mean", "lasttoken", "late"]


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A head: a dense layer of the hidden size with its activation, a norm and a product, of which the first two may lack.

    sequence: a score for each label of a text; token: of each of its tokens; masked_lm: a logit for each of the vocabulary.
    """

    kind: HeadKind
    num_outputs: int  # labels; of masked_lm the vocabulary
    pooling: HeadPooling = "cls"  # sequence: the head's input; late: the mean of the outputs of all tokens
    dense: Activation | None = None  # the activation behind the dense layer; None: there is no dense layer
    dense_bias: bool = True
    norm: NormSpec | None = None
    out_bias: bool = True


class Head(Module):
    """norm(activation(dense(x))), and out of it, each if the spec has it: x [N, H] -> [N, labels], or [N, H] for masked_lm.

    Every rank has all of it: it is small beside a layer, and computed for few rows.
    """

    def __init__(self, spec: HeadSpec, hidden_size: int, place: Placement):
        super().__init__()
        hidden = whole(hidden_size)
        place = place._replace(quantization=None)
        if spec.dense is not None:
            self.dense_layer = Linear(hidden, {"dense": hidden}, spec.dense_bias, place)
        if spec.norm is not None:
            self.norm = make_norm(spec.norm, hidden_size, place.dtype, place.device)
        if spec.kind != "masked_lm":
            self.out_layer = Linear(hidden, {"out": whole(spec.num_outputs)}, spec.out_bias, place)
        self.spec = spec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.spec.dense is not None:
            x = ops.activate(self.dense_layer(x), self.spec.dense)
        if self.spec.norm is not None:
            x = self.norm(x)
        return x if self.spec.kind == "masked_lm" else self.out_layer(x)
