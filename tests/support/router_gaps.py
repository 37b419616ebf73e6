"""How close to a tie a tiny model's expert routers are, token by token: near one, rounding may change the expert and the text.

The gap is between the last chosen expert and the first one not chosen (likewise for groups of experts), computed in float64
from the router's input. With random models some token in hundreds is always near a tie; only there the tie decides (`tie_at`).
"""

import functools

import pytest
import tiny_moe
import torch
import torch.nn.functional as F
from step_contexts import context_of
from tiny_models import tiny_model
from workers.test_models import DenseAttention

from quire.workers.layers.experts import Router
from quire.workers.loading.weights import load_weights
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.parallel import Parallel

TIE = 1e-5  # of scores from 0 to 1: one router's two float32 computations differ by 4e-7, whole models' by ten times that


def tie_at(name, tokens):
    """The first of these tokens that another expert might get; None: there is none. Of models without experts: None."""
    if name.removeprefix("gpu-") not in tiny_moe.MODELS:
        return None
    near = (token_gaps(name, tuple(tokens)) <= TIE).nonzero()
    return int(near[0]) if len(near) else None


@functools.lru_cache(maxsize=64)
def token_gaps(name, tokens):
    """Of each token the least of all layers."""
    by_layer = [gaps(exact(router, h), router) for router, h in inputs_of_routers(_model(name), tokens)]
    return torch.stack(by_layer).amin(0)


def exact(router, h):
    bias = None if router.bias is None else router.bias.double()
    return F.linear(h.double(), router.weight.double(), bias)


def scores(logits, routing):
    return logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()


def gaps(logits, router):
    """Of each row of logits [T, E]."""
    routing = router.routing
    choice, found = scores(logits, routing), []
    if router.correction is not None:
        choice = choice + router.correction
    if routing.top_groups < routing.num_groups:
        grouped = choice.unflatten(1, (routing.num_groups, routing.group_size))
        best = grouped.topk(routing.group_top, -1).values.sum(-1).topk(routing.top_groups + 1, -1)
        found.append(best.values[:, -2] - best.values[:, -1])
        allowed = torch.zeros_like(grouped[:, :, 0], dtype=torch.bool).scatter_(1, best.indices[:, :-1], True)
        choice = grouped.masked_fill(~allowed[:, :, None], float("-inf")).flatten(1)
    top = choice.topk(routing.top_k + 1, -1).values
    return torch.stack([*found, top[:, -2] - top[:, -1]]).amin(0)


@functools.cache
def _model(name):
    model = build_model(read_model_config(tiny_model(name)), torch.float32, Parallel())
    load_weights(model, tiny_model(name), "cpu", progress=False)
    return model


def inputs_of_routers(model, tokens):
    """(router, h [T, H]) in the order of the layers."""
    found, forward = [], Router.forward

    def seen(router, h):
        found.append((router, h))
        return forward(router, h)

    attention = DenseAttention(model.config.attention_specs(Parallel()))
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(Router, "__call__", seen)
        model(torch.tensor(tokens, dtype=torch.int32), context_of(attention, torch.arange(len(tokens), dtype=torch.int32)))
    return found
