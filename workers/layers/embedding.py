"""Embedding: rows of a table by token id. An LM head that is tied to it shares its weight (Linear's `tied_to`)."""

from collections.abc import Iterator

import torch

from quire.workers.layers import ops
from quire.workers.layers.adapter import Adapter, Switch
from quire.workers.layers.module import WeightOwner, new_parameter
from quire.workers.loading.weight_loader import WeightLoader, copied
from quire.workers.shard import whole


class Embedding(WeightOwner):
    """scale * rows of weight [vocab, H] by token id; ids int32 [T] -> [T, H]. All ranks have all of it: a lookup is cheap."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float = 1.0,
        table_dtype: torch.dtype | None = None,
    ):
        """dtype: of the result; table_dtype: of the weight on a CPU, if that is another one."""
        super().__init__()
        self.scale, self._dtype = scale, dtype
        self._adapter: Adapter | None = None
        self.weight = new_parameter((vocab_size, hidden_size), table_dtype or dtype, device)

    def set_adapter(self, adapter: Adapter, switch: Switch) -> None:
        """As for a Linear: it adds to the rows in steps in which the switch is on."""
        self._adapter, self._switch = adapter, switch

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self._adapter is not None and self._switch.is_active:
            return self._adapter.apply(ids, self._rows(ids))
        return self._rows(ids)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.weight.dtype == self._dtype:
            return ops.embedding(ids, self.weight, self.scale)
        rows = ops.embedding(ids, self.weight).to(self._dtype)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        vocab_size, hidden_size = self.weight.shape
        yield f"{name}.weight", copied(self.weight, (whole(vocab_size), whole(hidden_size)))
