"""One direction between two GPUs of a host, from rank to rank: slots in the receiver's memory, which the sender writes.

    sender      waits until turn n - slots was taken;  copies into slot n % slots of its peer;  says there: n + 1 have arrived
    receiver    waits until n + 1 have arrived;        copies the slot to its own tensor;      says there: n + 1 are taken

Both ends count turns on the host and pass the turn to each launch: these launches run between graphs, not in one. The two
counters are int32 words, each in the memory of the GPU that waits for it; they are compared by their difference, since they
wrap around. A counter is written by a launch of its own after the copy's (release, system scope), and read by one before the
launch that needs the data (acquire): stores of earlier launches are visible. A wait is bounded: after `limit_ns` it traps.

Moves the words once over the link and once more in the receiver's memory.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.exchange.waiting import trap

BLOCK = 4096  # int32 words of one program
NUM_WARPS = 8


class Sender(NamedTuple):
    """taken: int32 [1] in this GPU's memory. Addresses are of the peer's memory, as mapped on this GPU.

    unit: a message is a multiple of so many words; if 4 or more, they are stored together.
    """

    taken: torch.Tensor
    arrived: int
    slots: int
    num_slots: int
    slot_bytes: int
    unit: int
    limit_ns: int


class Receiver(NamedTuple):
    """arrived: int32 [1], slots uint8 [num_slots, slot_bytes], both in this GPU's memory; `taken` is a peer's address."""

    arrived: torch.Tensor
    taken: int
    slots: torch.Tensor
    limit_ns: int


@triton.jit(do_not_specialize=["least", "limit_ns"])
def _wait_kernel(counter_ptr, least, limit_ns):
    count = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="sys")
    if count - least < 0:
        begin = tl.extra.cuda.globaltimer()
        while count - least < 0:
            count = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="sys")
            if tl.extra.cuda.globaltimer() - begin > limit_ns:
                trap()


@triton.jit(do_not_specialize=["num_units"])
def _copy_kernel(x_ptr, address, num_units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_units.to(tl.int64) * UNIT
    to = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    tl.store(to + at, tl.load(x_ptr + at, mask, other=0), mask, cache_modifier=".wt")


@triton.jit(do_not_specialize=["value"])
def _say_kernel(address, value):
    tl.atomic_xchg(address.to(tl.pointer_type(tl.int32)), value, sem="release", scope="sys")


def send(x: torch.Tensor, turn: int, link: Sender) -> None:
    """Send x as the link's turn number `turn`, from 0: contiguous, whole units, at most a slot, else ValueError."""
    num_bytes = x.numel() * x.element_size()
    if not x.is_contiguous() or num_bytes % (4 * link.unit) or num_bytes > link.slot_bytes:
        raise ValueError(f"peer_link: {x.shape} of {x.dtype} does not fit a slot of {link.slot_bytes} bytes")
    if turn >= link.num_slots:
        _wait_kernel[(1,)](link.taken, _int32(turn - link.num_slots + 1), link.limit_ns, num_warps=1)
    words = x.view(-1).view(torch.int32)
    grid = (triton.cdiv(len(words), BLOCK),)
    address = link.slots + turn % link.num_slots * link.slot_bytes
    _copy_kernel[grid](words, address, len(words) // link.unit, link.unit, BLOCK, num_warps=NUM_WARPS)
    _say_kernel[(1,)](link.arrived, _int32(turn + 1), num_warps=1)


def receive(out: torch.Tensor, turn: int, link: Receiver) -> None:
    """Receive turn number `turn` into `out`, which is contiguous: as many bytes as it holds."""
    _wait_kernel[(1,)](link.arrived, _int32(turn + 1), link.limit_ns, num_warps=1)
    num_bytes = out.numel() * out.element_size()
    out.view(-1).view(torch.uint8).copy_(link.slots[turn % len(link.slots), :num_bytes])
    _say_kernel[(1,)](link.taken, _int32(turn + 1), num_warps=1)


def _int32(n: int) -> int:
    """n, wrapped around to the range of int32."""
    return (n + (1 << 31)) % (1 << 32) - (1 << 31)
