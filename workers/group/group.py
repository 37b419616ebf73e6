"""The ranks of a model as a group: they meet at a store, then exchange tensors by torch.distributed.

store.py is where they meet, cpu.py and cuda.py are what they exchange by; quire.workers.parallel is what layers see of it, and
quire.workers.pipeline what is linked from stage to stage. Object collectives are not used anywhere: they pickle. Made by a
worker at its start, if there are several.
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
    """The ranks together. `exchange` is what those of a stage exchange by, if they are several; `norm_exchange`, where there is
    one, sums for norms."""

    exchange: Exchange | None = None
    norm_exchange: NormExchange | None = None

    def __init__(self, store: Store, place: Place, hidden_size: int, dtype: torch.dtype, *, plain_norms: bool) -> None:
        """Meet the others: returns when all are there. Raises ExchangeFailed.

        plain_norms: the model's norms are (`NormSpec.is_plain`), and can form sums.
        """
        self._store, self._place, self._hidden_size, self._dtype = store, place, hidden_size, dtype
        self._nccl: Exchange | None = None
        if place.device.type == "cuda":
            from quire.workers.group.cuda import NcclExchange, make_norm_exchange

            nccl = self._nccl = NcclExchange(store, place)
            if place.stage_size > 1:
                self.exchange = nccl
                if plain_norms and place.stage_on_one_host:  # by model and layout alone, so all of its ranks agree
                    self.norm_exchange = make_norm_exchange(place.within_stage, hidden_size, dtype, nccl.group)
        elif place.stage_size > 1:
            self.exchange = GlooExchange(PrefixStore(f"gloo {place.stage}", store), place.within_stage)

    def links(self, max_tokens: int, max_rows: int) -> Links:
        """To the stages before and behind, for steps of this size: all ranks make theirs now, once. Raises ExchangeFailed."""
        if self._nccl is None:
            return GlooLinks(PrefixStore("links", self._store), self._place)
        if self._place.one_host and self._reach_each_other():
            from quire.workers.group.peer_links import PeerLinks

            return PeerLinks(self._place, max_tokens, self._hidden_size * self._dtype.itemsize, max_rows)
        from quire.workers.group.nccl_links import NcclLinks

        return NcclLinks(self._place, max_tokens, self._hidden_size, self._dtype, max_rows)

    def _reach_each_other(self) -> bool:
        """Whether each GPU can read the others' memory: one answer on all ranks. If not, the log has a line."""
        from quire.workers.group.cuda import all_agree, reaches_all

        if all_agree(reaches_all(self._place), self._place.device):
            return True
        if self._place.rank == 0:
            log.warning("the GPUs cannot reach each other's memory: NCCL carries what passes between stages, which is slower")
        return False

    def max_over_ranks(self, name: str, value: int) -> int:
        """The largest of all ranks' values, once each has said its own, however long some take. A name is for one time."""
        self._store.set(f"{name}/{self._place.rank}", str(value))
        return max(int(self._store.get(f"{name}/{rank}")) for rank in range(self._place.size))

    def close(self) -> None:
        """The last call, of a rank that ends: on a GPU it does not return."""
        if self._nccl is not None:
            self._nccl.close()
