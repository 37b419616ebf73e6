"""Exchanges of ranks on GPUs: by NCCL through torch.distributed, and on one host by our own kernel over symmetric memory.

If each GPU can access the others' memory, one kernel computes sums together with the norm that follows, one-shot or two-shot by
the number of rows and the tuning table, so that all ranks agree (kernels/exchange/all_reduce_norm.py). NCCL does everything
else, and everything across hosts. Nothing here decides that a peer is lost: NCCL's own watchdog is off, a worker's loop watches
its device (`Device.waited_s`), and the core decides. NVLink multicast stays off: it can put a host's GPUs out of service.
"""

import logging
import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import Store

from quire.kernels.exchange.all_reduce_norm import (
    Buffers,
    all_reduce_norm,
    empty,
    places_shape,
    word_dtype,
)
from quire.kernels.triton_support.dependent_launch import late, mode_for
from quire.kernels.tuning.current import current
from quire.workers.group.place import ExchangeFailed, Place, first_sentence

log = logging.getLogger("quire.workers")

ENVIRONMENT = {  # read when NCCL and symmetric memory are first used; it overrides the operator's values
    "NCCL_NVLS_ENABLE": "0",  # no multicast; so do the next two
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_RUNTIME_CONNECT": "0",  # connect everything at start: no connection can be made during a capture
    "NCCL_GRAPH_REGISTER": "0",  # registration would need other ranks while one of them captures
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog must not end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor  # before torch 2.13
NEVER = timedelta(days=30)
PATIENCE = 3  # times the timeout: how long our kernel waits before it traps; by then the core has ended this process


class NcclExchange:
    """Collectives between GPUs, launched on the current stream and captured with it."""

    def __init__(self, store: Store, place: Place) -> None:
        """Meet all ranks; the later collectives are among the ranks of this stage. Raises ExchangeFailed."""
        os.environ.update(ENVIRONMENT)
        os.environ["NCCL_SOCKET_IFNAME"] = f"={place.interface}"  # where ranks meet, unauthenticated
        self._size = place.stage_size
        try:
            dist.init_process_group(
                "nccl", store=store, rank=place.rank, world_size=place.size, timeout=NEVER, device_id=place.device
            )
            dist.all_reduce(torch.zeros(1, device=place.device))
            self.group = _group_of_stage(place)
            torch.cuda.synchronize(place.device)
        except RuntimeError as error:
            raise ExchangeFailed(f"NCCL cannot connect the GPUs: {first_sentence(error)}") from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((self._size, *x.shape))
        _all_gather(out.view(-1), x.contiguous().view(-1), group=self.group)
        return out

    def close(self) -> None:
        """End the process at once: a normal exit would let NCCL wait for lost peers, or for graphs that contain its kernels."""
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class PeerNormExchange:
    """Sum and norm in one kernel; see all_reduce_norm."""

    def __init__(self, ways: Sequence[Buffers], handles: Sequence[object] = ()) -> None:
        """ways: one-shot and two-shot buffers, ascending by max_rows. handles: keep their symmetric memory alive."""
        self.ways = ways
        self._handles = handles

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        pdl = late() if x.dim() == 3 else mode_for(len(x))
        buffers = next((way for way in self.ways if len(residual) <= way.max_rows), self.ways[-1])
        return all_reduce_norm(x, residual, weight, eps, buffers, pdl=pdl)


def make_norm_exchange(
    place: Place, hidden_size: int, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> PeerNormExchange | None:
    """The exchange that norms use; None, with a log line, if a GPU cannot access another's memory. All ranks agree.

    group: the stage's ranks; None: all ranks. place: this rank's place in the group.
    """
    one_shot, two_shot = current().exchange.max_rows(place.size)
    if one_shot == two_shot == 0:
        return None
    if not all_agree(reaches_all(place, group), place.device, group):
        if place.rank == 0:
            log.warning("the GPUs cannot reach each other's memory: NCCL carries all exchanges, which is slower")
        return None
    rows = {False: one_shot, True: two_shot}  # keys: whether two-shot
    made = [new_buffers(place, most, hidden_size, dtype, group, two_shot=two) for two, most in rows.items() if most]
    all_agree(True, place.device, group)  # so that all places are empty before a rank stores into them
    return PeerNormExchange(*zip(*made, strict=True))


def new_buffers(
    place: Place, max_rows: int, hidden_size: int, dtype: torch.dtype, group: dist.ProcessGroup | None, *, two_shot: bool
) -> tuple[Buffers, object]:
    """Buffers, and the handle of their shared memory. Every rank calls this; all must meet again before the first launch."""
    shape = places_shape(place.size, max_rows, hidden_size, two_shot=two_shot)
    places = new_shared(shape, word_dtype(dtype), place.device)
    empty(places)
    torch.cuda.synchronize(place.device)
    handle = symm_mem.rendezvous(places, group or dist.group.WORLD)  # type: ignore[arg-type]
    peers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=place.device)
    turns = torch.zeros(max_rows, dtype=torch.int32, device=place.device)
    limit_ns = int(PATIENCE * place.timeout_s * 1e9)
    return Buffers(place.rank, place.size, max_rows, two_shot, places, peers, turns, limit_ns), handle


def new_shared(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that other GPUs can access after symm_mem.rendezvous."""
    if symm_mem.get_backend(device) != "CUDA":  # newer versions of torch may prefer another, but this one gives addresses
        symm_mem.set_backend("CUDA")
    return symm_mem.empty(shape, dtype=dtype, device=device)


def reaches_all(place: Place, group: dist.ProcessGroup | None = None) -> bool:
    """Whether this GPU can access the memory of all others in the group."""
    mine = torch.tensor([place.device.index], device=place.device)
    everyone = mine.new_empty(place.size)
    _all_gather(everyone, mine, group=group)
    others = (index for index in everyone.tolist() if index != place.device.index)
    return all(torch.cuda.can_device_access_peer(place.device, other) for other in others)


def all_agree(mine: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether `mine` is true on all ranks of the group."""
    flag = torch.tensor([int(mine)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def _group_of_stage(place: Place) -> dist.ProcessGroup | None:
    """The ranks of this stage; None if these are all ranks, or one. Every rank creates all groups, in the same order."""
    if place.stages == 1 or place.stage_size == 1:
        return None
    own = None
    for first in range(0, place.size, place.stage_size):
        ranks = list(range(first, first + place.stage_size))
        group = dist.new_group(ranks, timeout=NEVER, device_id=place.device)
        if place.rank in ranks:
            own = group
            dist.all_reduce(torch.zeros(1, device=place.device), group=own)
    return own
