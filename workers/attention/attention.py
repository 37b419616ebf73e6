"""Attention as the runner sees it: `begin` once a step, then `attend` once a layer. cuda.py and cpu.py are the two there are.

Below it is one object for each distinct attention spec of the model (heads, sizes, scale, window, rotary table, QK-norm); what
specs have in common they share: rotary tables, workspaces of a shape, a schedule of a shape and window. Keys and values are in
the KVCache, which is allocated anew after the measuring; nobody keeps its tensors over that.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable

import torch

from quire.kernels.attention.score_shape import ScoreShape
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.workers.attention.kv_cache import KVCache
from quire.workers.attention.latent import Latents
from quire.workers.attention.rope import cos_sin_table
from quire.workers.models.config import AttentionSpec, RopeConfig


class ModelAttention(ABC):
    """Attention of all layers of a model. A layer calls `attend` (blocks.Attend)."""

    @abstractmethod
    def begin(self, tables: SlotTables, step: StepBuffers, num_tokens: int, num_rows: int, num_decode_rows: int | None) -> None:
        """What the layers share in this step. Rows: decode rows, then prefill rows, then padding.

        num_decode_rows None: only the device knows how many there are (step.num_decode_rows), in a captured mixed step.
        """

    @abstractmethod
    def attend(
        self,
        layer: int,
        qkv: torch.Tensor | Latents,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate, write KV, attend: qkv [T, (Hq + 2 Hkv) D] -> [T, Hq D].

        Norm weights [D] where the spec has QK-norm, sinks [Hq] where it has them. Latents -> [T, Hq, L].
        """

    def kernel_specialization(self, num_tokens: int, num_rows: int) -> Hashable:
        """Mixed steps of padded sizes with equal answers run the same compiled kernels, where kernels are compiled."""
        return ()


def score_shape(spec: AttentionSpec, device: torch.device) -> ScoreShape:
    """What the layers of a spec do to their scores, but for their sinks."""
    if spec.alibi is None:
        return ScoreShape(softcap=spec.softcap)
    slopes = torch.tensor(spec.alibi.slopes, device=device)
    return ScoreShape(spec.softcap, slopes, spec.alibi.scale, spec.alibi.is_rounded)


class RotaryTables:
    """A cos|sin table float32 [max_positions, rotary_dim] for each rotary embedding that a model has, and one of none."""

    def __init__(self, cache: KVCache, max_positions: int, device: torch.device):
        self._tables: dict[tuple[RopeConfig | None, int], torch.Tensor] = {}
        for spec in cache.own_specs:
            if (spec.rope, spec.head_dim) not in self._tables:
                self._tables[spec.rope, spec.head_dim] = cos_sin_table(spec, max_positions, device)

    def __getitem__(self, spec: AttentionSpec) -> torch.Tensor:
        return self._tables[spec.rope, spec.head_dim]
