"""The layers that models are made of: Linear, RMSNorm, Embedding, LMHead.

A layer owns its parameters, knows which part of the full tensors of a checkpoint they are (`Shard`), and says where each
checkpoint tensor goes (`targets`): q, k and v land straight in their rows of one fused weight, gate and up likewise.
A Linear keeps its weight in a format object, behind one `apply`, and has a slot for an adapter (LoRA).
Weights are filled by weights.py; arithmetic is in ops.py.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import nn

from quire.workers.layers import ops


class Shard(NamedTuple):
    """Which of `size` tensor-parallel parts this process holds."""

    rank: int = 0
    size: int = 1

    def split(self, n: int) -> slice:
        """This rank's part of a dimension of n, which must divide evenly."""
        if n % self.size:
            raise ValueError(f"a dimension of {n} cannot be split over {self.size} ranks")
        part = n // self.size
        return slice(self.rank * part, (self.rank + 1) * part)


WHOLE = Shard()


class Target(NamedTuple):
    """Where a checkpoint tensor goes: `full_shape` is what the file must hold, `part` what of it belongs to `tensor`."""

    tensor: torch.Tensor
    full_shape: tuple[int, ...]
    part: tuple[slice, ...]


class Adapter(Protocol):
    """What may sit in a Linear's adapter slot: adds its own product to the layer's output, in place or not."""

    def apply(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor: ...


class Format(Protocol):
    """How a layer's weight lies in memory, and the products with it."""

    def apply(self, layer: "Linear | LMHead", x: torch.Tensor) -> torch.Tensor: ...

    def apply_gated(self, layer: "Linear", x: torch.Tensor) -> torch.Tensor: ...


class Dense:
    """The plain weight format: weight [out, in] and bias [out] in the dtype of the activations."""

    def create(self, layer: "Linear", shape: tuple[int, int], bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        layer.weight = _parameter(shape, dtype, device)
        layer.bias = _parameter(shape[:1], dtype, device) if bias else None

    def apply(self, layer: "Linear | LMHead", x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, layer.weight, layer.bias)

    def apply_gated(self, layer: "Linear", x: torch.Tensor) -> torch.Tensor:
        return ops.gated_linear(x, layer.weight, layer.bias)


class Module(nn.Module):
    """nn.Module whose call is its `forward` and nothing else: no hooks, nor the microsecond that looking for them takes."""

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        if "forward" in vars(cls):
            cls.__call__ = cls.forward  # type: ignore[method-assign]


class Linear(Module):
    """y = x Wᵀ + b, x [T, in] -> y [T, out]; one or several of the checkpoint's layers side by side.

    `parts` maps the checkpoint's layer names to their output sizes, in the order of y: {"q_proj": 512, "k_proj": 128, ...}.
    `split` says which dimension tensor parallelism cuts: "out" (each part by itself) or "in".
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        split: str,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
    ):
        super().__init__()
        self.parts = parts
        self.split = split
        self.shard = shard
        self.full_in_features = in_features
        self.rows = {name: shard.split(n) if split == "out" else slice(0, n) for name, n in parts.items()}
        self.columns = shard.split(in_features) if split == "in" else slice(0, in_features)
        self.adapter: Adapter | None = None
        out_features = sum(rows.stop - rows.start for rows in self.rows.values())
        dense = Dense()
        dense.create(self, (out_features, self.columns.stop - self.columns.start), bias, dtype, device)
        self.format: Format = dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.format.apply(self, x)
        return y if self.adapter is None else self.adapter.apply(x, y)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """silu(first half of y) · second half of y."""
        return self.format.apply_gated(self, x) if self.adapter is None else ops.silu_mul(self(x))

    def before_norm(self, x: torch.Tensor) -> torch.Tensor:
        """y for a norm's `add` alone: in parts [S, T, H] that it adds up, where that pays."""
        if self.adapter is None and isinstance(self.format, Dense) and ops.splits(x, self.weight):
            return ops.linear_in_parts(x, self.weight, self.bias)
        return self(x)

    def normed(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: "RMSNorm", *, gated: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(y of norm(residual + x), gated if so asked; residual + x), in one kernel where that pays. x None: no addition."""
        if self.adapter is None and isinstance(self.format, Dense) and ops.fuses_norm(residual, self.weight):
            return ops.norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias, gated)
        h = norm(residual) if x is None else norm.add(x, residual)
        return self.gated(h) if gated else self(h), residual

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        parent = prefix.rpartition(".")[0]
        start = 0
        for name, rows in self.rows.items():
            stop = start + rows.stop - rows.start
            full = self.parts[name]
            yield (
                f"{parent}.{name}.weight",
                Target(self.weight[start:stop], (full, self.full_in_features), (rows, self.columns)),
            )
            if self.bias is not None:
                yield f"{parent}.{name}.bias", Target(self.bias[start:stop], (full,), (rows,))
            start = stop


class RMSNorm(Module):
    """RMSNorm with a weight [size]; `forward` normalises x, `add` first adds x to the residual stream, in place."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.eps = eps
        self.weight = _parameter((size,), dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return ops.add_rms_norm(x, residual, self.weight, self.eps)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        yield f"{prefix}.weight", _whole(self.weight)


class Embedding(Module):
    """Rows of weight [vocab, H] by token id; ids int32 [T] -> [T, H]. Not split: a lookup is cheap."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = _parameter((vocab_size, hidden_size), dtype, device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ops.embedding(ids, self.weight)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        yield f"{prefix}.weight", _whole(self.weight)


class LMHead(Module):
    """Logits [R, V] of hidden rows [R, H]. `tied_to` shares the embedding's weight and then owns no tensor of its own."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device, tied_to: Embedding | None = None
    ):
        super().__init__()
        self.tied = tied_to is not None
        self.weight = tied_to.weight if tied_to is not None else _parameter((vocab_size, hidden_size), dtype, device)
        self.bias = None
        self.format: Format | None = None  # of a copy of the weight, on the CPU

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.format is not None:
            return self.format.apply(self, hidden)
        return ops.linear(hidden, self.weight, None, out)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        if not self.tied:
            yield f"{prefix}.weight", _whole(self.weight)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def _whole(tensor: torch.Tensor) -> Target:
    return Target(tensor, tuple(tensor.shape), tuple(slice(0, n) for n in tensor.shape))
