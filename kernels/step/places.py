"""The parts of `step_inputs`' kernel that write what the places of items say of tokens."""

import triton
import triton.language as tl

from quire.ipc.step.sections import PLACE, SLOT

PLACE_WORDS, PLACE_ROTARY = tl.constexpr(PLACE.width), tl.constexpr(PLACE.at["rotary_0"])
PLACE_LAST_VISIBLE = tl.constexpr(PLACE.at["last_visible"])
S_ROTARY_DELTA = tl.constexpr(SLOT.at["rotary_delta"])


@triton.jit
def write_places(
    rotary, stride, last_visible, is_inside, is_token, position, params, is_decode, place, is_placed,
    AXES: tl.constexpr, SEES_AHEAD: tl.constexpr,
):  # fmt: skip
    """Write the positions of some tokens on each axis, `stride` apart: those of `place`, or `position`, in decode rows with the
    delta of their slot, of which `params` are the words; and the last positions that they see: those of `place`, if they are
    behind `position`. Padded tokens get 0."""
    if SEES_AHEAD:
        last = tl.maximum(position, tl.load(place + PLACE_LAST_VISIBLE, is_placed, other=0))
        tl.store(last_visible, tl.where(is_token, last, 0), is_inside)
    if AXES > 0:
        position += tl.load(params + S_ROTARY_DELTA, is_decode, other=0)
        for axis in tl.static_range(AXES):
            placed = tl.load(place + PLACE_ROTARY + axis, is_placed, other=0)
            turn = tl.where(is_token, tl.where(is_placed, placed, position), 0)
            tl.store(rotary + axis * stride, turn, is_inside)
