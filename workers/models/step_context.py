"""StepContext: all that a layer gets of a step besides its input, and `Attend`, the attention that it calls.

The runner makes a context for each forward (runner.py). A layer takes from it what it needs: attention is a callable, since it
needs the cache and metadata of its own; other layers read the rows' tensors. All tensors have padded sizes and are on the
device. A captured step keeps their addresses, so no layer may branch on their values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.kernels.recurrent.rows import Windows
from quire.kernels.step.tables import StepBuffers
from quire.workers.attention.latent import Latents


class Attend(Protocol):
    """Attention of `layer`: qkv [T, (Hq + 2 Hkv) D] = q|k|v -> [T, Hq D], keys and values written to the cache.

    For a layer that reads the keys and values of another (`shares`), qkv is q only. q_norm, k_norm: weights [D] of QK-norm
    (applied to each head before the rotation); sinks [Hq]: attention sinks; None if the model has none. Latent attention
    (mla.py) passes `Latents` and gets [T, Hq, L].
    """

    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor | Latents,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class StepStates:
    """The recurrent states of a step's rows, by their ids: a decode row reads and writes its own, a chunk begins with `first`,
    and leaves its last state as its own and, if `last` is not 0, there, too."""

    own: torch.Tensor  # int32 [R]; 0 of padded rows
    first: torch.Tensor  # int32 [R]; of decode rows their own; 0 of chunks: zeros, which are not read
    last: torch.Tensor  # int32 [R]; 0: none
    tensors: Callable[[int], tuple[torch.Tensor, ...]]  # of a layer: those of its spec, each [num_states, *shape]
    windows: Callable[[int], Windows] | None = None  # of a layer, if decode rows have windows


@dataclass(frozen=True, slots=True)
class StepContext:
    """A step of T tokens in R rows: decode rows, then prefill rows, then padding."""

    attend: Attend
    positions: torch.Tensor  # int32 [T]
    row_slots: torch.Tensor  # int32 [R]; of padded rows the dummy slot
    query_start: torch.Tensor  # int32 [R + 1]: each row's first token, and the end; padded rows have no tokens
    decode_limit: torch.Tensor  # int32 [1]: number of decode rows
    num_decode_rows: int | None  # the same, padded; None: a captured mixed step, whose number is on the device only
    states: StepStates | None = None  # None: the model has none
    has_adapters: bool = False  # some row has a LoRA adapter: products are made one by one

    @property
    def is_decode(self) -> bool:
        """Whether all rows are decode rows, which have one token each."""
        return self.num_decode_rows == len(self.row_slots)


def step_context(
    attend: Attend,
    step: StepBuffers,
    num_tokens: int,
    num_rows: int,
    num_decode_rows: int | None,
    states: StepStates | None = None,
    has_adapters: bool = False,
) -> StepContext:
    """The context of the step whose inputs are in `step`, of these padded sizes."""
    return StepContext(
        attend,
        step.positions[:num_tokens],
        step.row_slots[:num_rows],
        step.query_start[: num_rows + 1],
        step.num_decode_rows,
        num_decode_rows,
        states,
        has_adapters,
    )
