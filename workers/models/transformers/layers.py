"""Modules that replace those of a transformers model: its linear layers, alone or joined, and the parameters that are left.

Modules, and so tensors, keep transformers' names. Inputs and outputs are [1, T, ...].
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quire.kernels.elementwise.activation_cpu import Activation
from quire.workers.layers import ops
from quire.workers.layers.embedding import Embedding
from quire.workers.layers.linear import Linear
from quire.workers.layers.module import Module, WeightOwner
from quire.workers.layers.norm import LayerNorm, RMSNorm
from quire.workers.loading.weight_loader import FLOATS, WeightLoader, copied
from quire.workers.shard import whole

INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")


class FlatLinear(Linear):
    """A Linear for [..., in] -> [..., out]."""

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        y = self.outer.product(x.reshape(-1, x.shape[-1]), out)
        return y.view(*x.shape[:-1], y.shape[-1])


class JoinedLinear(FlatLinear):
    """Several layers of the same input as one product. Its `PartOfJoined` replace the layers, and return their columns.

    The layer called first computes all; the others then get their slices, if they are called with the same tensor.
    """

    def share(self, sizes: list[int]) -> list["PartOfJoined"]:
        """The modules that replace the layers, in the order of the product's columns."""
        self._input: torch.Tensor | None = None
        self._columns: tuple[torch.Tensor, ...] = ()
        self._sizes, self._missing = sizes, 0
        return [PartOfJoined(self, i) for i in range(len(sizes))]

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if self._input is not x:
            self._input, self._missing = x, len(self._sizes)
            self._columns = self(x).split(self._sizes, -1)
        y = self._columns[index]
        self._missing -= 1
        if not self._missing:
            self._input, self._columns = None, ()
        return y


class PartOfJoined(Module):
    """Replaces one layer of a JoinedLinear."""

    def __init__(self, joined: JoinedLinear, index: int):
        super().__init__()
        self.__dict__["_joined"] = joined  # not a child of this module: it is one of the parent's
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.__dict__["_joined"].part(self._index, x)  # type: ignore[no-any-return]


class FlatRMSNorm(RMSNorm):
    """An RMSNorm of [..., size]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


class FlatLayerNorm(LayerNorm):
    """A LayerNorm of [..., size]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


class FlatEmbedding(Embedding):
    """Rows for ids [...]. It has the sizes and the padding_idx of the module that it replaces, since models read them."""

    def __init__(self, module: nn.Embedding, dtype: torch.dtype, device: torch.device):
        super().__init__(module.num_embeddings, module.embedding_dim, dtype, device)
        self.num_embeddings, self.embedding_dim, self.padding_idx = (
            module.num_embeddings, module.embedding_dim, module.padding_idx,
        )  # fmt: skip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids.reshape(-1).int()).view(*ids.shape, self.embedding_dim)


class FusedMLP(Module):
    """down(activation(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation):
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self._activation, self._is_silu = activation, activation == "silu"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.reshape(-1, x.shape[-1])
        h = self.gate_up.gated(h) if self._is_silu else ops.activate_mul(self.gate_up(h), self._activation)
        return self.down(h).view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


class Rest(WeightOwner):
    """Parameters and buffers of a module that stays transformers' own; it is a child of that module, named `rest`."""

    def __init__(self, module: nn.Module, device: torch.device, dtypes: dict[str, torch.dtype], shared: set[str]):
        """dtypes: of its parameters. shared: those that another module owns."""
        super().__init__()
        self._names = []
        for name, dtype in dtypes.items():
            tensor = nn.Parameter(torch.empty(module._parameters[name].shape, dtype=dtype, device=device), requires_grad=False)  # type: ignore[union-attr]
            module._parameters[name] = tensor
            if name not in shared:
                self._names.append(name)
                setattr(self, f"of_{name}", tensor)
        self._buffers_kept: dict[str, torch.Tensor] = {}
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer = buffer.to(device)
                if name not in module._non_persistent_buffers_set:
                    self._buffers_kept[name] = buffer

    def loaders(self, name: str) -> Iterator[tuple[str, WeightLoader]]:
        prefix = name.removesuffix("rest")
        for own in self._names:
            tensor: Any = getattr(self, f"of_{own}")
            yield prefix + own, _loader(tensor)
        for own, buffer in self._buffers_kept.items():
            is_float = buffer.is_floating_point()
            yield prefix + own, _loader(buffer)._replace(dtypes=FLOATS if is_float else INTEGERS, is_optional=not is_float)

    def fill_dummy(self, limit: float, generator: torch.Generator) -> None:
        for name in self._names:
            parameter = getattr(self, f"of_{name}")
            if parameter.dim() == 1 and name == "weight":  # most likely a norm's
                parameter.fill_(1.0)
            else:
                parameter.uniform_(-limit, limit, generator=generator)


def _loader(tensor: torch.Tensor) -> WeightLoader:
    if tensor.dim():
        return copied(tensor, tuple(map(whole, tensor.shape)))
    return WeightLoader((), (), FLOATS, lambda piece, row: tensor.copy_(piece.reshape(())), or_shapes=((1,),))  # type: ignore[arg-type, func-returns-value]
