"""The ranks of a model as a group: they meet at a store, then exchange tensors by torch.distributed.

store.py is where they meet; cpu.py and cuda.py do the exchanges. Layers see them through quire.workers.parallel, and stages
through quire.workers.pipeline. Object collectives are not used anywhere, since they pickle. Made at a worker's start.
"""

import logging

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from quire.workers.group.cpu import GlooExchange, GlooLinks
from quire.workers.group.place import Place
from quire.workers.parallel import Exchange, NormExchange
from quire.workers.pipeline import Links

log = logging.getLogger("quire.workers")


class Group:
    """All ranks of a model. exchange: collectives of this stage's ranks, None if it has one rank. norm_exchange: sums that
    norms compute, None if there is none."""

    exchange: Exchange | None = None
    norm_exchange: NormExchange | None = None

    def __init__(self, store: Store, place: Place, hidden_size: int, dtype: torch.dtype, *, plain_norms: bool) -> None:
        """Meet the other ranks: returns when all are there. Raises ExchangeFailed.

        plain_norms: the model's norms are plain (`NormSpec.is_plain`), so they can compute sums.
        """
        self._store, self._place, self._hidden_size, self._dtype = store, place, hidden_size, dtype
        self._nccl: Exchange | None = None
        if place.device.type == "cuda":
            from quire.workers.group.cuda import NcclExchange, make_norm_exchange

            nccl = self._nccl = NcclExchange(store, place)
            if place.stage_size > 1:
                self.exchange = nccl
                if plain_norms and place.stage_on_one_host:  # follows from model and layout, so all ranks agree
                    self.norm_exchange = make_norm_exchange(place.within_stage, hidden_size, dtype, nccl.group)
        elif place.stage_size > 1:
            self.exchange = GlooExchange(PrefixStore(f"gloo {place.stage}", store), place.within_stage)

    def links(self, max_tokens: int, max_rows: int) -> Links:
        """Links to the stages before and after, for steps up to this size. All ranks call this once. Raises ExchangeFailed."""
        if self._nccl is None:
            return GlooLinks(PrefixStore("links", self._store), self._place)
        if self._place.one_host and self._reach_each_other():
            from quire.workers.group.peer_links import PeerLinks

            return PeerLinks(self._place, max_tokens, self._hidden_size * self._dtype.itemsize, max_rows)
        from quire.workers.group.nccl_links import NcclLinks

        return NcclLinks(self._place, max_tokens, self._hidden_size, self._dtype, max_rows)

    def _reach_each_other(self) -> bool:
        """Whether each GPU can access the others' memory; all ranks get the same answer. If not, a line is logged."""
        from quire.workers.group.cuda import all_agree, reaches_all

        if all_agree(reaches_all(self._place), self._place.device):
            return True
        if self._place.rank == 0:
            log.warning("the GPUs cannot reach each other's memory: NCCL carries what passes between stages, which is slower")
        return False

    def max_over_ranks(self, name: str, value: int) -> int:
        """The largest of all ranks' values; waits until every rank has called this. A name can be used only once."""
        self._store.set(f"{name}/{self._place.rank}", str(value))
        return max(int(self._store.get(f"{name}/{rank}")) for rank in range(self._place.size))

    def close(self) -> None:
        """To be called last, by a rank that ends; on a GPU it does not return."""
        if self._nccl is not None:
            self._nccl.close()
