"""The ranks of a model as a group: they meet at a store, then exchange tensors by torch.distributed.

store.py is where they meet, cpu.py and cuda.py are what they exchange by; quire.workers.parallel is what layers see of it.
Object collectives are not used anywhere: they pickle. Made by a worker at its start, if there are several.
"""

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from quire.workers.group.cpu import GlooExchange
from quire.workers.group.place import Place
from quire.workers.parallel import Exchange, NormExchange


class Group:
    """The ranks together. `exchange` is what their layers exchange by; `norm_exchange`, where there is one, sums for norms."""

    exchange: Exchange
    norm_exchange: NormExchange | None = None

    def __init__(self, store: Store, place: Place, hidden_size: int, dtype: torch.dtype) -> None:
        """Meet the others: returns when all are there. Raises ExchangeFailed."""
        self._store, self._place = store, place
        if place.device.type == "cpu":
            self.exchange = GlooExchange(PrefixStore("gloo", store), place)
        else:
            from quire.workers.group.cuda import NcclExchange, make_norm_exchange

            self.exchange = NcclExchange(store, place)
            if place.one_host:  # by the layout alone, so all ranks agree
                self.norm_exchange = make_norm_exchange(place, hidden_size, dtype)

    def most(self, name: str, value: int) -> int:
        """The largest of all ranks' values, once each has said its own, however long some take. A name is for one time."""
        self._store.set(f"{name}/{self._place.rank}", str(value))
        return max(int(self._store.get(f"{name}/{rank}")) for rank in range(self._place.size))
