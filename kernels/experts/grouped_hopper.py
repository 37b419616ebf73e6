"""Code shared by `four_bits_wide` and `wide`, for Hopper (Gluon): the tiles that a program walks, and how it stores one.

A program walks items p, p + programs, ... of places (`grouped`) x tiles of columns. Within a band of BAND places they go by
columns, so that programs that run at the same time share rows of an expert's weights, and rows of x, in L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.elementwise import activation
from quire.kernels.triton_support import dependent_launch
from quire.kernels.tuning.configs import WideTile

STRIPE = gl.constexpr(64)  # rows of W in a wgmma
BAND = gl.constexpr(8)  # places
SHARED_BYTES = 224 * 1024  # of an SM, for rings
MAX_STAGES = 8
REGISTERS = 65536  # of an SM
THREADS = 3 * 128  # of a program: three warpgroups, of which the producer's is only one warp
PRODUCER_REGISTERS = 24

_gated = gluon.jit(activation.gated.fn)
wait_for_previous = gluon.jit(dependent_launch.wait_for_previous.fn)


@gluon.jit
def place_of(item, count, columns, slots):
    """(place, tile of columns) of an item; beyond the last item any valid place."""
    band = item // (BAND * columns)
    size = gl.maximum(gl.minimum(count - band * BAND, BAND), 1)
    inside = item - band * (BAND * columns)
    place = band * BAND + inside % size
    return gl.minimum(place, slots - 1), inside // size


@gluon.jit
def swiglu(gate, up, dtype: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, OFFSET: gl.constexpr, CUBIC: gl.constexpr):
    """As `swiglu.swiglu`."""
    if LIMIT == 0.0 and ALPHA == 1.0 and OFFSET == 0.0 and CUBIC == 0.0:
        return _gated(gate, up, dtype)
    gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
    if LIMIT > 0.0:
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    inner = gate
    if CUBIC != 0.0:
        inner = gate + CUBIC * gate * gate * gate
    return gate / (1.0 + gl.exp(-ALPHA * inner)) * (up + OFFSET)


@gluon.jit
def relu2(up, dtype: gl.constexpr):
    """As `swiglu.ungated`, of Relu2."""
    up = up.to(dtype).to(gl.float32)
    return gl.where(up > 0.0, up * up, 0.0)


@gluon.jit
def store(values, output, begin, size, first_column, N, PLACED: gl.constexpr, BLOCK_M: gl.constexpr, WIDTH: gl.constexpr):
    """Store results [WIDTH, BLOCK_M] for output columns from first_column on and places from `begin` on: if PLACED, at these
    places, else times their weights and at their pairs. Each thread stores its own values: see the end of
    attention/prefill_hopper_consumer.
    """
    out_ptr, order_ptr, weights_ptr = output
    layout: gl.constexpr = values.type.layout
    columns = first_column + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, layout))
    lines = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
    live = lines < size
    if PLACED:
        rows = begin + lines
    else:
        rows = gl.load(order_ptr + begin + lines, live, other=0)
        values = values * gl.load(weights_ptr + rows, live, other=0.0)[None, :]
    at = rows.to(gl.int64)[None, :] * N + columns[:, None]
    gl.store(out_ptr + at, values.to(out_ptr.dtype.element_ty), (columns < N)[:, None] & live[None, :])


def stages(tile: WideTile, stage_bytes: int) -> int:
    """As many as fit for a program's ring; less than two: the kernel cannot be used."""
    return min((SHARED_BYTES // tile.sharing - 2048) // stage_bytes, MAX_STAGES)


def registers(sharing: int) -> tuple[int, int]:
    """Registers a thread: at the start, for so many programs an SM, and of a consumer after the producer gave up its own."""
    most = REGISTERS // (sharing * THREADS) // 8 * 8
    return most, min(240, (3 * most - PRODUCER_REGISTERS) // 2 // 8 * 8)


def programs(slots: int, columns: int, sms: int, sharing: int) -> int:
    return min(slots * columns, sms * sharing)
