"""What GPUs exchange: by NCCL through torch.distributed, and on one host by our own kernel over symmetric memory.

Where each GPU can reach the others' memory, sums are formed together with the norm behind them, one-shot or two-shot by the
number of rows and the tuning table, so all ranks agree (kernels/exchange/all_reduce_norm.py). All else is NCCL's, and over
several hosts everything. Nothing here decides that a peer is lost: NCCL's own watchdog is off, a worker's loop looks at its
device (`Device.waited_s`) and the core decides. NVLink multicast stays off: it can put a host's GPUs out of service for others.
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

ENVIRONMENT = {  # read when NCCL and symmetric memory are first used; whatever it says elsewhere
    "NCCL_NVLS_ENABLE": "0",  # no multicast, here and in the next two
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_RUNTIME_CONNECT": "0",  # all connections at the start: a capture may make none
    "NCCL_GRAPH_REGISTER": "0",  # ranks would talk while one of them captures
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog decides nothing
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor  # before torch 2.13
NEVER = timedelta(days=30)
PATIENCE = 3  # times the timeout: so long our kernel waits before it traps; the core has ended this process by then


class NcclExchange:
    """Tensors between GPUs; launched on the current stream, and captured with it."""

    def __init__(self, store: Store, place: Place) -> None:
        """All ranks meet; then those of a stage exchange, if they are several. Raises ExchangeFailed."""
        os.environ.update(ENVIRONMENT)
        os.environ["NCCL_SOCKET_IFNAME"] = f"={place.interface}"  # where ranks meet: unauthenticated
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
        """End the process: NCCL would wait for peers that are gone, or for graphs that hold its kernels."""
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class PeerNormExchange:
    """Sum and norm in one kernel; see all_reduce_norm."""

    def __init__(self, ways: Sequence[Buffers], handles: Sequence[object] = ()) -> None:
        """ways: ascending by their rows. handles: of the symmetric memory, which lives as long as they."""
        self.ways = ways
        self._handles = handles

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        pdl = late() if x.dim() == 3 else mode_for(len(x))
        buffers = next((way for way in self.ways if len(residual) <= way.max_rows), self.ways[-1])
        return all_reduce_norm(x, residual, weight, eps, buffers, pdl=pdl)


def make_norm_exchange(
    place: Place, hidden_size: int, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> PeerNormExchange | None:
    """The same answer on all ranks of the group; None, and a line in the log, where one GPU cannot reach another's memory.

    group: of the stage's ranks, None: all of them. place: of this rank in it.
    """
    one_shot, two_shot = current().exchange.max_rows(place.size)
    if one_shot == two_shot == 0:
        return None
    if not all_agree(reaches_all(place, group), place.device, group):
        if place.rank == 0:
            log.warning("the GPUs cannot reach each other's memory: NCCL carries all exchanges, which is slower")
        return None
    rows = {False: one_shot, True: two_shot}  # by whether two-shot
    made = [new_buffers(place, most, hidden_size, dtype, group, two_shot=two) for two, most in rows.items() if most]
    all_agree(True, place.device, group)  # whoever stores first finds all places empty
    return PeerNormExchange(*zip(*made, strict=True))


def new_buffers(
    place: Place, max_rows: int, hidden_size: int, dtype: torch.dtype, group: dist.ProcessGroup | None, *, two_shot: bool
) -> tuple[Buffers, object]:
    """And the handle of their shared memory. Every rank calls this; then all meet once more before the first launch."""
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
    """Memory that other GPUs can reach, once all have met by it (symm_mem.rendezvous)."""
    if symm_mem.get_backend(device) != "CUDA":  # whatever a newer torch prefers: this one gives addresses
        symm_mem.set_backend("CUDA")
    return symm_mem.empty(shape, dtype=dtype, device=device)


def reaches_all(place: Place, group: dist.ProcessGroup | None = None) -> bool:
    """Whether this GPU can reach the memory of all others of the group."""
    mine = torch.tensor([place.device.index], device=place.device)
    everyone = mine.new_empty(place.size)
    _all_gather(everyone, mine, group=group)
    others = (index for index in everyone.tolist() if index != place.device.index)
    return all(torch.cuda.can_device_access_peer(place.device, other) for other in others)


def all_agree(mine: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether it is so on all ranks of the group."""
    flag = torch.tensor([int(mine)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def _group_of_stage(place: Place) -> dist.ProcessGroup | None:
    """Of the ranks of this one's stage; None if these are all, or this one alone. All ranks make all groups, in one order."""
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
