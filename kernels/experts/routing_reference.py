"""Routing of tokens to experts in plain torch: the oracle of `routing`, the CPU path, and a router's parameters (`Routing`).

    s = softmax(l) or sigmoid(l)        l float32 [T, E], the router's logits
    c = s + correction, or l            chooses, and does not weigh
    ids = top k of c, of the experts of the best groups where there are groups
    w = s[ids],  w / (sum of w + eps) if normalized,  w · scale

A group's rank is the sum of its best `group_top` values of c. A normalized softmax equals a softmax over the chosen logits.
"""

from typing import Literal, NamedTuple

import msgspec
import torch


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """How a layer's router chooses and weighs; the formula is the module's."""

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    by_logits: bool = False  # l chooses: sigmoids of large logits are equal
    is_normalized: bool = False
    eps: float = 0.0
    scale: float = 1.0
    num_groups: int = 1  # of equal size
    top_groups: int = 1
    group_top: int = 1

    @property
    def group_size(self) -> int:
        return self.num_experts // self.num_groups


class Counting(NamedTuple):
    """Counters of the rows that each expert gets."""

    counts: torch.Tensor  # int32 [E], added to
    num_rows: torch.Tensor  # int32 [1]: only the first num_rows rows count


def own_ids(ids: torch.Tensor, first: int, held: int) -> torch.Tensor:
    """ids relative to `first` for the rank's `held` experts from `first` on; `held` for an expert on another rank."""
    return torch.where((ids >= first) & (ids < first + held), ids - first, held)


def count(ids: torch.Tensor, counting: Counting) -> None:
    """Add the experts ids [T, k] of the rows that count to the counters."""
    real = ids[: int(counting.num_rows)].flatten()
    counting.counts.add_(torch.bincount(real, minlength=len(counting.counts)))


def route(logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int32 [T, top_k], best first; weights float32 [T, top_k]) of logits float32 [T, E]; correction float32 [E]."""
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    choice = logits if routing.by_logits else scores
    choice = choice if correction is None else choice + correction
    if routing.top_groups < routing.num_groups:
        grouped = choice.unflatten(1, (routing.num_groups, routing.group_size))
        ranks = grouped.topk(routing.group_top, -1).values.sum(-1)
        best = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, ranks.topk(routing.top_groups, -1).indices, True)
        choice = grouped.masked_fill(~best[:, :, None], float("-inf")).flatten(1)
    ids = choice.topk(routing.top_k, -1).indices
    weights = scores.gather(1, ids)
    if routing.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.eps)
    return ids.int(), weights * routing.scale if routing.scale != 1.0 else weights
