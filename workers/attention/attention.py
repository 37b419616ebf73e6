"""Attention as the runner sees it: `begin` once a step, then `attend` once a layer. cuda.py and cpu.py implement it.

Inside there is one object for each distinct attention spec of the model (heads, sizes, scale, window, rotary table, QK-norm).
Specs share what they can: rotary tables, the workspaces of a shape, the schedule of a shape and window. Keys and values are in
the KVCache, which is allocated anew after memory has been measured, so its tensors must not be kept across that.
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
    """Attention of all layers of a model. A layer calls `attend` (step_context.Attend)."""

    @abstractmethod
    def begin(
        self,
        tables: SlotTables,
        step: StepBuffers,
        num_tokens: int,
        num_rows: int,
        num_decode_rows: int | None,
        windows: bool = False,
        has_more_tokens: bool = False,
    ) -> None:
        """Prepare what the layers share in this step. Rows: decode rows, then prefill rows, then padding.

        num_decode_rows None: a captured mixed step; their number is on the device only (step.num_decode_rows). windows: decode
        rows may have several tokens; their numbers are in step.query_start. has_more_tokens: and together more than num_rows.
        """

    def begin_writes(self, tables: SlotTables, step: StepBuffers, num_tokens: int, num_rows: int) -> None:
        """Prepare a step of which only keys and values are wanted: what `attend` returns may hold anything."""
        self.begin(tables, step, num_tokens, num_rows, None)

    @abstractmethod
    def attend(
        self,
        layer: int,
        qkv: torch.Tensor | Latents,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate, write KV, attend: qkv [T, (Hq + 2 Hkv) D] -> [T, Hq D]; Latents -> [T, Hq, L].

        q_norm, k_norm: weights [D] if the spec has QK-norm; sinks: [Hq] if the spec has some.
        """

    def kernel_specialization(self, num_tokens: int, num_rows: int, windows: bool = False) -> Hashable:
        """Mixed steps of padded sizes with equal values here run the same compiled kernels; () if none are compiled."""
        return ()


def score_shape(spec: AttentionSpec, device: torch.device) -> ScoreShape:
    """The changes that the layers of a spec make to their scores, without their sinks."""
    if spec.alibi is None:
        return ScoreShape(softcap=spec.softcap)
    slopes = torch.tensor(spec.alibi.slopes, device=device)
    return ScoreShape(spec.softcap, slopes, spec.alibi.scale, spec.alibi.is_rounded)


class RotaryTables:
    """A cos|sin table, float32 [max_positions, rotary_dim], for each rotary embedding of a model; [.., 0] for none."""

    def __init__(self, cache: KVCache, max_positions: int, device: torch.device):
        self._tables: dict[tuple[RopeConfig | None, int], torch.Tensor] = {}
        for spec in cache.own_specs:
            if (spec.rope, spec.head_dim) not in self._tables:
                self._tables[spec.rope, spec.head_dim] = cos_sin_table(spec, max_positions, device)

    def __getitem__(self, spec: AttentionSpec) -> torch.Tensor:
        return self._tables[spec.rope, spec.head_dim]
