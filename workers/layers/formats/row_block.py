"""A decoder block's products behind attention, of one row, in one persistent kernel (kernels/persistent): for 8-bit weights."""

from dataclasses import dataclass

import torch

from quire.kernels.linear.scaled import BLOCK
from quire.kernels.persistent.plan import TILE, Block, Config, Next, Weight, choose
from quire.kernels.triton_support import hopper
from quire.kernels.triton_support.dependent_launch import LATE, mode_for
from quire.workers.layers.formats.format import Projected


@dataclass(frozen=True)
class RowBlock:
    """`format.RowBlock`."""

    block: Block
    following: Next | None
    config: Config
    state: torch.Tensor

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor | Projected, torch.Tensor]:
        from quire.kernels.persistent.scaled_block import launch  # Gluon, which another Triton may not have

        y = launch(x, residual, self.block, self.following, self.state, self.config, pdl=min(mode_for(1), LATE))
        return y.parts if y.qkv is None else Projected(y.qkv), y.residual


def row_block(block: Block, following: Next | None, state: torch.Tensor, dtype: torch.dtype) -> RowBlock | None:
    """None: the kernel does not take the block."""
    weights = block.o, block.gate_up, block.down
    (hidden, attended), inner, device = block.o.scaled.data.shape, block.down.scaled.data.shape[1], state.device
    if dtype.itemsize != 2 or not hopper.available(device) or not all(_is_fit(weight, block.o) for weight in weights):
        return None
    if block.gate_up.scaled.data.shape != (2 * inner, hidden) or len(block.down.scaled.data) != hidden:
        return None
    if following is not None and not (_is_fit(following.qkv, block.o) and len(following.qkv.scaled.data) % TILE == 0):
        following = None
    config = choose(hidden, attended, inner, hopper.num_sms(device), block.o.scaled.rows == BLOCK)
    return None if config is None else RowBlock(block, following, config, state)


def _is_fit(weight: Weight, first: Weight) -> bool:
    """Whether scales are of rows, or of squares, as the first weight's, and TMA can copy the weight."""
    scaled = weight.scaled
    is_plain = scaled.rows == (BLOCK if scaled.scales.shape[1] > 1 else 1) and hopper.can_copy(scaled.data)
    return is_plain and scaled.rows == first.scaled.rows and scaled.data.dtype == first.scaled.data.dtype
