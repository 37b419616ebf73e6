"""Heads behind hidden states: a text's or token's scores by label, and what a masked language model's products need.

`Head` is made by models/encoder.py from a HeadSpec. `label_activation` and `score_activation` read which function of the logits
a user gets, as sentence-transformers and transformers write it into config.json.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from quire.workers.layers import ops
from quire.workers.layers.linear import Linear, Placement
from quire.workers.layers.module import Module
from quire.workers.layers.norm import make_norm
from quire.workers.pooling.specs import HeadSpec
from quire.workers.shard import whole

LabelActivation = Literal["identity", "sigmoid", "softmax"]

_BY_PROBLEM: dict[str, LabelActivation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_BY_CLASS: dict[str, LabelActivation] = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}


class HeadError(ValueError):
    """config.json asks for a function of the labels' logits that is not served; the text names the field."""


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


def activate_labels(logits: torch.Tensor, activation: LabelActivation) -> torch.Tensor:
    """float32 of logits [N, labels]."""
    wide = logits.float()
    if activation == "sigmoid":
        return torch.sigmoid(wide)
    return torch.softmax(wide, -1) if activation == "softmax" else wide


def label_activation(fields: Mapping[str, Any], num_labels: int) -> LabelActivation:
    """For classification: by `problem_type`, else softmax over several labels and the sigmoid of one. Raises HeadError."""
    problem = fields.get("problem_type")
    if problem is None:
        return "softmax" if num_labels > 1 else "sigmoid"
    if problem not in _BY_PROBLEM:
        raise HeadError(f"config.json: problem_type {problem!r:.60} is not supported; supported are {', '.join(_BY_PROBLEM)}")
    return _BY_PROBLEM[problem]


def score_activation(fields: Mapping[str, Any], num_labels: int) -> LabelActivation:
    """For the scores of pairs: what a cross-encoder of sentence-transformers says, else the sigmoid of one label.

    It is in config.json's `sentence_transformers.activation_fn`, once `sbert_ce_default_activation_function`, as the name of a
    class of torch. Raises HeadError.
    """
    nested = fields.get("sentence_transformers")
    nested = nested if isinstance(nested, Mapping) else {}
    name = nested.get("activation_fn") or fields.get("sbert_ce_default_activation_function")
    if name is None:
        return "sigmoid" if num_labels == 1 else "identity"
    kind = str(name).rpartition(".")[2]
    if not str(name).startswith("torch.nn.modules.") or kind not in _BY_CLASS:
        known = ", ".join(f"torch.nn.modules.*.{kind}" for kind in _BY_CLASS)
        raise HeadError(f"config.json: the activation {name!r:.80} of scores is not supported; supported are {known}")
    return _BY_CLASS[kind]
