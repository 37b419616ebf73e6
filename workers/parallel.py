"""Tensor parallelism as a model sees it: which rank this is, what it holds of each dimension, and where ranks exchange.

`build_model` is given a `Parallel`, and layers ask it for their sizes. A layer whose results are partial (its input dimension
is split) sums them over the ranks by `all_reduce`; the LM head is split over the vocabulary, and who needs all of it asks for
`all_logits`. How tensors travel is the `Exchange`'s business. Of a model in stages (pipeline parallelism) the ranks here are
those of one `Stage`, which has some of the layers; stages.py assigns them.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from quire.kernels.step.tables import SAMPLER_BLOCK
from quire.workers.shard import Shard, even_split, whole


@dataclass(frozen=True)
class Stage:
    """One of `count` parts of a model, one after the other. The first has the embedding, too, and the last the head."""

    index: int = 0
    count: int = 1
    layers: range = range(1 << 30)  # of the model's

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


class Exchange(Protocol):
    """What the ranks of a group do together. Every rank calls the same, in the same order."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x; may be x itself. All ranks have the same bits."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x, of one shape, in the order of the ranks: [size, *x.shape]."""
        ...

    def close(self) -> None:
        """The last call, of a rank that ends."""
        ...


class NormExchange(Protocol):
    """Sums over the ranks that norms behind them form themselves: on GPUs, in models with plain norms (`NormSpec.is_plain`)."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += the sum of all ranks' x, in place; the norm of it. x [T, H], or in parts, float32 [S, T, H]."""
        ...


class Partial(NamedTuple):
    """What stands for a sum over the ranks until a norm's `add` forms it: this rank's x, and who sums."""

    x: torch.Tensor  # [T, H], or in parts as norms take them (kernels/elementwise/norm.py)
    exchange: NormExchange


class ExpertCounts(Protocol):
    """Where a rank counts how many tokens each expert gets (expert_load.py)."""

    def new(self, num_experts: int) -> torch.Tensor:
        """A layer's counts, int32 [num_experts], to be added to."""
        ...

    def begin(self, tokens: torch.Tensor, rows: torch.Tensor, num_tokens: int) -> None:
        """A step whose tokens, padded to num_tokens, and rows are so many: int32 [1] each, on the device."""
        ...

    def real_rows(self, num_rows: int) -> torch.Tensor:
        """int32 [1]: how many of a layer's num_rows rows in this step are tokens, not padding."""
        ...

    def take(self) -> bytes:
        """What was counted since the last call, for the core (ipc.messages.stats.ExpertTokens)."""
        ...


class Parallel:
    """Rank `rank` of `size` of a stage, on `device`. Without an exchange a model of several ranks can be built, but not run."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | str = "cpu",
        exchange: Exchange | None = None,
        norm_exchange: NormExchange | None = None,
        stage: Stage = Stage(),
        *,
        expert_parallel: bool = False,
    ) -> None:
        """expert_parallel: each rank has whole experts, not a part of each (--enable-expert-parallel)."""
        if not 0 <= rank < size:
            raise ValueError(f"there is no rank {rank} among {size}")
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self._exchange = exchange
        self.norm_exchange = norm_exchange
        self.expert_parallel = expert_parallel
        self.expert_load: ExpertCounts | None = None  # of the rank that counts for all of its stage
        self.stage = stage

    def split(self, n: int) -> Shard:
        """This rank's part of a dimension of n. Raises ValueError if it does not divide evenly."""
        if n % self.size:
            raise ValueError(f"a dimension of {n} cannot be split over {self.size} ranks")
        size = n // self.size
        return Shard(n, self.rank * size, (self.rank + 1) * size)

    def experts(self, n: int) -> Shard:
        """This rank's of n experts: all, of which it has a part each, or its share of whole ones."""
        return even_split(n, self.rank, self.size) if self.expert_parallel else whole(n)

    def of_each_expert(self, n: int) -> Shard:
        """This rank's of n, an expert's width. Raises ValueError as `split`."""
        return whole(n) if self.expert_parallel else self.split(n)

    def kv_heads(self, n: int) -> Shard:
        """This rank's of n KV heads; where they are fewer than ranks, neighbours hold the same one. Query heads are split."""
        if self.size % n == 0:
            first = self.rank * n // self.size
            return Shard(n, first, first + 1)
        return self.split(n)

    def vocabulary(self, n: int) -> Shard:
        """This rank's of n tokens: whole SAMPLER_BLOCKs, as many on each rank but the last, which has what is left.

        Where there are too few blocks for all, every rank has the whole.
        """
        stride = self._vocabulary_stride(n)
        if stride * (self.size - 1) >= n:
            return whole(n)
        return Shard(n, self.rank * stride, min((self.rank + 1) * stride, n))

    def _vocabulary_stride(self, n: int) -> int:
        blocks = -(-n // SAMPLER_BLOCK)
        return -(-blocks // self.size) * SAMPLER_BLOCK

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x."""
        return x if self.size == 1 else self._joined().all_reduce(x)

    def all_logits(self, x: torch.Tensor, n: int) -> torch.Tensor:
        """All ranks' columns x [R, vocabulary(n)] side by side: [R, n]; x itself where every rank has the whole."""
        if x.shape[1] == n:
            return x
        stride = self._vocabulary_stride(n)
        x = x if x.shape[1] == stride else F.pad(x, (0, stride - x.shape[1]))
        out = x.new_empty(len(x), n)
        for rank, columns in enumerate(self._joined().all_gather(x)):
            start = rank * stride
            out[:, start : start + stride] = columns[:, : n - start]
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x, of one shape: [size, *x.shape]."""
        return x.unsqueeze(0) if self.size == 1 else self._joined().all_gather(x)

    def _joined(self) -> Exchange:
        if self._exchange is None:
            raise RuntimeError(f"rank {self.rank} of {self.size} has no exchange with the others")
        return self._exchange
