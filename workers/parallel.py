"""Tensor parallelism as a model sees it: which rank this is, its shard of each dimension, and where ranks exchange.

`build_model` is given a `Parallel`, and layers ask it for their sizes. A layer with a split input dimension computes partial
sums, and adds them up over the ranks by `all_reduce`. The LM head is split over the vocabulary; code that needs all logits
calls `all_logits`. An `Exchange` moves the tensors. In a model of several stages (pipeline parallelism) the ranks here are
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
    """One of `count` pipeline stages: consecutive layers of the model. The first also has the embedding, the last the head."""

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
    """Collective operations of a group's ranks. Every rank calls the same ones in the same order."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x; may be x itself. All ranks have the same bits."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x, of one shape, in the order of the ranks: [size, *x.shape]."""
        ...

    def close(self) -> None:
        """To be called last, by a rank that ends."""
        ...


class NormExchange(Protocol):
    """All-reduces that the following norm computes itself: on GPUs, in models with plain norms (`NormSpec.is_plain`)."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += the sum of all ranks' x, in place; returns its norm. x [T, H], or split-K sums, float32 [S, T, H]."""
        ...


class Partial(NamedTuple):
    """A sum over the ranks that a norm's `add` will compute: this rank's x, and the exchange that sums."""

    x: torch.Tensor  # [T, H], or split-K partial sums (kernels/elementwise/norm.py)
    exchange: NormExchange


class ExpertCounts(Protocol):
    """A rank's counts of the tokens that each expert gets (expert_load.py)."""

    def new(self, num_experts: int) -> torch.Tensor:
        """A layer's counts, int32 [num_experts], to be added to."""
        ...

    def begin(self, tokens: torch.Tensor, rows: torch.Tensor, num_tokens: int) -> None:
        """A step begins, padded to num_tokens. tokens, rows: its real numbers of these, int32 [1] each, on the device."""
        ...

    def real_rows(self, num_rows: int) -> torch.Tensor:
        """int32 [1]: how many of a layer's num_rows rows in this step are tokens, not padding."""
        ...

    def take(self) -> bytes:
        """The counts since the last call, encoded for the core (ipc.messages.stats.ExpertTokens)."""
        ...


class Parallel:
    """Rank `rank` of a stage's `size`, on `device`. Without an exchange a model of several ranks can be built but not run."""

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
        """expert_parallel: each rank has whole experts, not a shard of each (--enable-expert-parallel)."""
        if not 0 <= rank < size:
            raise ValueError(f"there is no rank {rank} among {size}")
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self._exchange = exchange
        self.norm_exchange = norm_exchange
        self.expert_parallel = expert_parallel
        self.expert_load: ExpertCounts | None = None  # on the rank that counts for its whole stage
        self.stage = stage

    def of_drafter(self) -> "Parallel":
        """The same ranks for a draft model, which is split over them as the model is. Its experts are not counted, and its
        norms do not sum: the buffers for that have the size of the model's hidden states."""
        return Parallel(self.rank, self.size, self.device, self._exchange, stage=self.stage)

    def split(self, n: int) -> Shard:
        """This rank's shard of a dimension of n. Raises ValueError if it does not divide evenly."""
        if n % self.size:
            raise ValueError(f"a dimension of {n} cannot be split over {self.size} ranks")
        size = n // self.size
        return Shard(n, self.rank * size, (self.rank + 1) * size)

    def experts(self, n: int) -> Shard:
        """The experts of n that this rank has: all, with a shard of each; under expert parallelism some, each of them whole."""
        return even_split(n, self.rank, self.size) if self.expert_parallel else whole(n)

    def of_each_expert(self, n: int) -> Shard:
        """This rank's shard of an expert's width n: all of it under expert parallelism. Raises ValueError like `split`."""
        return whole(n) if self.expert_parallel else self.split(n)

    def kv_heads(self, n: int) -> Shard:
        """This rank's shard of n KV heads; if there are fewer heads than ranks, neighboring ranks hold the same one."""
        if self.size % n == 0:
            first = self.rank * n // self.size
            return Shard(n, first, first + 1)
        return self.split(n)

    def vocabulary(self, n: int) -> Shard:
        """This rank's shard of n tokens: equally many whole SAMPLER_BLOCKs on each rank; the last rank has the rest.

        If there are too few blocks to give each rank one, every rank has the whole vocabulary.
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
        """All ranks' columns x [R, vocabulary(n)] side by side: [R, n]; x itself if every rank has the whole vocabulary."""
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
