"""Products of neighboring modules that one kernel computes together, found after a model's blocks are built.

There is one such kernel (kernels/persistent/scaled_block.py), for one row and 8-bit weights. It computes what follows attention
in a block: o_proj, the norm, gate, up and down; and then, if it can, the next block's norm and its q, k and v. Families' blocks
are unaware of it: decoder.py calls what `fuse_blocks` returns. For more rows, or where a sum over ranks or an adapter comes
between the products, a fused block runs the products of the block itself. Imports Triton.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from quire.kernels.linear.scaled import BLOCK
from quire.kernels.persistent import plan
from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import LATE, mode_for
from quire.workers.layers.formats.format import WeightFormat
from quire.workers.layers.formats.scaled import ScaledFormat
from quire.workers.layers.norm import Norm
from quire.workers.models.blocks import PreNormBlock
from quire.workers.models.step_context import StepContext
from quire.workers.parallel import Parallel


class NextQKV(NamedTuple):
    """A fused block's output if its kernel went on to the next block: that block's q, k and v, [1, N]."""

    qkv: torch.Tensor


@dataclass(frozen=True)
class RowKernel:
    """(attention's output [1, K], residual) -> (output, residual without it), or (NextQKV, residual with the output added)."""

    block: plan.Block
    following: plan.Next | None
    config: plan.Config
    state: torch.Tensor

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor | NextQKV, torch.Tensor]:
        from quire.kernels.persistent.scaled_block import launch  # Gluon, which another Triton may not have

        y = launch(x, residual, self.block, self.following, self.state, self.config, pdl=min(mode_for(1), LATE))
        return y.parts if y.qkv is None else NextQKV(y.qkv), y.residual


class FusedBlock:
    """Called like the block. following: the block that runs next; if that is a FusedBlock, too, it takes `NextQKV`."""

    def __init__(self, block: PreNormBlock, following: PreNormBlock | None, device: torch.device):
        self.block, self.following = block, following
        self._state = plan.new_state(device)  # made before any graph is captured

    def __call__(
        self,
        x: torch.Tensor | NextQKV | None,
        residual: torch.Tensor,
        context: StepContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | NextQKV, torch.Tensor]:
        block, attention = self.block, self.block.self_attn
        is_row = len(residual if logits_indices is None else logits_indices) == 1
        kernel = self.kernel if is_row and not context.has_adapters else None
        if isinstance(x, NextQKV):
            qkv = x.qkv
        elif kernel is None:
            return block(x, residual, context, logits_indices)  # type: ignore[no-any-return]
        else:
            qkv, residual = attention.qkv_proj.normed(x, residual, block.input_layernorm)
        heads, residual = attention.heads(qkv, residual, context, logits_indices)
        if kernel is not None:
            return kernel(heads, residual)
        return block.mlp(attention.output(heads), residual, block.post_attention_layernorm)

    @functools.cached_property
    def kernel(self) -> RowKernel | None:
        """The kernel for what follows attention; None if there is none for these weights. Known once they are loaded."""
        block, after = self.block, self.following
        if not block.mlp.is_silu:
            return None
        o, gate_up, down = (x.bare_format for x in (block.self_attn.o_proj, block.mlp.gate_up_proj, block.mlp.down_proj))
        following = None if after is None else (after.input_layernorm, after.self_attn.qkv_proj.bare_format)
        return find_kernel(o, block.post_attention_layernorm, gate_up, down, following, self._state)


def fuse_blocks(blocks: Iterable[nn.Module], parallel: Parallel) -> list[Any]:
    """The callables to run in place of `blocks`, which run one after another.

    A pipeline stage's blocks stay as they are: its sends may occupy an SM while the next step begins, and the kernel needs all
    SMs at once.
    """
    blocks = list(blocks)
    if not (parallel.stage.is_first and parallel.stage.is_last):
        return blocks
    return [
        FusedBlock(block, after if isinstance(after, PreNormBlock) else None, parallel.device)
        if isinstance(block, PreNormBlock)
        else block
        for block, after in zip(blocks, [*blocks[1:], None], strict=True)
    ]


def find_kernel(
    o: WeightFormat | None,
    norm: Norm,
    gate_up: WeightFormat | None,
    down: WeightFormat | None,
    following: tuple[Norm, WeightFormat | None] | None,
    state: torch.Tensor,
) -> RowKernel | None:
    """The kernel for these weights and `norm`, the one before gate and up; None if it cannot compute with them.

    following: the next block's norm and q, k and v, which the kernel includes if it can.
    """
    if not isinstance(o, ScaledFormat) or not norm.is_plain:
        return None
    first, second, third = (_weight_and_bias(weights, o) for weights in (o, gate_up, down))
    if first is None or second is None or third is None:
        return None
    if any(bias is not None for _, bias in (first, second, third)):
        return None
    block, after = plan.Block(first[0], second[0], third[0], norm.weight, norm.eps, o.by_block), None
    if following is not None and following[0].is_plain and (qkv := _weight_and_bias(following[1], o)) is not None:
        after = plan.Next(*qkv, following[0].weight, following[0].eps)
    return _kernel_of(block, after, state, o.dtype)


def _weight_and_bias(weights: WeightFormat | None, o: ScaledFormat) -> tuple[plan.Weight, torch.Tensor | None] | None:
    """A format's weight and bias; None unless it has one weight, and quantizes and multiplies inputs as o_proj does."""
    if not isinstance(weights, ScaledFormat) or len(weights.weights) > 1 or weights.by_block != o.by_block:
        return None
    weight, bias = weights.weights[0]
    return plan.Weight(weight.scaled, weight.input_scale), bias


def _kernel_of(block: plan.Block, after: plan.Next | None, state: torch.Tensor, dtype: torch.dtype) -> RowKernel | None:
    weights = block.o, block.gate_up, block.down
    (hidden, attended), inner, device = block.o.scaled.data.shape, block.down.scaled.data.shape[1], state.device
    if dtype.itemsize != 2 or not hopper.available(device) or not all(_fits(weight, block.o) for weight in weights):
        return None
    if block.gate_up.scaled.data.shape != (2 * inner, hidden) or len(block.down.scaled.data) != hidden:
        return None
    if after is not None and not (_fits(after.qkv, block.o) and len(after.qkv.scaled.data) % plan.TILE == 0):
        after = None
    config = plan.choose(hidden, attended, inner, hopper.num_sms(device), block.o.scaled.rows == BLOCK)
    return None if config is None else RowKernel(block, after, config, state)


def _fits(weight: plan.Weight, first: plan.Weight) -> bool:
    """Whether the weight has the first's dtype and kind of scales (per row, or per 128 x 128), and TMA can copy it."""
    scaled = weight.scaled
    is_plain = scaled.rows == (BLOCK if scaled.scales.shape[1] > 1 else 1) and hopper.can_copy(scaled.data)
    return is_plain and scaled.rows == first.scaled.rows and scaled.data.dtype == first.scaled.data.dtype
