"""Functions that the kernels of decode rows with windows share: a program finds what it applies to its row's state.

See rows.Windows.
"""

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent.rows import Rows


@triton.jit
def kept_row(
    row, start, stop, own_ptr, slots_ptr, num_kept_ptr, first_kept_ptr, seq_len_ptr, keep_at_ptr, keep_state_ptr, num_inputs
):  # fmt: skip
    """(own state, first kept token, number of kept tokens to apply, position of the first of them, position of the row's first
    token, how many are applied when the state is left, where it is left). It is left nowhere else if the number is -1.

    As rows.Rows.kept_rows; but a state that ends at the place where it is left is not left apart.
    """
    slot, own = tl.load(slots_ptr + row), tl.load(own_ptr + row)
    position, state = tl.load(seq_len_ptr + slot), tl.load(keep_state_ptr + slot)
    count = tl.minimum(tl.maximum(tl.load(num_kept_ptr + slot), 0), num_inputs)
    first = tl.minimum(tl.maximum(tl.load(first_kept_ptr + slot), 0), num_inputs - count)
    begin = position - count
    leaves = tl.load(keep_at_ptr + slot) - begin
    is_left = (leaves >= (start < stop).to(tl.int32)) & (leaves <= count)
    count = tl.where(is_left & (state == own), leaves, count)
    leaves = tl.where(is_left & (state != own), leaves, -1)
    return own, first, count, begin, position, leaves, state


def tables_of(rows: Rows) -> tuple[torch.Tensor, ...]:
    """The arguments of `kept_row` between the states and the number of kept inputs."""
    w = rows.windows
    assert w is not None
    return w.slots, w.num_kept, w.first_kept, w.seq_len, w.keep_at, w.keep_state


def num_programs(rows: Rows) -> int:
    """Programs for decode rows; those of other rows find that they have nothing to do."""
    return rows.num_decode_rows or len(rows.own)
