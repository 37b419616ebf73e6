"""Scores of labels: their activation, as config.json names it, and the labels' names."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from quire.workers.models.config import ModelConfigError

LabelActivation = Literal["identity", "sigmoid", "softmax"]

_BY_PROBLEM: dict[str, LabelActivation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_BY_CLASS: dict[str, LabelActivation] = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}


def activate_labels(logits: torch.Tensor, activation: LabelActivation) -> torch.Tensor:
    """logits float32 [N, labels] -> the same of the activation's values."""
    if activation == "sigmoid":
        return torch.sigmoid(logits)
    return torch.softmax(logits, -1) if activation == "softmax" else logits


def label_activation(fields: Mapping[str, Any], num_labels: int) -> LabelActivation:
    """As a cross-encoder of sentence-transformers says, else by `problem_type`, else softmax over several labels and the
    sigmoid of one. Raises ModelConfigError."""
    nested = fields.get("sentence_transformers")
    name = nested.get("activation_fn") if isinstance(nested, Mapping) else None
    name = name or fields.get("sbert_ce_default_activation_function")
    if name is not None:
        kind = str(name).rpartition(".")[2]
        if not str(name).startswith("torch.nn.modules.") or kind not in _BY_CLASS:
            known = ", ".join(f"torch.nn.modules.*.{known}" for known in _BY_CLASS)
            raise ModelConfigError(
                f"config.json: the activation {name!r:.80} of scores is not supported; supported are {known}"
            )
        return _BY_CLASS[kind]
    problem = fields.get("problem_type")
    if problem is None:
        return "softmax" if num_labels > 1 else "sigmoid"
    if problem not in _BY_PROBLEM:
        known = ", ".join(_BY_PROBLEM)
        raise ModelConfigError(f"config.json: problem_type {problem!r:.60} is not supported; supported are {known}")
    return _BY_PROBLEM[problem]


def labels_of(fields: Mapping[str, Any]) -> list[str]:
    """The names of the labels, by id2label, else by num_labels; transformers' default is two. Raises ModelConfigError."""
    named = fields.get("id2label")
    if isinstance(named, Mapping) and named:
        try:
            by_id = {int(i): str(label) for i, label in named.items()}
        except ValueError:
            raise ModelConfigError("config.json: id2label must name labels by their numbers") from None
        if sorted(by_id) != list(range(len(by_id))):
            raise ModelConfigError(f"config.json: id2label must have the numbers 0 to {len(by_id) - 1}")
        return [by_id[i] for i in range(len(by_id))]
    count = fields.get("num_labels", 2)
    if type(count) is not int or not 1 <= count <= 1 << 16:
        raise ModelConfigError(f"config.json: num_labels must be a positive integer, not {count!r:.40}")
    return [f"LABEL_{i}" for i in range(count)]
